"""Anthropic's Messages: blocks in and out, the order of events, errors in their shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from doubles.scripted_port import CARD, ScriptedPort
from doubles.scripted_site import ask
from outrider.core.errors import DrafterError
from outrider.plugins.apis.messages import stop_reason, turns_of
from outrider.server.port import EngineCard
from outrider.server.site import End, Usage

PATH = "/v1/messages"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 50,
    "temperature": 0,
}
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'
TOOL = {
    "name": "ls",
    "description": "Lists.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}


class ToolPort(ScriptedPort):
    """Its model thinks, and calls as Hermes does."""

    @property
    def card(self) -> EngineCard:
        return msgspec.structs.replace(
            CARD, chat_template="{{ tools }} <tool_call> arguments </think>"
        )


def port(*rounds: str) -> ToolPort:
    return ToolPort(lambda _: rounds)


def events(engine: ScriptedPort, **more: object) -> list[dict[str, Any]]:
    got = ask(engine, PATH, HELLO | {"stream": True} | more)
    assert got.status == 200, got.body
    assert got.is_whole
    return got.events


BEGUN = '<tool_call>{"name": "ls", "arguments": {"path": "'


def inputs(found: list[dict[str, Any]]) -> list[str]:
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    return [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]


def test_inputs_are_streamed_while_they_are_written() -> None:
    rounds = (BEGUN, "src", '"}', "}</tool_call>")
    assert inputs(events(port(*rounds), tools=[TOOL])) == ['{"path": "', "src", '"}']
    block = ask(port(*rounds), PATH, HELLO | {"tools": [TOOL]}).json()["content"][0]
    assert block["input"] == {"path": "src"}


def test_an_input_that_is_cut_off_is_no_call_to_make() -> None:
    """Not even where a client reads the beginning of it."""
    found = events(port(BEGUN, "sr"), tools=[TOOL])
    assert inputs(found) == ['{"path": "', "sr"]
    assert found[-2]["delta"]["stop_reason"] == "end_turn"
    whole = ask(port(BEGUN, "sr"), PATH, HELLO | {"tools": [TOOL]}).json()
    assert whole["content"][0]["input"] == {"arguments": '{"path": "sr'}
    assert whole["stop_reason"] == "end_turn"
    assert whole["warnings"] == found[-2]["warnings"]


def test_a_text_has_the_events_of_anthropic_in_order() -> None:
    found = events(ScriptedPort())
    start = found[0].pop("message")
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == 3
    assert found[:-2] == [
        {"type": "message_start"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "Hel"},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
    ]
    assert found[-2]["type"] == "message_delta"
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 5
    assert found[-1] == {"type": "message_stop"}


def test_a_message_has_its_blocks() -> None:
    engine = port("<think>so</think>\nNow ", CALL)
    found = ask(engine, PATH, HELLO | {"tools": [TOOL]}).json()
    call = found["content"].pop()
    assert found["content"] == [
        {"type": "thinking", "thinking": "so", "signature": ""},
        {"type": "text", "text": "Now"},
    ]
    assert call.pop("id")
    assert call == {"type": "tool_use", "name": "ls", "input": {"path": "."}}
    assert (found["stop_reason"], found["role"], found["type"]) == (
        "tool_use",
        "assistant",
        "message",
    )
    function = engine.chats[0].tools[0]["function"]
    assert function["parameters"] == TOOL["input_schema"]


def test_a_stream_adds_up_to_the_message() -> None:
    rounds = ("<think>s", "o</think>Now ", CALL, " then")
    whole = ask(port(*rounds), PATH, HELLO | {"tools": [TOOL]}).json()
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in events(port(*rounds), tools=[TOOL]):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            delta.pop("type")
            for name, text in delta.items():
                if name == "partial_json":
                    arguments += text
                else:
                    blocks[-1][name] += text
    assert arguments == '{"path": "."}'
    kinds = ["thinking", "text", "tool_use", "text"]
    assert [block["type"] for block in blocks] == kinds
    assert [block["type"] for block in whole["content"]] == kinds
    assert blocks[1] == whole["content"][1]


CLAUDE_CODE: dict[str, Any] = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be short."},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "ls"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Sure."},
                {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "."}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"text": "a.txt"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ],
    "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
    "thinking": {"type": "disabled"},
    "metadata": {"user_id": "u"},
}


def test_what_claude_code_sends_is_understood() -> None:
    engine = port("done")
    found = ask(engine, PATH, HELLO | CLAUDE_CODE).json()
    chat = engine.chats[0]
    call = {"id": "t1", "type": "function", "function": {"name": "ls", "arguments": {"path": "."}}}
    assert chat.messages == [
        {"role": "system", "content": "You are Claude Code.\n\nBe short."},
        {"role": "user", "content": "ls"},
        {
            "role": "assistant",
            "content": "Sure.",
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a.txt", "name": "ls"},
        {"role": "user", "content": "and now?"},
    ]
    assert chat.variables == {"enable_thinking": False}
    assert [tool["function"]["name"] for tool in chat.tools] == ["ls"]
    assert "web_search_20250305" in " ".join(found["warnings"])


def test_what_templates_refuse_is_one_message_of_the_users() -> None:
    """Claude Code gives instructions after its first question, and asks again before an answer."""
    turns = turns_of(
        "Be short.",
        [
            {"role": "user", "content": "ls"},
            {"role": "system", "content": "It is Monday."},
            {"role": "user", "content": "please"},
            {"role": "assistant", "content": "a.txt"},
            {"role": "system", "content": "It is Tuesday."},
        ],
    )
    assert turns.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "ls\n\nIt is Monday.\n\nplease"},
        {"role": "assistant", "content": "a.txt"},
        {"role": "user", "content": "It is Tuesday."},
    ]


def test_a_header_that_changes_leaves_the_prompt_as_it_is() -> None:
    system = CLAUDE_CODE["system"]
    again = [{"type": "text", "text": "x-anthropic-billing-header: cch=other"}, *system[1:]]
    assert turns_of(system, []).messages == turns_of(again, []).messages


def test_the_assistants_last_message_is_gone_on_with() -> None:
    engine = ScriptedPort()
    begun = [*HELLO["messages"], {"role": "assistant", "content": "One,"}]
    assert ask(engine, PATH, HELLO | {"messages": begun}).status == 200
    assert engine.chats[0].continues


@pytest.mark.parametrize(
    ("choice", "demands"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "ls"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, True),
    ],
    ids=str,
)
def test_choices_are_those_of_openai_in_other_words(
    choice: Mapping[str, Any], demands: bool
) -> None:
    engine = port(CALL)
    assert ask(engine, PATH, HELLO | {"tools": [TOOL], "tool_choice": choice}).status == 200
    assert bool(engine.requests[0].structure.get("grammar")) == demands


@pytest.mark.parametrize(
    ("reason", "stop", "told"),
    [
        ("stop", None, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("tool_calls", None, "tool_use"),
    ],
)
def test_why_it_ended(reason: Any, stop: str | None, told: str) -> None:
    assert stop_reason(End(reason, Usage(1, 1), stop=stop)) == told


def test_stop_sequences_are_stop_strings() -> None:
    engine = ScriptedPort()
    ask(engine, PATH, HELLO | {"stop_sequences": ["END"]})
    assert engine.requests[0].params.stop == ("END",)


MISTAKES: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"messages": [{"role": "user"}]},
    {"mcp_servers": [{}]},
    {"tool_choice": {"type": "tool", "name": "rm"}},
    {"tool_choice": {"type": "some"}},
    {"tools": [{"description": "x"}]},
    {"temperature": "hot"},
    {"model": "other"},
]


@pytest.mark.parametrize("more", MISTAKES, ids=str)
def test_errors_have_anthropics_shape(more: dict[str, Any]) -> None:
    got = ask(ScriptedPort(), PATH, HELLO | more)
    assert got.status in (400, 404)
    record = got.json()
    assert record["type"] == "error"
    assert record["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert record["error"]["message"]


def test_a_failure_midway_is_one_error_event() -> None:
    last = events(ScriptedPort(error=DrafterError("it broke")))[-1]
    assert last["type"] == "error"
    assert "it broke" in last["error"]["message"]


def test_tokens_are_counted_without_an_answer() -> None:
    engine = port("x")
    assert ask(engine, f"{PATH}/count_tokens", HELLO | {"tools": [TOOL]}).json() == {
        "input_tokens": 3
    }
    assert not engine.requests
