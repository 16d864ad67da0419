"""A checkpoint's own response template: read as Hugging Face reads it, or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from typing import Any

import msgspec
import pytest

from doubles.scripted_port import CARD
from outrider.api.chat_template import PromptEnd
from outrider.plugins.tools.fields import PENDING, Match, literal, pattern
from outrider.plugins.tools.formats import format_of, format_of_template, parser_for
from outrider.plugins.tools.parser import FormatParser
from outrider.server.parts import Part, PlainParser, ReasoningDelta, TextDelta, ToolDelta, ToolOpen

SCHEMAS: Mapping[str, Any] = {
    "add": {"a": {"type": "integer"}, "word": {"type": "string"}},
    "now": {},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
    for name, properties in SCHEMAS.items()
]

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}
XML: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>\s*",
            "close": ["</function>\n</tool_call>", "</function></tool_call>"],
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            "repeats": True,
            "transform": NAMED,
        },
        "content": {},
    },
}
CHANNELS: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|return|>", "<|end|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>[\w.]+)"
            r"[^<]*<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "repeats": True,
            "transform": NAMED,
        },
    },
}
LAX: dict[str, Any] = {
    "start_anchor": "<model>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>call:(?P<name>\w+)",
            "close": "</call>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<e>", "<e>"]]},
            "repeats": True,
            "transform": NAMED,
        },
        "content": {},
    },
}
LISTED: dict[str, Any] = {
    "start_anchor": "[/INST]",
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
            "transform_each": True,
        },
        "content": {},
    },
}

CASES: list[tuple[dict[str, Any], str]] = [
    (HERMES, "just text"),
    (HERMES, "<think>\nso\n</think>\n\nyes"),
    (HERMES, '<think>a</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n' * 2),
    (
        XML,
        "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=word>\n4 <b\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    (XML, "<tool_call><function=now></function></tool_call>"),
    (CHANNELS, "<|channel|>analysis<|message|>so<|end|><|channel|>final<|message|>yes"),
    (
        CHANNELS,
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add json<|message|>{"a": 5}<|call|>',
    ),
    (LAX, "<call>call:add{a:1,word:<e>x: y<e>}</call>"),
    (
        LISTED,
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
    ),
]


def message(template: Mapping[str, Any], text: str, pieces: int | None = None) -> dict[str, Any]:
    """What our parser tells, as the message that Hugging Face's makes."""
    ids = count()
    parser = FormatParser(format_of_template(template), SCHEMAS, new_id=lambda: f"{next(ids)}")
    size = pieces or max(len(text), 1)
    parts: list[Part] = []
    for at in range(0, len(text), size):
        parts += parser.feed(text[at : at + size])
    parts += parser.finish()
    calls: list[dict[str, Any]] = []
    found = {"content": "", "thought": ""}
    for part in parts:
        match part:
            case TextDelta(more):
                found["content"] += more
            case ReasoningDelta(more):
                found["thought"] += more
            case ToolOpen(name=name):
                calls.append({"name": name})
            case ToolDelta(arguments=more):
                calls[-1]["arguments"] = json.loads(more)
            case _:
                pass
    return found | {"calls": calls}


@pytest.mark.parametrize("place", range(len(CASES)))
def test_messages_are_those_of_transformers(place: int) -> None:
    oracle = pytest.importorskip("transformers.utils.chat_parsing")
    template, text = CASES[place]
    wanted = oracle.parse_response(text, template, prefix="", tools=TOOLS)
    thought = wanted.get("reasoning_content") or wanted.get("thinking") or ""
    calls = [call["function"] for call in wanted.get("tool_calls", ())]
    content = (wanted.get("content") or "").strip()
    for pieces in (None, 1, 3):
        assert message(template, text, pieces) == {
            "content": content,
            "thought": thought,
            "calls": calls,
        }


def test_text_around_fields_is_not_lost() -> None:
    found = message(CHANNELS, "before<|channel|>final<|message|>yes<|end|>after")
    assert found["content"] == "beforeyesafter"


def test_the_anchor_says_where_the_answer_begins() -> None:
    given = format_of(msgspec.structs.replace(CARD, response_template=HERMES))
    prompt = "<|im_start|>user\n<think><|im_start|>assistant\n"
    parser = parser_for(given, prompt=prompt)
    assert [*parser.feed("so"), *parser.finish()] == [TextDelta("so")]
    parser = parser_for(given, prompt=prompt + "<think>\n")
    assert [*parser.feed("so"), *parser.finish()] == [ReasoningDelta("so")]
    # A message that is gone on with.
    parser = parser_for(given, prompt=PromptEnd(f"{prompt}<think>\nI", prompt.rindex("assistant")))
    found = [*parser.feed(" say"), *parser.feed("</think>so"), *parser.finish()]
    assert found == [ReasoningDelta("say"), TextDelta("so")]


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"version": 2, "fields": {"content": {}}},
        {"fields": {"tool_calls": {}}},
        {"fields": {"tool_calls": {"open_pattern": "(a+)+b"}}},
        {"fields": {"tool_calls": {"open_pattern": "a|b"}}},
        {"fields": {"tool_calls": {"open_pattern": r"a(?=b)"}}},
        {"fields": {"tool_calls": {"open_pattern": ".*a"}}},
        {"fields": {"tool_calls": {"open": ""}}},
        {"fields": {"tool_calls": {"open": "a", "content": "python"}}},
        {"fields": {"tool_calls": 3}},
    ],
    ids=str,
)
def test_a_template_that_is_not_followed_leaves_the_table(template: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        format_of_template(template)
    card = msgspec.structs.replace(CARD, response_template=template, chat_template="")
    assert isinstance(parser_for(format_of(card)), PlainParser)


@pytest.mark.parametrize(
    ("source", "text", "end", "groups"),
    [
        (r"<f=(?P<name>[^>]+)>", "<f=ab>", 6, {"name": "ab"}),
        (r"<f>\s*x", "<f>  x", 6, {}),
        (r"<a(?P<h>.*?)\n?</a>", "<ab\n</a>", 8, {"h": "b"}),
        (r"to=(?:x)?[a-c\d]+;", "to=xb1;", 7, {}),
        (r"a\.b?c", "a.c", 3, {}),
    ],
)
def test_patterns_match_from_left_to_right(
    source: str, text: str, end: int, groups: dict[str, str]
) -> None:
    delimiter = pattern(source)
    assert delimiter.match(text + "zz", 0, final=False) == Match(end, groups)
    for size in range(1, len(text)):
        assert delimiter.match(text[:size], 0, final=False) is PENDING
        assert delimiter.match(text[:size], 0, final=True) is None


def test_a_delimiter_without_an_end_is_none() -> None:
    assert pattern("<a.*?>").match("<a" + "x" * 300, 0, final=False) is None
    assert literal("<a>").match("<b>", 0, final=False) is None
