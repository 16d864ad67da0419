"""Requests that nobody should send: each is answered with its own status, code and parameter, in
the shape of the API asked, and no engine hears of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from doubles.asgi_client import Got
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask

USER = [{"role": "user", "content": "hi"}]
PATHS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER}),
    "completions": ("/v1/completions", {"prompt": "ab"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 9}),
    "tokenize": ("/tokenize", {"prompt": "ab"}),
    "detokenize": ("/detokenize", {"tokens": [65]}),
    "count": ("/v1/messages/count_tokens", {"messages": USER}),
    "input_tokens": ("/v1/responses/input_tokens", {"input": "hi"}),
}
TYPE, VALUE, NOT_HERE = "invalid_type", "invalid_value", "unsupported_parameter"


class Bad(NamedTuple):
    """What is added to a good body, and what of it is told: `param` is the field's name unless it
    is given; None stands for no field."""

    field: str
    value: object
    code: str = VALUE
    param: str | None = ""
    status: int = 400


# Of all four APIs that write text.
SHARED = (
    Bad("temperature", "hot", TYPE),
    Bad("temperature", -1),
    Bad("temperature", 1e6),
    Bad("temperature", [], TYPE),
    Bad("top_p", 2),
    Bad("top_p", {}, TYPE),
    Bad("top_k", -2),
    Bad("top_k", 0.5, TYPE),
    Bad("top_k", 2**63),
    Bad("min_p", -0.1),
    Bad("seed", -(10**40)),
    Bad("seed", 2**63),
    Bad("seed", 10**40),
    Bad("seed", "7", TYPE),
    Bad("max_tokens", -5),
    Bad("max_tokens", 1.5, TYPE),
    Bad("max_tokens", 2**31),
    Bad("min_tokens", -1),
    Bad("stop", 3, TYPE),
    Bad("stop", [1], TYPE, "stop[0]"),
    Bad("stop", ["x"] * 100),
    Bad("stop", ["x" * 10_000]),
    Bad("presence_penalty", 3),
    Bad("frequency_penalty", -3),
    Bad("repetition_penalty", 0),
    Bad("logit_bias", {"x": 1}),
    Bad("logit_bias", {"1": 1000}),
    Bad("logit_bias", {"-1": 1}),
    Bad("logit_bias", {"1" * 30: 1}),
    Bad("logit_bias", [1], TYPE),
    Bad("bad_words", "x", TYPE),
    Bad("max_time", -1),
    Bad("speculative", 1, TYPE),
    Bad("speculative", {"k": -1}, VALUE, "k"),
    Bad("speculative", {"drafter": "/etc/passwd"}, NOT_HERE, "speculative.drafter"),
    Bad("speculative", {"sampler": "x"}, VALUE, "sampler"),
    Bad("speculative", {"tree": 4}, NOT_HERE, "speculative.tree"),
    Bad("speculative", {"model": "x"}, TYPE),
    Bad("chat_template", "{{ x }}", NOT_HERE),
    Bad("stream_options", {"include_usage": True}),
    Bad("stream", "yes", TYPE),
    Bad("model", "nobody", "model_not_found", status=404),
    Bad("model", "../../etc/passwd", "model_not_found", status=404),
    Bad("model", 7, TYPE),
    Bad("best_of", 7, NOT_HERE),
    Bad("grammar", 7, TYPE),
    Bad("structured_outputs", {"nonsense": 1}),
)
OWN: Mapping[str, tuple[Bad, ...]] = {
    "chat": (
        Bad("messages", []),
        Bad("messages", None, TYPE),
        Bad("messages", "hi", TYPE),
        Bad("messages", [1], TYPE, "messages[0]"),
        Bad("n", 0),
        Bad("n", 100_000),
        Bad("max_tokens", 0),
        Bad("logprobs", 5, TYPE),
        Bad("top_logprobs", 3),
        Bad("functions", [{}], NOT_HERE),
        Bad("modalities", ["audio"], NOT_HERE),
        Bad("audio", {}, NOT_HERE, "modalities"),
        Bad("web_search_options", {}, NOT_HERE),
        Bad("tools", {}, TYPE),
        Bad("tools", [1], TYPE, "tools[0]"),
        Bad("tool_choice", "sometimes", NOT_HERE),
        Bad("tool_choice", "required"),
        Bad("tool_choice", {"type": "function", "function": {"name": "x"}}),
        Bad("tool_choice", {"type": "other"}, NOT_HERE),
        Bad("prediction", {"type": "other"}),
        Bad("prediction", {"type": "content", "content": 7}),
        Bad("response_format", {"type": "yaml"}),
        Bad("response_format", {"type": "json_schema"}, VALUE, "response_format.json_schema"),
        Bad("add_generation_prompt", False, NOT_HERE),
    ),
    "completions": (
        Bad("prompt", []),
        Bad("prompt", [[]]),
        Bad("prompt", [1, "x"], TYPE),
        Bad("prompt", [-1]),
        Bad("prompt", [10**9]),
        Bad("prompt", ["x"] * 1000),
        Bad("prompt", "x" * 300, "context_length_exceeded"),
        Bad("prompt", None, TYPE),
        Bad("suffix", "x", NOT_HERE),
        Bad("max_tokens", 0, NOT_HERE),
        Bad("n", 0),
        Bad("logprobs", -1, VALUE, "top_logprobs"),
        Bad("logprobs", 1000, VALUE, "top_logprobs"),
        Bad("n", 100_000),
    ),
    "responses": (
        Bad("input", 7, TYPE),
        Bad("max_tokens", 0),
        Bad("max_output_tokens", 0, VALUE, "max_tokens"),
        Bad("input", [{"type": "item_reference"}], NOT_HERE, "input[0]"),
        Bad("input", [{"role": 7}], TYPE, "input[0].role"),
        Bad("input", [{"role": "user", "content": [{"type": "input_image"}]}], NOT_HERE,
            "input[0].content"),
        Bad("previous_response_id", "resp_1", NOT_HERE),
        Bad("conversation", "conv_1", NOT_HERE),
        Bad("prompt", {"id": "x"}, NOT_HERE),
        Bad("background", True, NOT_HERE),
        Bad("truncation", "auto", NOT_HERE),
        Bad("n", 2, NOT_HERE),
        Bad("text", {"format": 7}, NOT_HERE, "text.format"),
        Bad("tool_choice", "sometimes", NOT_HERE),
        Bad("top_logprobs", 1000),
    ),
    "messages": (
        Bad("messages", []),
        Bad("messages", [{"content": "x"}], TYPE, "messages[0].role"),
        Bad("messages", [{"role": "user", "content": 7}], TYPE, "messages[0].content"),
        Bad("messages", [{"role": "user", "content": [{"type": "image"}]}], NOT_HERE,
            "messages[0].content[0]"),
        Bad("system", 7, TYPE),
        Bad("max_tokens", 0),
        Bad("mcp_servers", [{"url": "http://169.254.169.254"}], NOT_HERE),
        Bad("container", "x", NOT_HERE),
        Bad("tool_choice", {"type": "x"}, NOT_HERE),
        Bad("tool_choice", {"type": "any"}, NOT_HERE),
        Bad("tools", [{"input_schema": {}}], TYPE, "tools[0].name"),
        Bad("n", 2, NOT_HERE),
    ),
    "tokenize": (
        Bad("prompt", 7, TYPE),
        Bad("prompt", None, VALUE),
        Bad("messages", USER, VALUE, "prompt"),
        Bad("model", "x", "model_not_found", status=404),
    ),
    "detokenize": (
        Bad("tokens", [-1]),
        Bad("tokens", [10**6]),
        Bad("tokens", ["x"], TYPE, "tokens[0]"),
        Bad("tokens", [2**70], VALUE),
    ),
    "count": (
        Bad("messages", []),
        Bad("model", "x", "model_not_found", status=404),
    ),
    "input_tokens": (
        Bad("input", 7, TYPE),
        Bad("model", "x", "model_not_found", status=404),
    ),
}  # fmt: skip
_TEXT = ("chat", "completions", "responses", "messages")
ROWS = [(api, bad) for api in PATHS for bad in (*(SHARED if api in _TEXT else ()), *OWN[api])]
KINDS = {400: "invalid_request_error", 404: "not_found_error"}


def test_the_table_is_long_enough() -> None:
    assert len(ROWS) >= 120


@pytest.mark.parametrize("api", PATHS)
def test_the_bodies_that_mistakes_are_added_to_are_good(api: str) -> None:
    path, body = PATHS[api]
    assert ask(ScriptedPort(), path, body).status == 200


@pytest.mark.parametrize(("api", "bad"), ROWS, ids=lambda one: str(one)[:50])
def test_a_mistake_is_told_by_status_code_and_parameter(api: str, bad: Bad) -> None:
    path, body = PATHS[api]
    port = ScriptedPort()
    got = ask(port, path, body | {bad.field: bad.value})
    assert got.status == bad.status, got.body
    assert port.requests == []
    if path.startswith("/v1/messages"):
        assert got.json() == {
            "type": "error",
            "error": {"type": KINDS[bad.status], "message": got.json()["error"]["message"]},
        }
    else:
        error = got.json()["error"]
        told = (error.pop("code"), error.pop("param"))
        assert told == (bad.code, bad.field if bad.param == "" else bad.param), got.body
        assert error == {"message": error["message"], "type": KINDS[bad.status]}
    assert _is_told(got)


def _is_told(got: Got) -> bool:
    """A sentence, and nothing of how the program is made."""
    message: str = got.json()["error"]["message"]
    return bool(message) and "Traceback" not in message and ".py" not in message


# Bodies that are no request at all.
BROKEN: tuple[tuple[bytes, str], ...] = (
    (b"", "bad_json"),
    (b" ", "bad_json"),
    (b"{", "bad_json"),
    (b"null", "bad_json"),
    (b"[]", "bad_json"),
    (b'"text"', "bad_json"),
    (b"{}{}", "bad_json"),
    (b"\xff\xfe{}", "bad_json"),
    (b"\xef\xbb\xbf{}", "bad_json"),
    (b'{"seed": NaN}', "bad_json"),
    (b'{"seed": Infinity}', "bad_json"),
    (b'{"temperature": 1e999}', "bad_json"),
    (b'{"temperature": -1e999}', "bad_json"),
    (b'{"seed": 01}', "bad_json"),
    (b"{'a': 1}", "bad_json"),
    (b'{"a": 1,}', "bad_json"),
    (b'{"a": "\xc3\x28"}', "bad_json"),
    (b'{"a": "\x00"}', "bad_json"),
    (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "too_deep"),
    (b'{"a": ' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"}", "too_deep"),
    (b"[" * 10_000, "bad_json"),
    (b"[" * 100_000, "too_many"),
)


@pytest.mark.parametrize("api", PATHS)
def test_a_body_that_is_none_is_told_so(api: str) -> None:
    path, _ = PATHS[api]
    for body, code in BROKEN:
        got = ask(ScriptedPort(), path, body)
        assert got.status == 400, (body[:40], got.body)
        assert _is_told(got)
        if not path.startswith("/v1/messages"):
            assert got.json()["error"]["code"] == code, (body[:40], got.body)


def test_numbers_of_any_size_reach_no_engine() -> None:
    """Every number of every API, at the edges of what machines hold."""
    edges = ("1e308", "-1e308", "4e-324", "9" * 400, "-" + "9" * 400, str(2**63), str(-(2**63)))
    fields = ("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens",
              "presence_penalty", "frequency_penalty", "repetition_penalty", "max_time",
              "best_of")  # fmt: skip
    for api in _TEXT:
        path, body = PATHS[api]
        for field in fields:
            for edge in edges:
                plain = {name: body[name] for name in body if name != field}
                sent = json.dumps(plain)[:-1] + f', "{field}": {edge}' + "}"
                port = ScriptedPort()
                got = ask(port, path, sent.encode())
                assert got.status in (200, 400), (field, edge, got.body)
                # What is next to zero is rounded to it, and seeds below zero are seeds.
                taken = edge == "4e-324" or (field, edge) == ("seed", str(-(2**63)))
                assert got.status == 400 or taken, (field, edge)
                assert len(port.requests) == (got.status == 200)
