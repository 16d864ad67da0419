"""Responses: the order of events, one set of ids, items in and out, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from doubles.scripted_port import CARD, ScriptedPort
from doubles.scripted_site import ask
from outrider.core.errors import DrafterError
from outrider.plugins.apis.responses import turns_of
from outrider.server.port import EngineCard

PATH = "/v1/responses"
HELLO = {"input": "hi", "temperature": 0}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "shell",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array"}}},
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
    found = got.events
    assert "[DONE]" not in found
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def test_a_text_has_the_events_of_openai_in_order() -> None:
    found = events(ScriptedPort())
    assert [event["type"] for event in found] == TEXT_EVENTS
    created, done = found[0]["response"], found[-1]["response"]
    assert (created["status"], created["output"]) == ("in_progress", [])
    assert created["id"] == done["id"]
    item = done["output"][0]
    assert item == found[-2]["item"]
    assert {event["item_id"] for event in found if "item_id" in event} == {item["id"]}
    assert found[2]["item"] | {"status": "completed", "content": item["content"]} == item
    text = "".join(event["delta"] for event in found if event["type"].endswith("text.delta"))
    assert text == found[6]["text"] == item["content"][0]["text"] == "Hello"
    assert done["usage"]["total_tokens"] == 8
    assert done["metrics"]["speculative_decoding"]["num_spec_steps"] == 2


def test_an_object_says_what_the_stream_says() -> None:
    rounds = ("<think>so</think>\nNow ", CALL, CALL)
    whole = ask(port(*rounds), PATH, HELLO | {"tools": [TOOL]}).json()
    last = events(port(*rounds), tools=[TOOL])[-1]["response"]

    def bare(item: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in item.items() if key not in ("id", "call_id")}

    assert list(map(bare, whole["output"])) == list(map(bare, last["output"]))
    assert [item["type"] for item in whole["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "so"}]
    assert json.loads(whole["output"][2]["arguments"]) == {"command": ["ls"]}
    assert whole["status"] == "completed"
    assert whole["usage"] == last["usage"]


def test_calls_are_items_of_their_own() -> None:
    found = events(port("a", CALL), tools=[TOOL])
    kinds = [event["type"] for event in found]
    assert kinds[-5:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    added, done = found[-5]["item"], found[-2]["item"]
    assert (added["name"], added["arguments"], added["status"]) == ("shell", "", "in_progress")
    assert done == added | {"arguments": '{"command": ["ls"]}', "status": "completed"}
    assert [event["output_index"] for event in found[-5:-1]] == [1] * 4


def test_arguments_are_streamed_while_they_are_written() -> None:
    begun = '<tool_call>{"name": "shell", "arguments": {"command": ["'
    found = events(port(begun, "ls", '"]}}</tool_call>'), tools=[TOOL])
    kind = "response.function_call_arguments"
    assert [event["delta"] for event in found if event["type"] == f"{kind}.delta"] == [
        '{"command": ["',
        "ls",
        '"]}',
    ]
    done = next(event for event in found if event["type"] == f"{kind}.done")
    assert done["arguments"] == '{"command": ["ls"]}'
    cut = events(port(begun, "ls"), tools=[TOOL])[-1]["response"]
    assert cut["output"][0]["status"] == "incomplete"
    assert cut["output"][0]["arguments"] == '{"command": ["ls'
    assert cut["warnings"]


def test_a_text_that_was_cut_is_incomplete() -> None:
    last = events(ScriptedPort(reason="length"))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["completed_at"] is None


def test_a_failure_after_the_first_event_is_a_failed_response() -> None:
    last = events(ScriptedPort(error=DrafterError("it broke")))[-1]
    assert last["type"] == "response.failed"
    assert "it broke" in last["response"]["error"]["message"]


TOOLS = [TOOL, {"type": "custom", "name": "apply_patch"}, {"type": "web_search"}]
CODEX = {
    "model": "scripted",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ls"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"text": "b"}]},
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": True,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"a": "b"},
}


def test_the_twelve_fields_of_codex_are_understood() -> None:
    engine = port("done")
    last = events(engine, **CODEX)[-1]["response"]
    chat = engine.chats[0]
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
        for i in (1, 2)
    ]
    assert chat.messages == [
        {"role": "system", "content": "You are Codex.\n\nD"},
        {"role": "user", "content": "ls"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt", "name": "shell"},
        {"role": "tool", "tool_call_id": "c2", "content": "b", "name": "shell"},
    ]
    assert [tool["function"]["name"] for tool in chat.tools] == ["shell"]
    assert chat.variables == {"reasoning_effort": "medium"}
    assert last["store"] is False
    assert last["tools"] == [TOOL | {"description": None}, *TOOLS[1:]]
    told = " ".join(last["warnings"])
    assert "'custom'" in told
    assert "'web_search'" in told


def test_a_probe_without_input_is_answered() -> None:
    assert ask(ScriptedPort(), PATH, {"input": [], "max_output_tokens": 1}).status == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": 3}, "input"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    got = ask(ScriptedPort(), PATH, HELLO | more)
    assert (got.status, got.json()["error"]["param"]) == (400, param)


def test_nothing_is_stored() -> None:
    got = ask(ScriptedPort(), f"{PATH}/resp_1", method="GET")
    assert got.status == 404
    assert "not stored" in got.json()["error"]["message"]


def test_a_form_is_a_schema() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    engine = ScriptedPort()
    assert ask(engine, PATH, HELLO | {"text": {"format": form}}).status == 200
    assert engine.requests[0].structure.get("schema") == schema


def test_log_probabilities_are_asked_for_by_include() -> None:
    found = events(ScriptedPort(), include=["message.output_text.logprobs"], top_logprobs=1)
    part = found[-1]["response"]["output"][0]["content"][0]
    assert len(part["logprobs"]) == 5
    assert len(part["logprobs"][0]["top_logprobs"]) == 1


def test_tokens_are_counted_without_an_answer() -> None:
    got = ask(ScriptedPort(), f"{PATH}/input_tokens", HELLO).json()
    assert got == {"object": "response.input_tokens", "input_tokens": 3}


def test_thoughts_of_an_earlier_turn_stay_with_it() -> None:
    items: Sequence[Mapping[str, Any]] = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "c"},
    ]
    assert turns_of(None, items).done() == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "t"},
        {"role": "assistant", "content": "c", "reasoning_content": ""},
    ]


# All that the Open Responses specification (2026-04-24) requires of a response.
REQUIRED = [
    "background",
    "completed_at",
    "created_at",
    "error",
    "frequency_penalty",
    "id",
    "incomplete_details",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "model",
    "object",
    "output",
    "parallel_tool_calls",
    "presence_penalty",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "status",
    "store",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "usage",
]


def test_a_response_has_all_keys_from_its_first_event_on() -> None:
    found = events(ScriptedPort())
    told = [event["response"] for event in found if "response" in event]
    assert [sorted(set(REQUIRED) - one.keys()) for one in told] == [[]] * 3
    assert [one["completed_at"] for one in told[:2]] == [None, None]
    assert told[-1]["completed_at"] >= told[-1]["created_at"]
    assert told[-1]["frequency_penalty"] == told[-1]["presence_penalty"] == 0


def test_what_was_asked_is_told_again_with_the_keys_that_it_left_out() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}],
    }
    more: dict[str, Any] = {
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": allowed,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "top_logprobs": 2,
    }
    found = ask(port("ok"), PATH, HELLO | more).json()
    absent = {"description": None, "parameters": None, "strict": None}
    assert found["tools"] == [more["tools"][0] | absent]
    assert found["tool_choice"] == allowed
    assert (found["presence_penalty"], found["frequency_penalty"]) == (0.5, 0.25)
    assert found["reasoning"] == {"effort": "low", "summary": None}
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert found["top_logprobs"] == 2


def test_a_schema_is_told_again_with_the_keys_that_were_left_out() -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    found = ask(port("{}"), PATH, HELLO | {"text": {"format": form}}).json()
    assert found["text"] == {"format": form | {"description": None, "strict": False}}
    assert ask(port("{}"), PATH, HELLO | {"text": {"format": 5}}).status == 400
