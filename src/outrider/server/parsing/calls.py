"""Calls of tools in the spellings that models write them in, as names and arguments.

A reader gets the text between two delimiters and the groups of the first one. It raises ValueError,
or what a wrong shape leads to, for text that is no call: the parser then shows it as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn, TypeAlias, cast

# The schemas of the arguments of each tool that was offered.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
# What a reader of calls may raise for text that is none.
NOT_CALLS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_BLANKS = " \t\r\n;,"
# DeepSeek's brackets are of full width, with blanks of a tokenizer.
DEEPSEEK_TOKEN = "<\uff5ctool\u2581{}\uff5c>"


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    """Raises ValueError for a number that no float holds: JSON could not tell it again."""
    value = float(text)
    return value if isfinite(value) else _refuse(text[:20])


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


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


def mapping(value: object) -> Mapping[str, Any]:
    """An object of JSON; an empty one for anything else."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    return {}


def listed(value: object) -> list[Any]:
    """A list of JSON; one of `value` alone if that is none, and of nothing for None."""
    if isinstance(value, list):
        return cast("list[Any]", value)
    return [] if value is None else [value]


def parse_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, NaN and infinities among it."""
    value, end = _DECODER.raw_decode(text.strip())
    if text.strip()[end:].strip():
        raise ValueError("there is text behind the JSON")
    return value


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
    for value in _values(body):
        found += [call_of(one) for one in listed(value)]
    return found


def offered_json_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """The same where an answer is a call by nothing but its form, of tools that were offered:
    Llama."""
    found = json_calls(body, groups, schemas)
    if any(call.name not in schemas for call in found):
        raise ValueError("an object that is no call of a tool")
    return found


def named_json_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """A name, perhaps a word that announces arguments, and an object: Mistral's newer form; or
    what `json_calls` reads."""
    start = body.find("{")
    name = body[:start].partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
    if not name or name.startswith("["):
        return json_calls(body, groups, schemas)
    return [call_of({"name": name, "arguments": parse_json(body[start:])})]


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
    return name[0].removeprefix("functions.") if name else ""


def qwen_xml_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """`<function=name>` with `<parameter=key>` and values as they are: Qwen3-Coder."""
    del groups
    begun = body.partition("<function=")[2]
    name, end, inner = begun.partition(">")
    name = name.strip()
    if not end or not name:
        raise ValueError("a function without a name")
    types = schemas.get(name, {})
    found: dict[str, Any] = {}
    for piece in inner.split("<parameter=")[1:]:
        key, sign, value = piece.partition(">")
        if not sign:
            raise ValueError("a parameter without a name")
        value = value.partition("</parameter>")[0].partition("</function>")[0]
        found[key.strip()] = typed(_one_line_less(value), types.get(key.strip()))
    return [Call(name, found)]


def glm_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """A name, then pairs of `<arg_key>` and `<arg_value>`: GLM 4.5 and later."""
    del groups
    before, *pairs = body.split("<arg_key>")
    name = before.strip()
    if not name or "<" in name or "\n" in name:
        raise ValueError("a call without a name")
    types = schemas.get(name, {})
    found: dict[str, Any] = {}
    for pair in pairs:
        key, sign, rest = pair.partition("</arg_key>")
        _, begun, value = rest.partition("<arg_value>")
        if not sign or not begun:
            raise ValueError("an argument without a value")
        found[key.strip()] = typed(value.partition("</arg_value>")[0], types.get(key.strip()))
    return [Call(name, found)]


def gemma_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """`call:name{key:<escape>text<escape>,key:3}`: FunctionGemma."""
    del groups, schemas
    before, sign, rest = body.strip().partition("{")
    name = before.removeprefix("call:").strip()
    if not sign or not name:
        raise ValueError("a call without a name")
    text = lax_json("{" + rest, unquoted=True, strings=(("<escape>", "<escape>"),))
    return [call_of({"name": name, "arguments": text})]


def lax_json(text: str, *, unquoted: bool, strings: tuple[tuple[str, str], ...]) -> Any:
    """JSON whose keys may have no quotes, and whose strings may stand between other signs."""
    kept: list[str] = []
    for begin, end in strings:
        pieces = text.split(begin) if begin == end else None
        if pieces is None:
            text = _stored(text, begin, end, kept)
            continue
        if len(pieces) % 2 == 0:
            raise ValueError("a string without an end")
        for i in range(1, len(pieces), 2):
            kept.append(pieces[i])
            pieces[i] = f"\x01{len(kept) - 1}\x02"
        text = "".join(pieces)
    if unquoted:
        text = _KEY.sub(r'\1"\2":', text)
    return parse_json(_STORED.sub(lambda found: json.dumps(kept[int(found[1])]), text))


_KEY = re.compile(r"([{,]\s{0,9})(\w{1,99}):")
_STORED = re.compile("\x01([0-9]{1,9})\x02")


def typed(text: str, schema: object) -> Any:
    """The value that `text` stands for where its schema wants something else than text."""
    types = set(_types(schema))
    for name in types - {"string"}:
        value = _read_as(text.strip(), name)
        if value is not _NONE:
            return value
    return text


_NONE = object()
_WANTED: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def _read_as(text: str, name: str) -> object:
    words = {"True": "true", "False": "false", "None": "null"}
    try:
        value = parse_json(words.get(text, text))
    except NOT_CALLS:
        return _NONE
    if name == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    is_flag = isinstance(value, bool) and name != "boolean"
    return value if isinstance(value, _WANTED.get(name, ())) and not is_flag else _NONE


def _types(schema: object) -> Iterator[str]:
    """The types that a schema names, those of its alternatives too."""
    entry = mapping(schema)
    yield from (one for one in listed(entry.get("type")) if isinstance(one, str))
    for name in ("anyOf", "oneOf"):
        for choice in listed(entry.get(name)):
            yield from _types({"type": mapping(choice).get("type")})
    if entry.get("nullable"):
        yield "null"


def before_begun(body: str) -> int:
    """Where an object begins that has no end, behind whole ones; 0 if there is none."""
    at = 0
    with suppress(*NOT_CALLS):
        while body.startswith("{", at):
            _, at = _DECODER.raw_decode(body, at)
            at = len(body) - len(body[at:].lstrip(_BLANKS))
    return at if body.startswith("{", at) else 0


def _values(body: str) -> Iterator[Any]:
    """JSON values, one after the other."""
    at, text = 0, body.strip(_BLANKS)
    if not text:
        raise ValueError("there is nothing")
    while at < len(text):
        value, at = _DECODER.raw_decode(text, at)
        yield value
        while at < len(text) and text[at] in _BLANKS:
            at += 1


def _stored(text: str, begin: str, end: str, kept: list[str]) -> str:
    first, *rest = text.split(begin)
    pieces = [first]
    for piece in rest:
        inside, sign, behind = piece.partition(end)
        if not sign:
            raise ValueError("a string without an end")
        kept.append(inside)
        pieces.append(f"\x01{len(kept) - 1}\x02{behind}")
    return "".join(pieces)


def _one_line_less(value: str) -> str:
    """Without the line ends that the format has around a value."""
    return value.removeprefix("\n").removesuffix("\n")
