"""Conversations with tools under templates that know of none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.api.chat_messages import checked_messages, checked_tools, in_text
from outrider.api.chat_template import ChatTemplate

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = checked_tools([{"type": "function", "function": ADD}])
HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
# As Gemma's and Mistral's do: no instructions, turns that alternate, no other roles.
STRICT = """\
{%- for m in messages %}
{%- if m.role != ("user" if loop.index0 % 2 == 0 else "assistant") %}
{{- raise_exception("roles must alternate") }}{% endif %}
{{- m.role }}: {{ m.content }}
{% endfor %}"""


def rendered(source: str, messages: list[dict[str, Any]], **more: Any) -> str:
    template = ChatTemplate(source, {})
    try:
        return template.render(checked_messages(messages)[0], **more).text
    finally:
        template.close()


def test_the_tools_are_listed_before_what_is_asked() -> None:
    text = rendered(STRICT, [HELLO], tools=TOOLS)
    assert json.dumps(ADD) in text
    assert '{"name": "the tool\'s name", "arguments": {"its parameter": "a value"}}' in text
    assert text.endswith("answer in words.\n\nhello\n")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_of_the_callers_are_kept_behind_them(role: str) -> None:
    found = in_text([{"role": role, "content": "Be brief."}, HELLO], TOOLS)
    assert [message["role"] for message in found] == [role, "user"]
    assert found[0]["content"].endswith("\n\nBe brief.")
    assert found[1] == HELLO
    assert in_text([{"role": "assistant", "content": "hi"}], TOOLS)[0]["role"] == "user"
    # What the caller said in two messages is two.
    assert in_text([HELLO, HELLO], TOOLS)[1:] == [HELLO]


def test_calls_and_what_they_gave_are_turns_that_alternate() -> None:
    messages = [
        HELLO,
        {"role": "assistant", "content": "I add.", "tool_calls": [CALL, CALL | {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c9", "content": "3"},
        {"role": "user", "content": "and?"},
    ]
    for given in (TOOLS, ()):
        text = rendered(STRICT, messages, tools=given)
        assert text.endswith(
            "hello\n"
            'assistant: I add.\n{"name": "add", "arguments": {"a": 1}}\n'
            '{"name": "add", "arguments": {"a": 1}}\n'
            "user: add gave:\n2\n\nthe tool gave:\n3\n\nand?\n"
        )


def test_the_last_message_can_be_gone_on_with() -> None:
    begun = [HELLO, {"role": "assistant", "content": "Five"}]
    assert rendered(STRICT, begun, tools=TOOLS, continues=True).endswith("assistant: Five")


def test_a_template_that_has_a_place_writes_tools_itself() -> None:
    source = "{{ tools[0].function.name }}{{ messages[0].content }}"
    assert rendered(source, [HELLO], tools=TOOLS) == "addhello"
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    # Without tools on offer, one that has words for calls alone uses them.
    own = "{{ messages[1].tool_calls[0].function.name }}"
    assert rendered(own, [HELLO, calls]) == "add"
    assert rendered("{{ messages[0].content }}", [HELLO]) == "hello"


def test_what_was_handed_in_stays_as_it_is() -> None:
    messages, _ = checked_messages([HELLO, {"role": "assistant", "tool_calls": [CALL]}])
    before = json.dumps(messages)
    in_text(messages, TOOLS)
    assert json.dumps(messages) == before
