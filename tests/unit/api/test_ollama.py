"""The Ollama helper against a server that answers as Ollama does."""

from __future__ import annotations

import pytest

from doubles.json_server import Answer, serving
from outrider.core.errors import MachineError
from outrider_lab.bench.peers.clients import Ollama, OllamaModel

TAGS = Answer.of(
    {
        "models": [
            {
                "name": "llama3:8b",
                "size": 4_661_224_676,
                "details": {"parameter_size": "8.0B", "quantization_level": "Q4_0"},
            },
            {"name": "bare"},
        ]
    }
)


def test_models_are_listed_with_what_is_known_of_them() -> None:
    with serving({"GET /api/tags": TAGS}) as server:
        assert Ollama(server.url).models() == [
            OllamaModel("llama3:8b", "8.0B", "Q4_0", 4_661_224_676),
            OllamaModel("bare", "?", "?", 0),
        ]


def test_a_completion_is_greedy_whole_and_counted() -> None:
    said = {"response": " jumps", "eval_count": 2, "eval_duration": 500_000_000, "done": True}
    with serving({"POST /api/generate": Answer.of(said)}) as server:
        reply = Ollama(server.url).generate("llama3:8b", "The fox", max_tokens=7)
        body = server.asked[0].body
    assert (reply.text, reply.num_tokens, reply.seconds) == (" jumps", 2, 0.5)
    assert body["options"] == {"num_predict": 7, "temperature": 0}
    assert (body["model"], body["prompt"], body["stream"]) == ("llama3:8b", "The fox", False)


def test_a_server_that_is_not_running_is_named_with_what_to_do() -> None:
    with serving({}) as server:
        url = server.url
    with pytest.raises(MachineError, match="Ollama is not running") as caught:
        Ollama(url).models()
    assert caught.value.exit_code == 3
    assert "ollama serve" in str(caught.value.hint)


def test_an_unknown_model_is_said_in_ollamas_words() -> None:
    missing = Answer.of({"error": "model 'x' not found"}, 404)
    with (
        serving({"POST /api/generate": missing}) as server,
        pytest.raises(MachineError, match="model 'x' not found"),
    ):
        Ollama(server.url).generate("x", "y", max_tokens=1)


@pytest.mark.parametrize("answer", [{}, {"models": None}, {"models": "x"}, {"models": [1]}])
def test_a_server_without_models_has_none(answer: object) -> None:
    with serving({"GET /api/tags": Answer.of(answer)}) as server:
        assert Ollama(server.url).models() == []
