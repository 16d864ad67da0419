"""The grammar of calls in text: what it lets a model write, a byte a token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.server.parsing.families import GENERIC, THINK
from outrider.server.parsing.fields import OutputFormat
from outrider.server.parsing.grammar import Choice, tool_grammar


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
) -> bool:
    """Whether the grammar lets `text` be all of an answer."""
    grammar = tool_grammar(given, TOOLS, choice=choice, parallel=parallel, begun=begun)
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
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
