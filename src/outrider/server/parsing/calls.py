"""Calls of tools in the spellings that models write them in, as names and arguments.

A reader gets the text between two delimiters and the groups of the first one. It raises ValueError,
or what a wrong shape leads to, for text that is no call: the parser then shows it as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from outrider.server.parsing.json_text import json_values, lax_json, listed, parse_json

# The schemas of the arguments of each tool that was offered.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
# DeepSeek's brackets are of full width, with blanks of a tokenizer.
DEEPSEEK_TOKEN = "<\uff5ctool\u2581{}\uff5c>"


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]

    @property
    def json(self) -> str:
        """The arguments; what UTF-8 cannot hold is escaped."""
        text = json.dumps(self.arguments, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:
            return json.dumps(self.arguments)
        return text


ReadCalls: TypeAlias = Callable[[str, Mapping[str, str], Schemas], list[Call]]


def call_of(value: object) -> Call:
    """From an object with a name and arguments, under the names that models have for these."""
    entry = cast("Mapping[str, Any]", value)
    inner: object = entry.get("function")
    if isinstance(inner, Mapping):
        entry = cast("Mapping[str, Any]", inner)
    name = entry.get("name", inner)
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    arguments: object = next((entry[key] for key in _ARGUMENTS if key in entry), None)
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}")
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments that are no object")
    return Call(name, cast("Mapping[str, Any]", arguments))


_ARGUMENTS = ("arguments", "parameters", "args")


def json_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """One object, several of them, or a list: Hermes, Mistral's first form."""
    del groups, schemas
    found: list[Call] = []
    for value in json_values(body):
        found += [call_of(one) for one in listed(value)]
    return found


def offered_json_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """The same where an answer is a call by nothing but its form, of tools that were offered:
    Llama."""
    return offered(json_calls(body, groups, schemas), schemas)


def offered(calls: list[Call], schemas: Schemas) -> list[Call]:
    if any(call.name not in schemas for call in calls):
        raise ValueError("no call of a tool that was offered")
    return calls


def named_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """Arguments behind the group `name`: Mistral's newer form, Kimi-K2's."""
    del schemas
    name = groups["name"].strip().removeprefix("functions.").partition(":")[0]
    return [call_of({"name": name, "arguments": parse_json(body)})]


def deepseek_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """A name, the token `sep` and an object; or the word function, `sep`, a name and a block of
    JSON."""
    del groups, schemas
    before, _, behind = body.partition(DEEPSEEK_TOKEN.format("sep"))
    name = before.strip()
    if name == "function":
        name, _, behind = behind.partition("\n")
    text = behind.strip().removeprefix("```json").removesuffix("```")
    return [call_of({"name": name.strip(), "arguments": parse_json(text)})]


def harmony_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """gpt-oss: the header names the function, the message is its arguments."""
    del schemas
    header = groups["header"] if "header" in groups else f"to={groups['to']}"
    name = recipient(header)
    return [call_of({"name": name, "arguments": parse_json(body) if body.strip() else {}})]


def recipient(header: str) -> str:
    """Of a harmony message; "" if it is for the reader."""
    behind = header.partition("to=")[2]
    name = behind.split("<")[0].split()
    return name[0].removeprefix("functions.") if name and name[0] not in _READERS else ""


_READERS = ("assistant", "user")


def gemma_calls(quote: str) -> ReadCalls:
    """`call:name{key:<escape>text<escape>,key:3}`: FunctionGemma, with `quote` for `<escape>`, and
    Gemma 4."""

    def read(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
        del groups, schemas
        before, sign, rest = body.strip().partition("{")
        name = before.removeprefix("call:").strip()
        if not sign or not name:
            raise ValueError("a call without a name")
        text = lax_json("{" + rest, unquoted=True, strings=((quote, quote),))
        return [call_of({"name": name, "arguments": text})]

    return read
