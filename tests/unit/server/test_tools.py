"""Tools in chat completions: offered, called, demanded, and refused by name."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, Literal

import msgspec
import pytest

from doubles.asgi_client import Client
from doubles.scripted_port import CARD, ScriptedPort
from doubles.scripted_site import app_of, ask, run, site_with
from outrider.plugins.tools import reading
from outrider.plugins.tools.grammar import OfferedTool, offered_tool
from outrider.server.errors import ApiError
from outrider.server.params import tooling_of
from outrider.server.port import EngineCard

PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
HELLO = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class ToolPort(ScriptedPort):
    """An engine whose model thinks, and calls as Hermes does."""

    template = "{{ tools }} <tool_call> arguments </think>"

    @property
    def card(self) -> EngineCard:
        return msgspec.structs.replace(CARD, chat_template=self.template)


def port(*rounds: str) -> ToolPort:
    return ToolPort(lambda _: rounds)


def test_a_call_is_told_with_its_id_and_name_first() -> None:
    engine = port("<think>so</th", "ink>Now ", CALL[:9], CALL[9:])
    message = ask(engine, PATH, HELLO).json()["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    call = message["message"].pop("tool_calls")[0]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert message["message"] == {
        "role": "assistant",
        "content": "Now",
        "reasoning": "so",
        "reasoning_content": "so",
    }
    assert engine.chats[0].tools == (TOOL,)


def test_a_stream_says_the_same() -> None:
    got = ask(port("<think>so</think>", CALL), PATH, HELLO | {"stream": True})
    deltas = [event["choices"][0]["delta"] for event in got.events[:-1]]
    assert all("content" in delta for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["id"].startswith("call_")
    assert calls[0]["function"] == {"name": "add", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert "id" not in calls[1]


BEGUN = '<tool_call>{"name": "add", "arguments": {"a": '
CUT = "calls: the arguments of a call are not a complete JSON object"


def test_arguments_are_streamed_while_they_are_written() -> None:
    got = ask(port(BEGUN, "1", "2", "}}</tool_call>"), PATH, HELLO | {"stream": True})
    deltas = [event["choices"][0]["delta"] for event in got.events[:-1]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0] == {"name": "add", "arguments": ""}
    assert [call["arguments"] for call in calls[1:]] == ['{"a": ', "1", "2", "}"]
    assert got.events[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("rounds", "text"), [((), '{"a": '), (("x}}",), '{"a": x}')])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_arguments_that_are_no_object_are_sent_with_a_warning(
    rounds: tuple[str, ...], text: str, reason: Literal["stop", "length"]
) -> None:
    """They stay as they were sent, and `finish_reason` does not ask for the call."""
    engine = ToolPort(lambda _: (BEGUN, *rounds), reason=reason)
    found = ask(engine, PATH, HELLO).json()
    choice = found["choices"][0]
    assert choice["finish_reason"] == reason
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [text]
    assert found["warnings"] == [CUT]
    streamed = ask(engine, PATH, HELLO | {"stream": True}).events[:-1]
    deltas = [event["choices"][0]["delta"] for event in streamed]
    calls = [one["function"] for delta in deltas for one in delta.get("tool_calls", ())]
    assert "".join(one["arguments"] for one in calls) == text
    assert streamed[-1]["warnings"] == [CUT]


AMID = "calls: the text ends inside a call, which is returned as text"


@pytest.mark.parametrize(
    ("text", "warnings"), [('<tool_call>\n{"na', [AMID]), ("Use <tool_ca", None), (CALL, None)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_text_ends_amid_is_text_with_a_warning(
    text: str, warnings: list[str] | None, stream: bool
) -> None:
    got = ask(port(*text), PATH, HELLO | {"stream": stream})
    found = got.events[-2] if stream else got.json()
    assert found.get("warnings") == warnings
    if not stream:
        assert found["choices"][0]["message"]["content"] == (None if text == CALL else text)


def test_schemas_are_walked_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    walked, begun = threading.Event(), threading.Event()

    def walk(tool: Any, path: str) -> OfferedTool:
        begun.set()
        assert walked.wait(10)
        return offered_tool(tool, path)

    monkeypatch.setattr(reading, "offered_tool", walk)
    calls, text = HELLO | {"tool_choice": "required"}, {"messages": HELLO["messages"]}

    async def work() -> None:
        app = Client(app_of(site_with(port(CALL))))
        waits = asyncio.ensure_future(app.ask(PATH, calls))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert (await app.ask(PATH, text)).status == 200
        assert not waits.done()
        walked.set()
        assert (await waits).status == 200

    run(work())


def test_without_tools_a_call_is_text() -> None:
    without: list[dict[str, Any]] = [{"tools": []}, {"tool_choice": "none"}]
    for more in without:
        engine = port(CALL)
        choice = ask(engine, PATH, HELLO | more).json()["choices"][0]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
        assert not engine.chats[0].tools


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"parallel_tool_calls": False},
        {"tools": [TOOL | {"function": {**TOOL["function"], "strict": True}}]},  # pyright: ignore
    ],
    ids=str,
)
def test_what_is_demanded_is_a_grammar(more: dict[str, Any]) -> None:
    engine = port(CALL)
    assert ask(engine, PATH, HELLO | more).status == 200
    assert "add" in (engine.requests[0].structure.get("grammar") or "")
    free = port(CALL)
    ask(free, PATH, HELLO)
    assert not free.requests[0].structure.get("grammar")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ],
    ids=str,
)
def test_what_cannot_be_demanded_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    got = ask(port(CALL), PATH, HELLO | more)
    assert got.status == 400
    assert got.json()["error"]["param"] == param


@pytest.mark.parametrize("more", [{}, {"tool_choice": "required"}], ids=str)
def test_a_template_without_a_place_for_tools_needs_none(more: dict[str, Any]) -> None:
    engine = port("Sure.\n", '{"name": "add', '", "arguments": {"a": 1}}')
    engine.template = "{{ messages }}"
    found = ask(engine, PATH, HELLO | more).json()
    message = found["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (message["content"], found.get("warnings")) == ("Sure.", None)
    assert bool(engine.requests[0].structure.get("grammar")) is bool(more)


def test_a_model_whose_calls_nobody_knows_is_not_constrained() -> None:
    engine = port("x")
    engine.template = "{{ tools }}"
    found = ask(engine, PATH, HELLO).json()
    assert "cannot be distinguished from text" in json.dumps(found["warnings"])
    refused = ask(engine, PATH, HELLO | {"tool_choice": "required"})
    assert refused.status == 400


def test_a_text_of_a_form_is_all_text() -> None:
    engine = port('{"a": "<think>"}')
    more = {"response_format": {"type": "json_object"}}
    message = ask(engine, PATH, HELLO | more).json()["choices"][0]["message"]
    assert message["content"] == '{"a": "<think>"}'


SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}


def test_an_answer_is_a_call_or_has_the_form() -> None:
    for text, call in (('{"answer": "<tool_call>"}', None), (CALL, "add")):
        engine = port(f"<think>so</think>{text}")
        found = ask(engine, PATH, HELLO | FORM).json()
        message = found["choices"][0]["message"]
        assert message["reasoning"] == "so"
        assert "warnings" not in found
        calls = message.get("tool_calls", [])
        assert [one["function"]["name"] for one in calls] == ([] if call is None else [call])
        assert message["content"] == (text if call is None else None)
        asked = engine.requests[0].structure
        assert '"answer"' in (asked.get("grammar") or "")
        assert list(asked.get("parts", ())) == [
            "tools[0].function.parameters: the tool 'add'",
            "response_format",
        ]


def test_demanded_calls_leave_no_room_for_a_text() -> None:
    engine = port(CALL)
    assert ask(engine, PATH, HELLO | FORM | {"tool_choice": "required"}).status == 200
    grammar = engine.requests[0].structure.get("grammar") or ""
    assert '"answer"' not in grammar


def test_thoughts_come_before_a_form_without_tools() -> None:
    engine = port("<think>so</think>", '{"answer": "x"}')
    message = ask(engine, PATH, HELLO | FORM | {"tools": []}).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ('{"answer": "x"}', "so")
    plain = port('{"answer": "x"}')
    plain.template = "{{ messages }}"
    ask(plain, PATH, HELLO | FORM | {"tools": []})
    assert plain.requests[0].structure.get("schema") == SCHEMA


def test_a_form_that_goes_with_no_calls_says_so() -> None:
    for template, form in (
        ("{{ tools }} <tool_call> arguments", {"grammar": 'root ::= "x"'}),
        ("{{ tools }} [TOOL_CALLS]", FORM),
        ("{{ tools }}", FORM),
    ):
        engine = port("x")
        engine.template = template
        found = ask(engine, PATH, HELLO | form).json()
        assert any("tools: none is called" in one for one in found["warnings"])
        assert not engine.requests[0].structure.keys() - {"schema", "strict", "parts", "grammar"}


@pytest.mark.parametrize("strict", [True, False])
def test_a_tool_whose_schema_cannot_be_followed_is_named(strict: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    odd = {"type": "function", "function": {"name": "odd", "parameters": schema, "strict": strict}}
    path = "tools[1].function.parameters"
    got = ask(port("x"), PATH, HELLO | {"tools": [TOOL, odd], "tool_choice": "required"})
    if strict:
        error = got.json()["error"]
        assert (got.status, error["param"]) == (400, path)
        assert "'odd': properties.a.uniqueItems" in error["message"]
    else:
        assert got.json()["warnings"] == [
            f"{path}: the tool 'odd': properties.a.uniqueItems: left out, so the text may break it"
        ]


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (
            "/v1/responses",
            {"input": "hi", "tools": [{"type": "web"}, {"type": "function", "name": "f"}]},
            "tools[1].parameters: the tool 'f'",
        ),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            },
            "tools[0].input_schema: the tool 'f'",
        ),
    ],
    ids=str,
)
def test_each_api_has_its_own_names(path: str, body: dict[str, Any], wanted: str) -> None:
    engine = port("x")
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    name = "text" if "responses" in path else "output_config"
    assert ask(engine, path, body | {name: form}).status == 200
    assert list(engine.requests[0].structure.get("parts", ())) == [wanted, f"{name}.format"]


def test_special_tokens_are_shown_where_they_delimit() -> None:
    engine = port(
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final",
        "<|message|>yes",
    )
    engine.template = "{{ tools }} <|channel|> <|message|>"
    message = ask(engine, PATH, HELLO).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("so", "yes")
    assert not engine.requests[0].params.skip_special_tokens


def test_a_named_tool_is_called_once() -> None:
    named = tooling_of([TOOL], {"type": "function", "name": "add"}, None)
    assert named.callable == (TOOL,)
    assert not named.parallel
    with pytest.raises(ApiError):
        tooling_of([TOOL], {"type": "allowed_tools"}, None)


SUB = {"type": "function", "function": {"name": "sub"}}


def allowing(mode: str, *names: str) -> dict[str, Any]:
    """As chat completions say it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_model_is_told_of_allowed_tools_alone_and_calls_no_other(mode: str) -> None:
    engine = port(CALL)
    body = HELLO | {"tools": [TOOL, SUB], "tool_choice": allowing(mode, "add")}
    found = ask(engine, PATH, body).json()
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert engine.chats[0].tools == (TOOL,)
    grammar = engine.requests[0].structure.get("grammar") or ""
    assert '"add"' in grammar
    assert '"sub"' not in grammar


def test_allowed_tools_may_be_none_and_must_be_known() -> None:
    assert tooling_of([TOOL], allowing("none", "add"), None).offered == ()
    flat = {"type": "allowed_tools", "tools": [{"type": "function", "name": "sub"}]}
    found = tooling_of([TOOL, SUB], flat, None)
    assert (found.choice, found.offered) == ("auto", (SUB,))
    for wrong in (
        allowing("auto"),
        allowing("auto", "mul"),
        allowing("often", "add"),
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": 3},
        {"type": "allowed_tools", "tools": ["add"]},
    ):
        with pytest.raises(ApiError) as caught:
            tooling_of([TOOL, SUB], wrong, None)
        assert caught.value.param == "tool_choice"
