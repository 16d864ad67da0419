"""Chat completions: parameters, the shape of objects and of streams, what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from doubles import scripted_port
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask, site_with
from outrider.core.errors import ConfigError, DrafterError

PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def chat(port: ScriptedPort | None = None, **more: object) -> Any:
    got = ask(port or ScriptedPort(), PATH, HELLO | more)
    assert got.status == 200, got.body
    return got.json()


def streamed(port: ScriptedPort | None = None, **more: object) -> list[Any]:
    got = ask(port or ScriptedPort(), PATH, HELLO | {"stream": True} | more)
    assert got.status == 200, got.body
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.is_whole
    return got.events


def refusal(status: int = 400, port: ScriptedPort | None = None, **more: object) -> Any:
    got = ask(port or ScriptedPort(), PATH, HELLO | more)
    assert got.status == status, got.body
    error = got.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_an_object_has_openais_fields_and_ours() -> None:
    found = chat()
    assert found["object"] == "chat.completion"
    assert found["model"] == "scripted"
    assert found["id"].startswith("chatcmpl-")
    assert found["choices"] == [{
        "index": 0,
        "message": {"role": "assistant", "content": "Hello"},
        "logprobs": None,
        "finish_reason": "stop",
    }]  # fmt: skip
    assert found["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "warnings" not in found


def test_metrics_are_those_that_load_tools_check() -> None:
    found = chat()["metrics"]["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == found["num_spec_steps"] == 2
    accepted = sum(place * count for place, count in enumerate(histogram))
    assert accepted == found["num_accepted_draft_tokens"] == 3
    assert accepted <= found["num_draft_tokens"]
    assert found["mean_acceptance_length"] == 1 + accepted / 2
    assert found["num_spec_tokens"] + 1 == len(histogram)


def test_a_stream_says_what_the_object_says() -> None:
    events = streamed(stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas] == ["", "Hel", "lo", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "stop"
    whole = chat()
    assert chunks[-2]["metrics"] == whole["metrics"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_a_step_is_one_write() -> None:
    got = ask(ScriptedPort(), PATH, HELLO | {"stream": True})
    # The first step has the role before it; then a step, the end, and the mark behind it.
    assert [write.count(b"data: ") for write in got.writes] == [2, 1, 1, 1]


def test_usage_may_be_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [event for event in streamed(stream_options=options) if event != "[DONE]"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    assert counts == [3, 5, 5]


def test_several_completions_have_their_own_places() -> None:
    port = ScriptedPort(lambda request: (f"text {request.sample}",))
    found = chat(port, n=3, temperature=1, seed=4)
    assert [c["message"]["content"] for c in found["choices"]] == ["text 0", "text 1", "text 2"]
    assert found["seed"] == 4
    assert found["usage"]["completion_tokens"] == 18
    together = found["metrics"]["speculative_decoding"]
    assert together["num_spec_steps"] == 3
    assert all("metrics" in choice for choice in found["choices"])
    chunks = [c for c in streamed(port, n=3)[:-1] if c["choices"]]
    for place in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == place]
        assert "".join(choice["delta"]["content"] for choice in own) == f"text {place}"


def test_a_seed_is_drawn_and_told() -> None:
    found = chat(temperature=1)
    assert isinstance(found["seed"], int)
    assert chat(temperature=1)["seed"] != found["seed"]


def test_what_is_left_out_is_as_openai_has_it() -> None:
    port = ScriptedPort()
    ask(port, PATH, {"messages": HELLO["messages"], "max_tokens": None, "seed": None})
    params = port.requests[0].params
    assert params.temperature == 1
    assert params.is_open


def test_what_is_left_out_is_as_the_checkpoint_advises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field of the request counts before the owner's choice, and that before the advice."""
    advice = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    advised = msgspec.structs.replace(scripted_port.CARD, sampling=advice)
    monkeypatch.setattr(scripted_port, "CARD", advised)
    port = ScriptedPort()
    ask(port, PATH, {**HELLO, "temperature": 0.3})
    ask(port, PATH, {"messages": HELLO["messages"]})
    given, left = (request.params for request in port.requests)
    assert (given.temperature, given.top_k, given.top_p) == (0.3, 20, 0.9)
    assert (left.temperature, left.top_k, left.top_p) == (0.6, 20, 0.9)
    site = site_with(port)
    site.defaults |= {"top_p": 0.8, "temperature": 0.0}
    assert site.sampling == {"temperature": 0.0, "top_k": 20, "top_p": 0.8}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_either_name_limits_tokens(name: str) -> None:
    port = ScriptedPort()
    chat(port, **{name: 7})
    assert port.requests[0].params.max_tokens == 7


def test_parameters_reach_the_engine() -> None:
    port = ScriptedPort()
    chat(
        port,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        stop=["a", "b"],
        logit_bias={"65": 2},
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        min_tokens=2,
        ignore_eos=True,
        bad_words=["x"],
        prediction={"type": "content", "content": "Hello"},
        max_time=3,
    )
    params = port.requests[0].params
    assert (params.top_p, params.top_k, params.min_p) == (0.5, 3, 0.1)
    assert (params.stop, params.bad_words) == (("a", "b"), ("x",))
    assert params.logit_bias == {65: 2}
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)
    assert (params.repetition_penalty, params.min_tokens, params.ignore_eos) == (1.5, 2, True)
    assert (params.prediction, params.max_time) == ("Hello", 3)


def test_a_structure_reaches_the_engine() -> None:
    port = ScriptedPort()
    schema = {"type": "object"}
    chat(port, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    parts = {"response_format": schema}
    assert port.requests[0].structure == {"schema": schema, "strict": False, "parts": parts}


@pytest.mark.parametrize("param", ["response_format", "tools[0].function.parameters", "tools"])
def test_an_error_about_a_schema_has_its_parameter(param: str) -> None:
    error = ConfigError(f"{param}: properties.a.not: the keyword not cannot be followed.")
    got = ask(ScriptedPort(lambda _: (), error=error), PATH, HELLO)
    assert (got.status, got.json()["error"]["param"]) == (400, param)


def test_predictions_are_counted_only_where_there_is_one() -> None:
    found = chat(prediction={"type": "content", "content": [{"type": "text", "text": "He"}]})
    details = found["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 3}
    assert "completion_tokens_details" not in chat()["usage"]


def test_log_probabilities_are_told() -> None:
    entries = chat(logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == list("Hello")
    assert entries[0]["bytes"] == [72]
    assert entries[0]["top_logprobs"] == [{"token": "H", "logprob": -0.5, "bytes": [72]}]
    chunks = streamed(logprobs=True)[:-1]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [e["token"] for item in told if item for e in item["content"]] == list("Hello")


def test_what_is_unknown_is_warned_of() -> None:
    found = chat(invented=1, temperature=0)
    assert found["warnings"] == ["'invented' is not known here and was ignored"]
    assert streamed(invented=1)[-2]["warnings"] == found["warnings"]


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 99}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"top_k": -2}, "top_k"),
    ({"seed": "1"}, "seed"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"65": 1000}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"best_of": 3}, "best_of"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"prediction": {"type": "image"}}, "prediction"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"speculative": {"drafter": "eagle"}}, "speculative.drafter"),
    ({"speculative": 3}, "speculative"),
    ({"speculative": {"method": "x"}}, "speculative"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED, ids=str)
def test_what_cannot_be_done_is_refused_by_name(more: dict[str, Any], param: str | None) -> None:
    if ("stop" in more and more["stop"] == [""]) or "tools" in more:
        # The engine's own word: the scripted one says none.
        return
    port = ScriptedPort()
    error = refusal(port=port, **more)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not port.requests


def test_a_model_of_another_name_is_not_here() -> None:
    assert refusal(404, model="gpt-9")["code"] == "model_not_found"
    assert chat(model="alias")["model"] == "alias"


def test_an_engine_that_loads_is_asked_again_later() -> None:
    port = ScriptedPort()
    port.state = "loading"
    got = ask(port, PATH, HELLO)
    assert got.status == 503
    assert int(got.headers["retry-after"]) > 0


def test_a_full_queue_is_asked_again_later() -> None:
    got = ask(ScriptedPort(most=0), PATH, HELLO)
    assert (got.status, got.json()["error"]["code"]) == (503, "overloaded")
    assert int(got.headers["retry-after"]) > 0


def test_half_of_the_completions_are_not_left_behind() -> None:
    port = ScriptedPort(most=2)
    assert ask(port, PATH, HELLO | {"n": 3}).status == 503
    assert [stream.was_cancelled for stream in port.streams] == [True, True]


def test_a_failure_before_the_first_step_has_a_status() -> None:
    port = ScriptedPort(lambda _: (), error=ConfigError("logit_bias names ids outside."))
    for stream in (False, True):
        got = ask(port, PATH, HELLO | {"stream": stream})
        assert (got.status, got.json()["error"]["param"]) == (400, "logit_bias")


def test_a_failure_midway_is_one_event_and_no_end() -> None:
    port = ScriptedPort(error=DrafterError("it broke."))
    events = streamed(port)
    assert "error" in events[-1]
    assert sum("error" in event for event in events) == 1
    assert all(c["choices"][0]["finish_reason"] is None for c in events[:-1])


def test_a_defect_says_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    port = ScriptedPort(lambda _: (), error=KeyError("secret"))
    got = ask(port, PATH, HELLO)
    assert got.status == 500
    assert b"secret" not in got.body
    assert "a defect" in caplog.text


def test_a_text_ends_no_line_of_a_stream_whatever_a_reader_takes_for_one() -> None:
    """Some clients split streams as Python's `str.splitlines` does."""
    text = "a\x85b\u2028c\u2029d\ne\r\x0bf"
    got = ask(ScriptedPort(lambda _: (text,)), PATH, HELLO | {"stream": True})
    choices = [choice for event in got.events[:-1] for choice in event["choices"]]
    assert "".join(choice["delta"]["content"] for choice in choices) == text
    assert got.body.decode().splitlines() == got.body.decode().split("\n")[:-1]
