"""Tool calls: the formats in which models write them, parsed to names and arguments.

A reader gets the text between two delimiters and the groups of the first one. For text that is not
a call it raises ValueError, or another error of NOT_CALLS (json_text.py) that malformed data leads
to; the parser then shows the text as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from outrider.server.parsing.json_text import is_object, json_values, lax_json, listed, parse_json

# The schemas of the arguments of each tool that was offered.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
# DeepSeek's brackets are of full width, with blanks of a tokenizer.
DEEPSEEK_TOKEN = "<\uff5ctool\u2581{}\uff5c>"


@dataclass(frozen=True, slots=True)
class Call:
    """A call. With a `text`, the arguments are that text: it is not a complete JSON object."""

    name: str
    arguments: Mapping[str, Any]
    text: str | None = None

    @property
    def json(self) -> str:
        """The arguments as JSON; characters that UTF-8 cannot encode are escaped."""
        if self.text is not None:
            return self.text
        text = json.dumps(self.arguments, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:
            return json.dumps(self.arguments)
        return text


ReadCalls: TypeAlias = Callable[[str, Mapping[str, str], Schemas], list[Call]]
# Reads the begin of a text; returns a call's name and the index where its arguments' object begins.
ReadHead: TypeAlias = Callable[[str, Mapping[str, str]], "tuple[str, int] | None"]


def call_of(value: object) -> Call:
    """Return the call of an object, whose keys differ between models. Raises ValueError."""
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
    """Read one object, several objects, or a list: Hermes, Mistral's first format."""
    del groups, schemas
    found: list[Call] = []
    for value in json_values(body):
        found += [call_of(one) for one in listed(value)]
    return found


def offered_json_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """Read the same, but only calls of offered tools, for formats without delimiters: Llama."""
    return offered(json_calls(body, groups, schemas), schemas)


def offered(calls: list[Call], schemas: Schemas) -> list[Call]:
    if any(call.name not in schemas for call in calls):
        raise ValueError("no call of a tool that was offered")
    return calls


_PAIR = r'"[^"\\]{1,99}"\s*:\s*(?:"[^"\\]{0,256}"|[\w.+-]{1,32})'
# Text that may follow the arguments of a call: other keys and brackets.
_BEHIND = rf"(?:\s*,\s*{_PAIR})*[\s,;\[\]}}`]*"
BEHIND_CALL = re.compile(_BEHIND)
_MORE = r'(?:"(?:id|type|index)"\s*:\s*(?:"[^"\\]{0,99}"|\d{1,9})\s*,\s*)*'
_JSON_HEAD = re.compile(
    rf'{_BEHIND}\{{\s*{_MORE}"name"\s*:\s*"([^"\\]{{1,256}})"\s*,\s*{_MORE}'
    rf'"(?:{"|".join(_ARGUMENTS)})"\s*:\s*(?=\{{)'
)


def json_head(text: str, groups: Mapping[str, str]) -> tuple[str, int] | None:
    """A ReadHead for `json_calls`, if the name comes before the arguments."""
    del groups
    found = _JSON_HEAD.match(text)
    return None if found is None else (found[1], found.end())


def _object_head(name: str, text: str) -> tuple[str, int] | None:
    at = len(text) - len(text.lstrip())
    return (name, at) if text.startswith("{", at) else None


def named_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """Read arguments after the group `name`: Mistral's newer format, Kimi-K2. If a model writes a
    number instead of the name, the call is of the only tool with these arguments."""
    call = call_of({"name": _name(groups), "arguments": parse_json(body)})
    if call.name.isdigit():
        fits = [name for name, types in schemas.items() if call.arguments.keys() <= types.keys()]
        if len(fits) != 1:
            raise ValueError("a number that is no tool's")
        return [Call(fits[0], call.arguments)]
    return [call]


def named_head(text: str, groups: Mapping[str, str]) -> tuple[str, int] | None:
    """A ReadHead for `named_calls`."""
    return _object_head(_name(groups), text)


def _name(groups: Mapping[str, str]) -> str:
    return groups["name"].strip().removeprefix("functions.").partition(":")[0]


def deepseek_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """Read DeepSeek's calls: a name, `sep` and an object; or "function", `sep`, a name and JSON."""
    del groups, schemas
    before, _, behind = body.partition(DEEPSEEK_TOKEN.format("sep"))
    name = before.strip()
    if name == "function":
        name, _, behind = behind.partition("\n")
    text = behind.strip().removeprefix("```json").removesuffix("```")
    return [call_of({"name": name.strip(), "arguments": parse_json(text)})]


_SEP = re.escape(DEEPSEEK_TOKEN.format("sep"))
_DEEPSEEK_HEAD = re.compile(
    rf"\s*(?:function{_SEP}([^\n]{{1,256}})\n\s*```json\s*|([^<\n]{{1,256}}){_SEP}\s*)(?=\{{)"
)


def deepseek_head(text: str, groups: Mapping[str, str]) -> tuple[str, int] | None:
    """A ReadHead for `deepseek_calls`."""
    del groups
    found = _DEEPSEEK_HEAD.match(text)
    return None if found is None else ((found[1] or found[2]).strip(), found.end())


def harmony_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """Read a message of gpt-oss: the header names the function, the message is its arguments."""
    name = _addressee(groups)
    if name in schemas and body.strip() and not is_object(body):
        return [Call(name, {}, body.strip())]
    return [call_of({"name": name, "arguments": parse_json(body) if body.strip() else {}})]


def harmony_head(text: str, groups: Mapping[str, str]) -> tuple[str, int] | None:
    """A ReadHead for `harmony_calls`."""
    return _object_head(_addressee(groups), text)


def _addressee(groups: Mapping[str, str]) -> str:
    return recipient(groups["header"] if "header" in groups else f"to={groups['to']}")


def recipient(header: str) -> str:
    """Return the function to which a harmony message is addressed; "" if it is for the user."""
    behind = header.partition("to=")[2]
    name = behind.split("<")[0].split()
    return name[0].removeprefix("functions.") if name and name[0] not in _READERS else ""


_READERS = ("assistant", "user")


def gemma_calls(quote: str) -> ReadCalls:
    """Return a reader of `call:name{key:<escape>text<escape>,key:3}`: FunctionGemma, Gemma 4."""

    def read(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
        del groups, schemas
        before, sign, rest = body.strip().partition("{")
        name = before.removeprefix("call:").strip()
        if not sign or not name:
            raise ValueError("a call without a name")
        text = lax_json("{" + rest, unquoted=True, strings=((quote, quote),))
        return [call_of({"name": name, "arguments": text})]

    return read
