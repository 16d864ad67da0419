"""The grammar of calls in text: what it lets a model write, a byte a token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.api.structure import StructureOptions
from outrider.core.errors import ConfigError
from outrider.plugins.tools.fields import OutputFormat
from outrider.plugins.tools.formats import GENERIC, GLM, HERMES, LLAMA, MISTRAL, QWEN_XML, THINK
from outrider.plugins.tools.grammar import (
    Choice,
    Form,
    answer_grammar,
    form_of,
    offered_tool,
)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool('say "so"', loud={"type": "boolean"}),
    tool("add", a={"type": "integer"}),
    tool("now"),
]
SAY = json.dumps({"name": 'say "so"', "arguments": {"loud": True}})
ADD = '{"name": "add", "arguments": {"a": 1}}'
NOW = '{ "name":"now" ,\n"arguments" : {}\n}'
THINKS = OutputFormat("generic", (*GENERIC.fields, THINK))


def is_written(
    text: str,
    choice: Choice,
    given: OutputFormat = GENERIC,
    *,
    parallel: bool = True,
    begun: bool = False,
    form: Form | None = None,
    tools: Sequence[Mapping[str, Any]] = TOOLS,
) -> bool:
    """Whether the grammar lets `text` be all of an answer."""
    offered = [offered_tool(one, "tools[0]") for one in tools]
    grammar = answer_grammar(
        given, offered, choice=choice, parallel=parallel, begun=begun, form=form
    )
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer("byte"), grammar.text)
    assert not matcher.is_error(), matcher.get_error()
    tokens = [*text.encode()]
    return matcher.validate_tokens(tokens) == len(tokens) and (
        matcher.consume_tokens(tokens) and matcher.is_accepting()
    )


@pytest.mark.parametrize(
    "text",
    ["", "Five.", f"So:\n{ADD}", ADD, NOW, SAY, f"{ADD}\n{SAY}", 'In {"name": "Bob"} or {"a": 1}'],
)
def test_text_is_free_and_calls_may_come(text: str) -> None:
    assert is_written(text, "auto")


@pytest.mark.parametrize(
    "text",
    [
        ADD.replace("1", '"1"'),
        f"So: {ADD.replace('1', '1.5')}",
        ADD.replace('"a"', '"b"'),
        ADD.replace("add", "now"),
        ADD[:-1],
        f"{ADD} and so on",
        f"{ADD}\n{ADD.replace('add', 'sub')}",
        '{"name": "add"}',
    ],
)
def test_what_begins_as_a_call_becomes_one_and_ends_the_answer(text: str) -> None:
    assert not is_written(text, "auto")


def test_calls_that_are_demanded_are_all_there_is() -> None:
    for text in (ADD, SAY, f"{ADD}\n{SAY}"):
        assert is_written(text, "required")
    for text in ("", "Five.", f"So: {ADD}", f"{ADD}.", ADD.replace("add", "sub")):
        assert not is_written(text, "required")


@pytest.mark.parametrize("blank", ["\u00a0", "\u2002", "\u3000", "\x0b"])
@pytest.mark.parametrize("where", [', "arg', '": {"a', "}}"])
def test_blanks_are_those_of_json(blank: str, where: str) -> None:
    """A demanded call with others would be shown as text."""
    assert is_written(ADD.replace(where, f"{where[0]} {where[1:]}"), "required")
    assert not is_written(ADD.replace(where, f"{where[0]}{blank}{where[1:]}"), "required")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_one_call_alone_is_one(choice: Choice) -> None:
    assert is_written(ADD, choice, parallel=False)
    assert not is_written(f"{ADD}\n{ADD}", choice, parallel=False)


def test_a_thought_comes_before_a_call() -> None:
    assert is_written(f"<think>so</think>\n{ADD}", "required", THINKS)
    assert is_written(f"so</think>{ADD}", "required", THINKS, begun=True)
    assert is_written(ADD, "required", THINKS)
    assert not is_written(f"<think>so</think>\n{ADD}", "required")


FORMS: dict[str, tuple[StructureOptions, str, str]] = {
    "schema": ({"schema": {"type": "object", "properties": {"b": {}}}}, '{"name": "x/y"}', "[1]"),
    "json": ({"json": True}, '{"a": [1]}', "3"),
    "choices": ({"choices": ["yes", 'n"o']}, 'n"o', "no"),
    "regex": ({"regex": "a/b\\/[/\n]c\\\\"}, "a/b/\nc\\", "a/b/nc\\"),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_is_a_call_or_of_the_form(name: str) -> None:
    options, right, wrong = FORMS[name]
    form = form_of(options)
    assert form is not None
    for begun, before in ((False, ""), (False, "<think>so</think>\n"), (True, "so</think>\n\n")):
        for text in (right, ADD, f"{ADD}\n{SAY}"):
            assert is_written(before + text, "auto", THINKS, begun=begun, form=form), text
        for text in (wrong, f"So: {right}", "", f"{right}{ADD}"):
            assert not is_written(before + text, "auto", THINKS, begun=begun, form=form), text
        assert is_written(before + right, "auto", THINKS, begun=begun, form=form, tools=())
        assert not is_written(before + ADD, "auto", THINKS, begun=begun, form=Form('"x"'), tools=())
    # An object may be of both.
    odd, is_json = ADD.replace("1", '"1"'), name in ("json", "schema")
    assert is_written(odd, "auto", form=form) is is_json
    assert not is_written(f"{ADD}\n{ADD}", "auto", parallel=False, form=form)
    assert is_written(ADD, "auto", HERMES, form=form) is is_json
    assert is_written(f"<tool_call>\n{ADD}\n</tool_call>", "auto", HERMES, form=form)


def test_a_form_needs_no_grammar_of_a_model_without_thoughts() -> None:
    for given in (HERMES, LLAMA, MISTRAL):
        assert answer_grammar(given, [], choice="auto", form=Form('"x"')) is None
    offered = [offered_tool(TOOLS[1], "tools[0]")]
    assert answer_grammar(MISTRAL, offered, choice="auto", form=Form('"x"')) is None
    assert form_of({"grammar": 'start: "x"'}) is None


# As pydantic writes nested models: references, one of them to the whole.
NESTED = {
    "type": "object",
    "properties": {
        "p": {"$ref": "#/$defs/P"},
        "c": {"$ref": "#/$defs/C"},
        "up": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["p", "c", "up"],
    "additionalProperties": False,
    "$defs": {
        "P": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "of": {"items": {"$ref": "#/$defs/P"}}},
            "additionalProperties": False,
        },
        "C": {"enum": ["red", "blue"], "type": "string"},
    },
}
P, UP = '{"x": 1, "of": [{"x": 2}]}', '{"p": {}, "c": "red", "up": null}'
WHOLE = f'{{"p": {P}, "c": "blue", "up": {UP}}}'
CALLS: dict[str, tuple[OutputFormat, str]] = {
    "hermes": (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {WHOLE}}}\n</tool_call>'),
    "llama": (LLAMA, f'{{"name": "f", "parameters": {WHOLE}}}'),
    "generic": (GENERIC, f'{{"name": "f", "arguments": {WHOLE}}}'),
    "qwen xml": (
        QWEN_XML,
        f"<tool_call>\n<function=f>\n<parameter=p>\n{P}\n</parameter>\n<parameter=c>\nblue\n"
        f"</parameter>\n<parameter=up>\n{UP}\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        GLM,
        f"<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{P}</arg_value>\n<arg_key>c</arg_key>\n"
        f"<arg_value>blue</arg_value>\n<arg_key>up</arg_key>\n<arg_value>{UP}</arg_value>\n"
        "</tool_call>",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_references_within_a_tool_find_what_they_name(name: str) -> None:
    given, text = CALLS[name]
    tools = [{"function": {"name": "f", "parameters": NESTED}}]
    assert is_written(text, "required", given, tools=tools)
    for right, wrong in (("blue", "green"), ('"x": 2', '"x": "2"'), ('"up": null', '"up": 1')):
        assert not is_written(text.replace(right, wrong), "required", given, tools=tools)


def test_a_tool_that_cannot_be_followed_is_named() -> None:
    loose = {"type": "object", "properties": {"a": {"uniqueItems": True, "type": "array"}}}
    one = {"function": {"name": "f", "parameters": loose}}
    found = offered_tool(one, "tools[3].function.parameters")
    assert found.notes == (
        "tools[3].function.parameters: the tool 'f': properties.a.uniqueItems: left out, so the "
        "text may break it",
    )
    told = r"tools\[3\].x: the tool 'f': properties.a.uniqueItems: the keyword uniqueItems cannot"
    with pytest.raises(ConfigError, match=told):
        offered_tool({"function": {**one["function"], "strict": True}}, "tools[3].x")
    with pytest.raises(ConfigError, match="no JSON schema"):
        offered_tool({"function": {"name": "f", "parameters": [1]}}, "tools[3].x")
