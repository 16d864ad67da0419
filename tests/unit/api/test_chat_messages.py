"""Conversations with tools: what is refused, and what templates are given."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.api.chat_messages import checked_messages, checked_tools, checked_variables
from outrider.api.chat_template import ChatTemplate, ChatTemplates
from outrider.core.errors import CheckpointError, ConfigError

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_messages_take_the_form_that_templates_expect() -> None:
    found, notes = checked_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "so"},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "assistant", "content": "two", "tool_calls": None},
        ]
    )
    function = {"name": "add", "arguments": {"a": 1}}
    assert not notes
    assert found == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            "reasoning_content": "so",
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]


BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"content": "x"}, r"messages\[1\]\.role: expected text, got None"),
    ({"role": "user"}, "a message has content"),
    ({"role": "user", "content": 3}, r"content: expected text, got 3"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "only text can be read"),
    ({"role": "user", "content": ["text"]}, "only text can be read"),
    ({"role": "assistant", "tool_calls": "x"}, "tool_calls: expected a list"),
    ({"role": "assistant", "tool_calls": [3]}, r"tool_calls\[0\]: expected an object"),
    ({"role": "assistant", "tool_calls": [{}]}, r"\[0\]\.function: expected an object"),
    ({"role": "assistant", "content": "x", "reasoning": 1}, "reasoning: expected text"),
    ({"role": "tool", "content": "x", "tool_call_id": 1}, "tool_call_id: expected text"),
]


@pytest.mark.parametrize(("message", "told"), BAD_MESSAGES)
def test_a_message_that_no_template_could_read_says_where_and_why(
    message: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        checked_messages([USER, message])


def test_tools_may_have_either_form() -> None:
    assert checked_tools([TOOL, {"type": "function", "name": "f"}]) == [
        TOOL,
        {"type": "function", "function": {"name": "f"}},
    ]


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        ({"type": "web_search"}, "only functions"),
        ({"type": "function"}, "function: expected an object"),
        ({"type": "function", "function": {"name": ""}}, "a tool has a name"),
        ({"type": "function", "function": {"name": "f", "parameters": 3}}, "parameters"),
    ],
)
def test_a_tool_that_is_none_is_refused(tool: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        checked_tools([tool])


def test_too_many_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match="1025 tools"):
        checked_tools([TOOL] * 1025)


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt"])
def test_a_variable_does_not_replace_what_the_template_is_given(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        checked_variables({name: 1})


def rendered(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    template = ChatTemplate(source, {})
    try:
        return template.render(messages, **options).text
    finally:
        template.close()


def test_tools_and_variables_reach_the_template() -> None:
    source = "{% if think is false %}fast {% endif %}{{ tools[0].function | tojson }}"
    found = rendered(source, [USER], tools=[TOOL], variables={"think": False})
    assert found == 'fast {"name": "add", "parameters": {"type": "object"}}'


def test_what_the_model_thought_has_the_name_that_the_template_reads() -> None:
    thought = [{"role": "assistant", "content": "", "reasoning_content": "so"}]
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert rendered(f"{{{{ messages[0].{name} }}}}", thought) == "so"


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_the_last_message_can_be_gone_on_with_to_the_letter() -> None:
    begun = [USER, {"role": "assistant", "content": "one, "}]
    assert rendered(CHATML, begun, continues=True) == "<user>hi</><assistant>one, "
    assert rendered(CHATML, begun) == "<user>hi</><assistant>one,</><assistant>"


def test_a_template_that_leaves_the_last_message_out_says_so() -> None:
    with pytest.raises(CheckpointError, match="leaves out the message"):
        rendered(
            "{{ messages[0].content }}",
            [USER, {"role": "assistant", "content": "x"}],
            continues=True,
        )


def test_only_the_assistant_is_gone_on_with() -> None:
    with pytest.raises(ConfigError, match="last message of the assistant"):
        checked_messages([USER], continues=True)
    with pytest.raises(ConfigError, match="last message of the assistant"):
        checked_messages([], continues=True)


def test_a_checkpoint_may_have_a_template_for_tools() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    templates = ChatTemplates.of({"chat_template": named, "response_template": {"fields": {}}})
    assert templates.pick().source == templates.source == "plain"
    assert templates.pick([TOOL]).source == templates.tool_source == "tools"
    assert templates.response == {"fields": {}}
    only = ChatTemplates.of({"chat_template": "plain"})
    assert only.pick([TOOL]).source == "plain"
    assert only.tool_source == ""
    assert only.response is None


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": 1', {"arguments": '{"a": 1'}),
        ('"Beijing"', {"arguments": "Beijing"}),
        ('["x"]', {"arguments": ["x"]}),
        ("run it", {"arguments": "run it"}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
        ("7", {"arguments": 7}),
        (["x"], {"arguments": ["x"]}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_odd_arguments_of_an_earlier_call_are_kept_within_an_object(
    arguments: object, read: dict[str, Any]
) -> None:
    found, notes = checked_messages([USER, call(arguments)])
    assert found[1]["tool_calls"][0]["function"]["arguments"] == read
    assert len(notes) == 1
    assert notes[0].startswith("messages[1].tool_calls[0].function.arguments: ")


@pytest.mark.parametrize("arguments", [None, "", " ", "null", "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: object) -> None:
    found, notes = checked_messages([call(arguments)])
    assert (found[0]["tool_calls"][0]["function"]["arguments"], notes) == ({}, [])


TEXT = {"type": "text", "text": "so"}
ODD_TURNS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"content": None}, {"content": ""}, 1),
    ({}, {"content": ""}, 1),
    ({"content": None, "refusal": "I will not"}, {"content": "I will not"}, 0),
    ({"content": [{"type": "refusal", "refusal": "no"}]}, {"content": "no"}, 0),
    (
        {"content": [{"type": "thinking", "thinking": "hm"}, TEXT]},
        {"content": "so", "reasoning_content": "hm"},
        0,
    ),
    (
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, TEXT]},
        {"content": "so", "reasoning_content": "hm"},
        0,
    ),
    ({"content": [{"type": "redacted_thinking", "data": "xx"}, TEXT]}, {"content": "so"}, 0),
    ({"content": [{"type": "image_url"}, TEXT]}, {"content": "[image_url left out]so"}, 1),
    ({"content": {"a": "é"}}, {"content": '{"a": "é"}'}, 1),
    (
        {"function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        0,
    ),
    (
        {"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
        {
            "content": "",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"input": "x"}},
                }
            ],
        },
        0,
    ),
]


@pytest.mark.parametrize(("turn", "read", "num_notes"), ODD_TURNS)
def test_odd_turns_of_the_assistant_are_read(
    turn: dict[str, Any], read: dict[str, Any], num_notes: int
) -> None:
    found, notes = checked_messages([USER, {"role": "assistant", **turn}])
    assert found[1] == {"role": "assistant", **read}
    assert len(notes) == num_notes
    assert all(note.startswith("messages[1]") for note in notes)
