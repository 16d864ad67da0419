"""Conversations that templates refuse or leave something out of: none ends there, none in silence.

The templates have the rules of published ones in a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.api.chat_messages import checked_messages, checked_tools, left_out
from outrider.api.chat_template import ChatTemplate, Rendered
from outrider.core.errors import CheckpointError

ECHO = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
# Gemma 2: no system message, turns that alternate.
GEMMA = """\
{%- if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{%- for m in messages %}
{%- if (m.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("roles must alternate") }}{% endif %}
{{- "<" ~ m.role ~ ">" ~ m.content }}
{%- endfor %}"""
# The embedded pair's, and many of base models: only these two roles are written.
TWO_ROLES = """\
{%- for m in messages %}{% if m.role in ("user", "assistant") %}<{{ m.role }}>{{ m.content }}
{%- endif %}{% endfor %}"""
# gpt-oss, SmolLM3 and others: a system message at the beginning alone.
FIRST_SYSTEM = """\
{%- if messages[0].role == "system" %}<system>{{ messages[0].content }}{% endif %}
{%- for m in messages %}{% if m.role in ("user", "assistant") %}<{{ m.role }}>{{ m.content }}
{%- endif %}{% endfor %}"""
# Command R7B: the word "developer" is in its source and its messages are not.
WORD_ALONE = "{# a message of the developer #}" + FIRST_SYSTEM
# Knows a developer.
DEVELOPER = FIRST_SYSTEM.replace('("user",', '("user", "developer",')
# Mistral: ids of nine characters, turns that alternate but for calls and results.
MISTRAL = """\
{%- set ns = namespace(n=0) %}{% for m in messages %}
{%- if m.role == "user" or (m.role == "assistant" and not m.tool_calls) %}
{%- if (m.role == "user") != (ns.n % 2 == 0) %}
{{- raise_exception("roles must alternate") }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}
{%- if m.tool_calls %}{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("nine characters") }}{% endif %}
{{- "[CALL]" ~ call.function.name ~ call.function.arguments | tojson }}
{%- endfor %}{% elif m.role == "tool" %}[RESULT]{{ m.content }}
{%- else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if tools %}{% endif %}"""
# Llama 3: one call in a turn, without text.
LLAMA = """\
{%- for m in messages %}{% if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("only single calls") }}{% endif %}
{{- "<call>" ~ m.tool_calls[0].function.name }}
{%- else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if tools %}{% endif %}"""
# Tools with all that a function may have.
WHOLE_TOOLS = """\
{%- for tool in tools %}{{ tool.function.name + ": " + tool.function.description }}
{%- for name, value in tool.function.parameters.properties.items() %}
{{- " " + name + " " + value.description }}{% endfor %}{% endfor %}{{ messages[0].content }}"""

USER = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "go on"}
BOT = {"role": "assistant", "content": "fine"}
SYSTEM = {"role": "system", "content": "Be brief."}
LATE = {"role": "system", "content": "Be late."}
DEVELOPS = {"role": "developer", "content": "Be polite."}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sun"}


def calling(*ids: str, content: str | None = None) -> dict[str, Any]:
    function = {"name": "weather", "arguments": '{"at": 1}'}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls}


_TEMPLATES: dict[str, ChatTemplate] = {}


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    yield
    while _TEMPLATES:
        _TEMPLATES.popitem()[1].close()


def rendered(source: str, messages: list[dict[str, Any]], **options: Any) -> Rendered:
    template = _TEMPLATES.setdefault(source, ChatTemplate(source, {}))
    return template.render(checked_messages(messages)[0], **options)


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (
            ECHO,
            [SYSTEM, USER, MORE, LATE],
            "<system>Be brief.<user>hello<user>go on<system>Be late.",
        ),
        (GEMMA, [SYSTEM, USER], "<user>Be brief.\n\nhello"),
        (GEMMA, [SYSTEM, DEVELOPS, USER], "<user>Be brief.\n\nBe polite.\n\nhello"),
        (GEMMA, [SYSTEM], "<user>Be brief."),
        (GEMMA, [USER, MORE], "<user>hello\n\ngo on"),
        (GEMMA, [USER, BOT, BOT, MORE], "<user>hello<assistant>fine\n\nfine<user>go on"),
        (GEMMA, [BOT, MORE], "<user><assistant>fine<user>go on"),
        (GEMMA, [SYSTEM, BOT, MORE], "<user>Be brief.<assistant>fine<user>go on"),
        (GEMMA, [USER, BOT, LATE, MORE], "<user>hello<assistant>fine<user>Be late.\n\ngo on"),
        (TWO_ROLES, [SYSTEM, USER], "<user>Be brief.\n\nhello"),
        (TWO_ROLES, [DEVELOPS, USER], "<user>Be polite.\n\nhello"),
        (TWO_ROLES, [SYSTEM], "<user>Be brief."),
        (TWO_ROLES, [{"role": "USER", "content": "loud"}], "<user>loud"),
        (TWO_ROLES, [USER, {"role": "critic", "content": "bad"}], "<user>hello<user>bad"),
        (FIRST_SYSTEM, [SYSTEM, DEVELOPS, USER], "<system>Be brief.\n\nBe polite.<user>hello"),
        (
            FIRST_SYSTEM,
            [SYSTEM, USER, BOT, LATE, MORE],
            "<system>Be brief.<user>hello<assistant>fine<user>Be late.<user>go on",
        ),
        (
            MISTRAL,
            [USER, calling("call_1"), RESULT, BOT],
            '<user>hello[CALL]weather{"at": 1}[RESULT]sun<assistant>fine',
        ),
        (
            MISTRAL,
            [USER, calling("call_1"), RESULT, MORE],
            '<user>hello[CALL]weather{"at": 1}[RESULT]sun<assistant><user>go on',
        ),
        (
            LLAMA,
            [USER, calling("call_1", "c2"), RESULT, RESULT | {"tool_call_id": "c2"}],
            "<user>hello<call>weather<tool>sun<call>weather<tool>sun",
        ),
        (
            LLAMA,
            [USER, calling("call_1", content="I look"), RESULT],
            "<user>hello<assistant>I look<call>weather<tool>sun",
        ),
    ],
)
def test_a_conversation_is_rendered_in_a_form_that_the_template_takes(
    source: str, messages: list[dict[str, Any]], text: str
) -> None:
    assert rendered(source, messages).text == text


def test_a_conversation_that_the_template_takes_is_left_as_it_is() -> None:
    messages = [SYSTEM, USER, MORE, BOT, LATE, {"role": "critic", "content": "bad"}]
    assert rendered(ECHO, messages).notes == ()


def test_notes_name_what_was_changed() -> None:
    found = rendered(GEMMA, [SYSTEM, USER, MORE, BOT, LATE])
    names = [note.partition(":")[0] for note in found.notes]
    assert names == ["messages[4] (system)", "messages[0] (system)", "messages[2] (user)"]
    assert rendered(TWO_ROLES, [DEVELOPS, USER]).notes[0].startswith("messages[0] (developer): ")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (ECHO, "<system>Be polite.<user>hello"),
        (WORD_ALONE, "<system>Be polite.<user>hello"),
        (DEVELOPER, "<developer>Be polite.<user>hello"),
    ],
)
def test_a_developer_has_the_role_that_the_template_writes(source: str, text: str) -> None:
    found = rendered(source, [DEVELOPS, USER])
    assert (found.text, found.notes) == (text, ())


def test_a_message_that_no_form_has_room_for_is_named() -> None:
    found = rendered("{{ messages[-1].content }}", [USER, BOT, MORE])
    assert found.text == "go on"
    assert [note.partition(":")[0] for note in found.notes] == [
        "messages[0] (user)",
        "messages[1] (assistant)",
    ]
    assert "hello" in found.notes[0]


@pytest.mark.parametrize("content", ["a  b", 'a "b"\n\tc', "é\U0001f600", " a ", "x</think>a"])
@pytest.mark.parametrize("how", ["", " | trim", " | tojson", " | replace('\n', '')"])
def test_texts_are_found_however_the_template_writes_them(content: str, how: str) -> None:
    source = "{% for m in messages %}<{{ m.content" + how + " }}>{% endfor %}"
    found = rendered(source, [{"role": "user", "content": content}, BOT])
    assert found.notes == ()


def test_each_message_has_its_own_part_of_the_prompt() -> None:
    prompt = "<user>yes please<user>yes"
    yes = {"role": "user", "content": "yes"}
    both = [{"role": "user", "content": "yes please"}, yes]
    assert left_out(prompt, both) == []
    assert [note[:11] for note in left_out(prompt, [*both, yes])] == ["messages[2]"]


def test_calls_that_are_left_out_are_named() -> None:
    messages, _ = checked_messages([calling("call_1")])
    assert left_out("nothing", messages)[0].startswith("messages[0] (assistant): ")
    assert left_out("functions.weather:0", messages) == left_out("call_1", messages) == []


def test_calls_that_the_template_refuses_are_text() -> None:
    loop, rest = "{% for m in messages %}", "{% if tools %}{% endif %}"
    refusal = "{% if m.role == 'tool' or m.tool_calls %}{{ raise_exception('no') }}{% endif %}"
    source = ECHO.replace(loop, loop + refusal) + rest
    found = rendered(source, [SYSTEM, USER, calling("call_1"), RESULT, MORE])
    call = '{"name": "weather", "arguments": {"at": 1}}'
    assert f"<system>Be brief.<user>hello<assistant>{call}<user>weather gave:" in found.text
    assert found.text.endswith("sun\n\ngo on")


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f"},
        {"name": "f", "description": None, "parameters": None},
        {"name": "f", "parameters": {}},
        {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    ],
)
def test_a_tool_needs_nothing_but_a_name(function: dict[str, Any]) -> None:
    tools = checked_tools([{"type": "function", "function": function}])
    assert rendered(WHOLE_TOOLS, [USER], tools=tools).text.startswith("f: ")
    # Without need it stays as it is.
    assert rendered("{{ tools[0].function }}", [USER], tools=tools).text == str(function)


def test_the_last_message_is_gone_on_with_in_another_form() -> None:
    begun = [SYSTEM, USER, MORE, {"role": "assistant", "content": "one, "}]
    found = rendered(GEMMA, begun, continues=True)
    assert found.text == "<user>Be brief.\n\nhello\n\ngo on<assistant>one, "


def test_a_template_that_refuses_every_form_gives_its_own_reason() -> None:
    with pytest.raises(CheckpointError, match="not today") as caught:
        rendered("{{ raise_exception('not today') }}", [SYSTEM, USER, MORE])
    assert "--chat-template" in str(caught.value.hint)
