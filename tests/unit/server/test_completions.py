"""Completions: several prompts, ids, echo, and the older shape of log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask
from outrider.server.chat import folded

PATH = "/v1/completions"


def complete(port: ScriptedPort | None = None, **more: object) -> Any:
    got = ask(port or ScriptedPort(), PATH, {"prompt": "ab", "temperature": 0} | more)
    assert got.status == 200, got.body
    return got.json()


def texts(found: Any) -> list[str]:
    return [choice["text"] for choice in found["choices"]]


def test_a_prompt_is_gone_on_from() -> None:
    port = ScriptedPort()
    found = complete(port)
    assert found["object"] == "text_completion"
    assert texts(found) == ["Hello"]
    assert port.requests[0].prompt_ids == [2, 97, 98]
    assert port.requests[0].params.max_tokens == 16


def test_the_deltas_of_a_stream_make_up_the_whole_answer() -> None:
    body = {"prompt": ["ab", "c"], "logprobs": 1, "temperature": 0}
    whole = complete(**body)["choices"]
    events = ask(ScriptedPort(), PATH, body | {"stream": True}).events[:-1]
    choices = [event["choices"][0] for event in events]
    for index in (0, 1):
        assert folded([one for one in choices if one["index"] == index]) == whole[index]
    assert whole[1]["logprobs"]["tokens"] == ["H", "e", "l", "l", "o"]


def test_ids_are_prompts_as_they_are() -> None:
    port = ScriptedPort()
    complete(port, prompt=[5, 6])
    complete(port, prompt=[[7], [8, 9]])
    assert [list(request.prompt_ids) for request in port.requests] == [[5, 6], [7], [8, 9]]


def test_prompts_times_completions_come_in_order() -> None:
    port = ScriptedPort(lambda request: (f"{request.prompt_ids[-1]}.{request.sample}",))
    found = complete(port, prompt=["a", "b"], n=2, temperature=1, seed=1)
    assert texts(found) == ["97.0", "97.1", "98.0", "98.1"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 4
    assert found["usage"]["completion_tokens"] == 16


def test_a_stream_is_the_same_text() -> None:
    body = {"prompt": "ab", "stream": True, "echo": True, "stream_options": {"include_usage": True}}
    events = ask(ScriptedPort(), PATH, body).events
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-2]]
    assert [choice["text"] for choice in choices] == ["\x02ab", "Hel", "lo", ""]
    assert choices[-1]["finish_reason"] == "stop"
    assert events[-2]["usage"]["total_tokens"] == 8


def test_echo_repeats_the_prompt() -> None:
    assert texts(complete(echo=True, prompt=[65, 66])) == ["ABHello"]


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1}, {"prompt": [[65, 66], [67]]}])
def test_a_prompt_alone_is_scored_and_nothing_written(more: dict[str, Any]) -> None:
    body: dict[str, Any] = {"echo": True, "prompt": [65, 66], "max_tokens": 0, "logprobs": 1}
    found = complete(**body | more)
    for choice in found["choices"]:
        told = choice["logprobs"]
        assert choice["text"] == "".join(told["tokens"]) in ("AB", "C")
        assert told["token_logprobs"][0] is None
        assert len(told["token_logprobs"]) == len(choice["text"])
        assert choice["finish_reason"] == "length"
    usage = found["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"]


def test_a_stream_of_a_prompt_alone_is_its_text() -> None:
    body = {"prompt": "ab", "echo": True, "max_tokens": 0, "stream": True}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = ask(ScriptedPort(), PATH, body | options).events
    choices = [event["choices"][0] for event in events[:-2]]
    assert [choice["text"] for choice in choices] == ["\x02ab", ""]
    assert choices[-1]["finish_reason"] == "length"
    assert events[-2]["usage"]["completion_tokens"] == 0


def test_log_probabilities_in_the_older_shape() -> None:
    found = complete(logprobs=1)["choices"][0]["logprobs"]
    assert found["tokens"] == list("Hello")
    assert found["token_logprobs"] == [-0.5] * 5
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    assert found["top_logprobs"][0] == {"H": -0.5, "A": -1.5}


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[1], [2**70]]}, "prompt"),
    ({"prompt": ["x"] * 999}, "prompt"),
    ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 99}, "top_logprobs"),
    ({"echo": True, "logprobs": 1, "stream": True}, None),
]


@pytest.mark.parametrize(("more", "param"), REFUSED, ids=str)
def test_what_cannot_be_done_is_refused(more: dict[str, Any], param: str | None) -> None:
    port = ScriptedPort()
    got = ask(port, PATH, {"prompt": "ab"} | more)
    assert got.status == 400, got.body
    error = got.json()["error"]
    assert error["param"].startswith(param) if param else error["param"] in ("echo", "stream")
    assert not port.requests
