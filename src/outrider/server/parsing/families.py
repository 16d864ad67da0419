"""Output formats of families whose checkpoints have no `response_template`.

A family is recognised by what its chat template writes, never by the name of a model: who renames a
checkpoint or trains it further keeps its template. The first entry that fits counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from outrider.server.parsing import calls
from outrider.server.parsing.calls import DEEPSEEK_TOKEN
from outrider.server.parsing.delimiter import Delimiter, literal, pattern
from outrider.server.parsing.fields import Field, OutputFormat


def _between(read: calls.ReadCalls, begin: str, end: str) -> Field:
    return Field("calls", (literal(begin),), (literal(end),), read=read)


def _thought(begin: str, end: str) -> Field:
    return Field("reasoning", (literal(begin),), (literal(end),))


def _first(source: str) -> Delimiter:
    """A delimiter that stands only where an answer begins."""
    return replace(pattern(source), at_start=True)


THINK = _thought("<think>", "</think>")
HERMES = OutputFormat("hermes", (_between(calls.json_calls, "<tool_call>", "</tool_call>"),))
QWEN_XML = OutputFormat(
    "qwen_xml", (_between(calls.qwen_xml_calls, "<tool_call>", "</tool_call>"),)
)
GLM = OutputFormat("glm", (_between(calls.glm_calls, "<tool_call>", "</tool_call>"), THINK))
FUNCTION_GEMMA = OutputFormat(
    "gemma",
    (_between(calls.gemma_calls, "<start_function_call>", "<end_function_call>"),),
    shows_special=True,
)
DEEPSEEK = OutputFormat(
    "deepseek",
    (
        _between(
            calls.deepseek_calls,
            DEEPSEEK_TOKEN.format("call\u2581begin"),
            DEEPSEEK_TOKEN.format("call\u2581end"),
        ),
        THINK,
    ),
    drops=(
        literal(DEEPSEEK_TOKEN.format("calls\u2581begin")),
        literal(DEEPSEEK_TOKEN.format("calls\u2581end")),
    ),
    shows_special=True,
)
MISTRAL = OutputFormat(
    "mistral",
    (
        Field("calls", (literal("[TOOL_CALLS]"),), gives_way=True, read=calls.named_json_calls),
        _thought("[THINK]", "[/THINK]"),
    ),
    shows_special=True,
)
LLAMA = OutputFormat(
    "llama",
    (
        Field("calls", (literal("<|python_tag|>"),), read=calls.json_calls),
        Field(
            "calls",
            (_first(r'\{\s*"name"'), _first(r'\{\s*"type"')),
            keeps=True,
            read=calls.offered_json_calls,
        ),
    ),
    shows_special=True,
)
THINKING = OutputFormat("thinking", (THINK,))
# What api/tools_in_text.py asks for: an object that a call is, to the end of the answer.
GENERIC = OutputFormat(
    "generic",
    (Field("calls", (pattern(r'\{\s*"name"'),), keeps=True, read=calls.offered_json_calls),),
)


def _is_for(channel: str) -> Callable[[Mapping[str, str]], bool]:
    """Whether a header of harmony is of a message of `channel` for the reader."""
    return lambda groups: not calls.recipient(groups["header"]) and _channel(groups) == channel


def _is_call(groups: Mapping[str, str]) -> bool:
    return bool(calls.recipient(groups["header"]))


def _channel(groups: Mapping[str, str]) -> str:
    """The first word behind `<|channel|>`, which is where the header begins if it has none."""
    words = groups["header"].rpartition("<|channel|>")[2].split("<")[0].split()
    return words[0] if words else ""


_HEADERS = (
    pattern(r"<\|channel\|>(?P<header>.*?)<\|message\|>"),
    pattern(r"<\|start\|>assistant(?P<header>.*?)<\|message\|>"),
    _first(r"to=(?P<to>.*?)<\|message\|>"),
)
_ENDS = tuple(map(literal, ("<|end|>", "<|call|>", "<|return|>")))
HARMONY = OutputFormat(
    "harmony",
    (
        Field("calls", _HEADERS[:2], _ENDS, _is_call, gives_way=True, read=calls.harmony_calls),
        Field("calls", _HEADERS[2:], _ENDS, gives_way=True, read=calls.harmony_calls),
        Field("reasoning", _HEADERS[:2], _ENDS, _is_for("analysis"), gives_way=True),
        Field("text", _HEADERS[:2], _ENDS, _is_for("final"), gives_way=True),
        Field("text", _HEADERS[:2], _ENDS, _is_for("commentary"), gives_way=True),
    ),
    drops=_ENDS,
    shows_special=True,
)


@dataclass(frozen=True, slots=True)
class Family:
    """`signs` are all in its chat templates."""

    signs: tuple[str, ...]
    given: OutputFormat


FAMILIES = (
    Family(("<|channel|>", "<|message|>"), HARMONY),
    Family(("<function=", "<parameter="), QWEN_XML),
    Family(("<arg_key>", "<tool_call>"), GLM),
    Family((DEEPSEEK_TOKEN.format("call\u2581begin"),), DEEPSEEK),
    Family(("[TOOL_CALLS]",), MISTRAL),
    Family(("<start_function_call>",), FUNCTION_GEMMA),
    Family(("<tool_call>",), HERMES),
    Family(("<|start_header_id|>", "tools"), LLAMA),
    Family(("</think>",), THINKING),
)


def format_of_family(chat_template: str) -> OutputFormat | None:
    """None for a template without calls and thoughts: all that its model writes is text."""
    for family in FAMILIES:
        if all(sign in chat_template for sign in family.signs):
            given = family.given
            if "</think>" in chat_template and THINK not in given.fields:
                given = replace(given, fields=(*given.fields, THINK))
            return given
    return None
