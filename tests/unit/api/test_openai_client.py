"""The client for OpenAI-compatible servers, against one that answers as vLLM does."""

from __future__ import annotations

import pytest

from doubles.json_server import Answer, serving
from outrider.core.errors import ConfigError, MachineError
from outrider.plugins.running.clients import Server
from outrider_lab.bench.peers.clients import OpenAIClient, Piece

MODELS = Answer.of({"object": "list", "data": [{"id": "first"}, {"id": "second"}]})
COMPLETION = Answer.of(
    {"choices": [{"index": 0, "text": " jumps"}], "usage": {"completion_tokens": 3}}
)


def client(url: str) -> OpenAIClient:
    return OpenAIClient(Server(url=url))


def test_models_and_a_greedy_completion() -> None:
    with serving({"GET /v1/models": MODELS, "POST /v1/completions": COMPLETION}) as server:
        assert client(server.url).models() == ["first", "second"]
        reply = client(server.url).complete("second", "The fox", max_tokens=5)
        assert (reply.text, reply.num_tokens) == (" jumps", 3)
        assert 0 < reply.seconds < 60
        assert reply.tokens_per_second == pytest.approx(3 / reply.seconds)
        assert server.asked[-1].body == {
            "model": "second",
            "prompt": "The fox",
            "max_tokens": 5,
            "temperature": 0,
        }


def test_without_a_name_the_first_model_is_asked() -> None:
    with serving({"GET /v1/models": MODELS, "POST /v1/completions": COMPLETION}) as server:
        client(server.url).complete("", "x", max_tokens=1)
        assert server.asked[-1].body["model"] == "first"


def test_a_server_without_models() -> None:
    with (
        serving({"GET /v1/models": Answer.of({"data": []})}) as server,
        pytest.raises(ConfigError, match="serves no model"),
    ):
        client(server.url).complete("", "x", max_tokens=1)


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [1], "usage": 3}])
def test_an_answer_without_a_completion(answer: object) -> None:
    with (
        serving({"POST /v1/completions": Answer.of(answer)}) as server,
        pytest.raises(MachineError, match="without a completion"),
    ):
        client(server.url).complete("m", "x", max_tokens=1)


def test_a_server_of_another_kind() -> None:
    with serving({"GET /v1/models": Answer.of({"models": []})}) as server:
        with pytest.raises(MachineError, match="does not list models") as caught:
            client(server.url).models()
        assert caught.value.hint


def test_a_completion_comes_in_pieces_with_their_moments() -> None:
    lines = [
        ": a comment",
        'data: {"choices": [{"text": " jumps"}]}',
        'data: {"choices": [{"text": " over"}], "usage": null}',
        'data: {"choices": [], "usage": {"completion_tokens": 2}}',
        "data: [DONE]",
    ]
    stream = Answer("\n\n".join(lines).encode() + b"\n\n")
    with serving({"POST /v1/completions": stream}) as server:
        pieces = list(client(server.url).stream("m", "The fox", max_tokens=5))
        assert server.asked[-1].body["stream_options"] == {"include_usage": True}
    assert [piece.text for piece in pieces] == [" jumps", " over", ""]
    assert [piece.num_tokens for piece in pieces] == [None, None, 2]
    moments = [piece.seconds for piece in pieces]
    assert moments == sorted(moments)
    assert moments[0] > 0
    assert Piece("x", 1.0).num_tokens is None


@pytest.mark.parametrize("data", ["[1]", "{", '{"error": {"message": "no room"}}'])
def test_a_stream_that_breaks_off(data: str) -> None:
    stream = Answer(f"data: {data}\n\n".encode())
    with (
        serving({"POST /v1/completions": stream}) as server,
        pytest.raises(MachineError, match="broke off"),
    ):
        list(client(server.url).stream("m", "x", max_tokens=1))
