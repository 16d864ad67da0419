"""Odd conversations over the three APIs: each is answered, and the answer says what was changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from doubles.asgi_client import Client
from doubles.scripted_port import CARD, ScriptedPort
from doubles.scripted_site import app_of, ask, run, site_with
from outrider.api.callers import ChatIds
from outrider.api.chat_messages import checked_messages, checked_tools
from outrider.api.chat_template import ChatTemplate
from outrider.plugins.apis.messages import turns_of as turns_of_blocks
from outrider.plugins.apis.responses import turns_of
from outrider.server.port import ChatPrompt, EngineCard

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# As strict as Gemma 2's, with Hermes' calls.
SOURCE = """\
{%- if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{%- for m in messages %}
{%- if m.role not in ("user", "assistant", "tool") %}
{{- raise_exception("unknown role") }}{% endif %}
{%- if m.role == "user" and loop.index0 and messages[loop.index0 - 1].role == "user" %}
{{- raise_exception("roles must alternate") }}{% endif %}
{{- "<" ~ m.role ~ ">" ~ m.content }}
{%- for call in m.tool_calls or () %}<tool_call>{{ call.function | tojson }}{% endfor %}
{%- endfor %}{% if tools %}{{ tools[0].function.description + "" }}{% endif %}"""


class StrictPort(ScriptedPort):
    """Its prompt is what the template makes of the conversation."""

    template = ChatTemplate(SOURCE, {})
    prompt = ""

    @property
    def card(self) -> EngineCard:
        return msgspec.structs.replace(CARD, window=100_000, chat_template=SOURCE)

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds:
        messages, notes = checked_messages(chat.messages, continues=chat.continues)
        tools = checked_tools(chat.tools)
        found = self.template.render(messages, tools=tools, continues=chat.continues)
        self.prompt = found.text
        return ChatIds(await self.encode(found.text), (*notes, *found.notes))


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    yield
    StrictPort.template.close()


def answered(path: str, body: dict[str, Any]) -> tuple[str, str]:
    """The prompt, and the warnings as one text."""
    port = StrictPort()
    limit = {"max_tokens": 5} if path == MESSAGES else {}
    got = ask(port, path, {"temperature": 0, **limit, **body})
    assert got.status == 200, got.body
    return port.prompt, "\n".join(got.json().get("warnings", ()))


USER = {"role": "user", "content": "hello"}
GO_ON = {"role": "user", "content": "go on"}


def chat_call(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "bad"}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


def response_call(arguments: str) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    return [USER, call, {"type": "function_call_output", "call_id": "c1", "output": "bad"}]


@pytest.mark.parametrize("arguments", ['{"a": ', '"Paris"', '["x"]', "no JSON"])
@pytest.mark.parametrize(
    ("path", "name", "make"), [(CHAT, "messages", chat_call), (RESPONSES, "input", response_call)]
)
def test_a_malformed_call_in_the_history_is_kept(
    path: str, name: str, make: Any, arguments: str
) -> None:
    prompt, warnings = answered(path, {name: make(arguments)})
    assert "<user>hello<assistant><tool_call>" in prompt
    assert prompt.endswith("<tool>bad")
    assert "messages[1].tool_calls[0].function.arguments: " in warnings


def test_input_of_a_block_that_is_no_object_is_kept() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": "Paris"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "bad"}
    turns = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    prompt, warnings = answered(MESSAGES, {"messages": turns})
    assert '{"arguments": "Paris"}' in prompt
    assert "is no JSON object" in warnings


SYSTEM = {"role": "system", "content": "Be brief."}
LATE = {"role": "system", "content": "Be late."}
BOT = {"role": "assistant", "content": "fine"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [SYSTEM, USER, BOT, LATE, GO_ON]}),
        (RESPONSES, {"instructions": "Be brief.", "input": [USER, BOT, LATE, GO_ON]}),
        (MESSAGES, {"system": "Be brief.", "messages": [USER, BOT, LATE, GO_ON]}),
    ],
)
def test_instructions_are_merged_where_the_template_refuses_them(
    path: str, body: dict[str, Any]
) -> None:
    prompt, warnings = answered(path, body)
    assert prompt == "<user>Be brief.\n\nhello<assistant>fine<user>Be late.\n\ngo on"
    assert "messages[0] (system): " in warnings


def test_half_of_a_surrogate_pair_is_a_replacement_character() -> None:
    async def asked(path: str, body: bytes) -> None:
        port = StrictPort()
        got = await Client(app_of(site_with(port))).ask(path, body)
        assert got.status == 200, got.body
        assert port.prompt == "<user>H\ufffdllo \U0001f600 \\ud800 \ufffd"
        assert "surrogate" in got.json()["warnings"][0]

    text = rb'"H\ud800llo \ud83d\ude00 \\ud800 \uDC00"'
    turns = rb'[{"role": "user", "content": ' + text + b"}]"
    run(asked(CHAT, b'{"messages": ' + turns + b"}"))
    run(asked(MESSAGES, b'{"max_tokens": 5, "messages": ' + turns + b"}"))
    run(asked(RESPONSES, b'{"input": ' + text + b"}"))


def test_half_of_a_pair_in_a_prompt_is_one_too() -> None:
    async def asked() -> None:
        port = ScriptedPort()
        got = await Client(app_of(site_with(port))).ask(
            "/v1/completions", rb'{"prompt": "a\ud800"}'
        )
        assert (got.status, port.requests[0].prompt_ids) == (200, [2, ord("a"), 511])

    run(asked())


def test_items_of_other_types_are_calls_results_or_left_out() -> None:
    items: list[dict[str, Any]] = [
        USER,
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"text": "done"}]},
        {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c2", "output": {"exit": 0}},
        {"type": "mcp_call", "id": "m1", "name": "find", "arguments": "{}", "output": "found"},
        {"type": "web_search_call", "id": "w1", "status": "completed"},
        {"type": "compaction", "encrypted_content": "x"},
        {"role": "assistant", "content": [{"type": "output_image"}, {"text": "fine"}]},
        GO_ON,
    ]
    turns = turns_of(None, items)
    said = [(one["role"], one["content"], len(one.get("tool_calls", ()))) for one in turns.done()]
    assert said == [
        ("user", "hello", 0),
        ("assistant", None, 1),
        ("tool", "done", 0),
        ("assistant", None, 1),
        ("tool", '{"exit":0}', 0),
        ("assistant", None, 1),
        ("tool", "found", 0),
        ("assistant", "[output_image left out]fine", 0),
        ("user", "go on", 0),
    ]
    functions = [one["tool_calls"][0]["function"] for one in turns.messages if "tool_calls" in one]
    assert functions == [
        {"name": "patch", "arguments": {"input": "*** Begin"}},
        {"name": "local_shell", "arguments": {"action": {"command": ["ls"]}}},
        {"name": "find", "arguments": "{}"},
    ]
    named = [note.partition(":")[0] for note in turns.notes]
    assert named == ["input[6]", "input[7]", "input[8].content"]
    assert "input[7]" in answered(RESPONSES, {"input": items})[1]


def test_blocks_of_other_types_are_calls_results_or_left_out() -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"title": "T"}]},
        {"type": "compaction", "content": "x"},
        {"type": "text", "text": "fine"},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}
    given = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    turns = turns_of_blocks(None, given)
    said = [(message["role"], message["content"]) for message in turns.messages]
    assert said == [
        ("user", "hello"),
        ("assistant", None),
        ("tool", '{"title":"T"}'),
        ("assistant", "fine"),
        ("tool", "[image left out]"),
    ]
    assert len(turns.notes) == 2


def test_a_tool_without_a_description_is_one() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    function = {"name": "f", "parameters": schema}
    tools = {"tools": [{"type": "function", "function": function}]}
    assert answered(CHAT, {"messages": [USER], **tools})[0] == "<user>hello"


@pytest.mark.parametrize("role", ["USER", "critic", "function"])
def test_unknown_roles_are_said_to_be_so(role: str) -> None:
    prompt, warnings = answered(CHAT, {"messages": [USER, BOT, {"role": role, "content": "more"}]})
    assert prompt.endswith("more")
    assert f"messages[2] ({role}): " in warnings
