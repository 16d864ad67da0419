"""Tool calls: the formats in which models write them, parsed to names and arguments.

A reader gets the text between two delimiters and the groups of the first one. For text that is not
a call it raises ValueError, or another error of NOT_CALLS (json_text.py) that malformed data leads
to; the parser then shows the text as it is.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from outrider.plugins.tools.json_text import (
    is_object,
    json_values,
    lax_json,
    listed,
    mapping,
    parse_json,
    python_value,
    schema_types,
    typed,
)

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


# Calls in tags, and in Python's syntax: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2, LFM2.
#
# Values are written without escapes, so a closing tag is part of the value unless another tag
# follows it.
@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of calls and their arguments. Opening tags are regular expressions with one group,
    the name; closing tags are texts. Without `function_end`, a text is one call. `edge` is text
    that the format has around a value. The group `text` of a key says whether its value is a
    string."""

    function: str
    function_end: str
    key: str
    key_end: str
    edge: str = ""

    def calls(self, body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
        """Read one call or several (a ReadCalls)."""
        del groups
        found: list[Call] = []
        at = _behind_blanks(body, 0)
        while at < len(body):
            begun = re.compile(self.function).match(body, at)
            if begun is None:
                raise ValueError("a function without a name")
            name, at = begun[1].strip(), _behind_blanks(body, begun.end())
            types, values = schemas.get(name, {}), dict[str, Any]()
            while (key := re.compile(self.key).match(body, at)) is not None:
                text, at = self._value(body, key.end(), types)
                schema = types.get(key[1].strip())
                match key.groupdict().get("text"):
                    case "true" if "string" in (names := set(schema_types(schema))) or not names:
                        schema = None
                    case "false" if schema is None:
                        schema = _ANY_BUT_TEXT
                    case _:
                        pass
                values[key[1].strip()] = typed(text, schema)
            end = self.function_end
            if not (body.startswith(end, at) if end else at == len(body)):
                raise ValueError("a function without an end")
            at = _behind_blanks(body, at + len(end))
            found.append(Call(name, _unwrapped(values, types)))
        return found

    def goes_on(self, body: str) -> bool:
        """Return whether `body` ends inside a value, which then contains the next delimiter."""
        ends, last = [re.escape(self.key_end)], re.escape(self.function_end)
        if last:
            # A function may have no arguments.
            ends.append(self.function)
        whole = rf"(?:{'|'.join(ends)})\s*(?:{last})?\s*\Z"
        return re.search(self.key, body) is not None and re.search(whole, body) is None

    def mend(self, body: str) -> str:
        """Return the text with its last closing tag, which models sometimes omit."""
        return body.rstrip().removesuffix(self.function_end) + self.function_end

    def _value(self, body: str, at: int, types: Mapping[str, Any]) -> tuple[str, int]:
        """Return a value and the index of the next tag. A value ends at its closing tag if another
        tag follows, or at the tag of one of the tool's arguments at the start of a line."""
        end, last = re.escape(self.key_end), re.escape(self.function_end) or "(?!)"
        closed = re.compile(rf"{end}\s*(?=\Z|{self.key}|{last})").search(body, at)
        if closed is None:
            raise ValueError("a value without an end")
        first, begin, behind = body.find(self.key_end, at), closed.start(), closed.end()
        for key in re.compile(rf"\n\s*({self.key})").finditer(body, at, first):
            if key[2].strip() in types:
                begin, behind = key.start() + 1, key.start(1)
                break
        text = body[at:begin]
        if self.edge:
            text = text.removeprefix(self.edge).removesuffix(self.edge)
        return text, behind


_ANY_BUT_TEXT = {"type": ["null", "boolean", "number", "array", "object"]}
QWEN_TAGS = Tags(
    r"<function=([^<>\n]{1,256})>",
    "</function>",
    r"<parameter=([^<>\n]{1,256})>",
    "</parameter>",
    "\n",
)
INVOKE_TAGS = Tags(
    r'<invoke name="([^"\n]{1,256})">',
    "</invoke>",
    r'<parameter name="([^"\n]{1,256})">',
    "</parameter>",
)
DSML_TAGS = Tags(
    r'<\uff5cDSML\uff5cinvoke name="([^"\n]{1,256})">',
    "</\uff5cDSML\uff5cinvoke>",
    r'<\uff5cDSML\uff5cparameter name="([^"\n]{1,256})" string="(?P<text>true|false)">',
    "</\uff5cDSML\uff5cparameter>",
)
# GLM 4.5 and later: a name, then pairs of key and value.
GLM_TAGS = Tags(
    r"([^<\n]{1,256}?)\s*(?=\Z|<arg_key>)",
    "",
    r"<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>",
    "</arg_value>",
)


def _unwrapped(values: dict[str, Any], types: Mapping[str, Any]) -> Mapping[str, Any]:
    """Unwrap arguments that a model wrote as one object, under a name that is no parameter."""
    name = next(iter(values), "")
    if len(values) != 1 or name not in ("arguments", "input", "parameters") or name in types:
        return values
    given = values[name]
    inner = mapping(typed(given, {"type": "object"}) if isinstance(given, str) else given)
    return inner if inner and inner.keys() <= types.keys() else values


def _behind_blanks(text: str, at: int) -> int:
    return at + len(text[at:]) - len(text[at:].lstrip())


def python_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """Read calls in Python's syntax, in a list or alone, or those of `json_calls`: LFM2."""
    if body.lstrip().startswith(("[{", "{")):
        return json_calls(body, groups, schemas)
    value = _parsed(body.strip()) or _parsed(_requoted(body.strip()))
    if value is None:
        raise ValueError("no calls of Python's")
    nodes = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    return [_python_call(node, schemas) for node in nodes]


def _parsed(source: str) -> ast.expr | None:
    try:
        return ast.parse(_STRING.sub(_plain, source), mode="eval").body
    except (SyntaxError, MemoryError, ValueError):
        return None


def _plain(found: re.Match[str]) -> str:
    """Return a string with valid escapes, or a number without leading zeros."""
    quote, text = found["quote"], found[0]
    if quote is None:
        return ""
    text = _BAD_ESCAPE.sub(r"\\\\", text)
    return _CONTROL.sub(lambda char: f"\\x{ord(char[0]):02x}", text)


_STRING = re.compile(
    r"""(?P<quote>['"])(?:(?!(?P=quote))[^\\]|\\.)*(?P=quote)|(?<![\w.])0+(?=\d+(?![\w.]))""",
    re.DOTALL,
)
_CONTROL = re.compile(r"[\x00-\x1f]")
_BAD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\(?![\\'\"abfnrtvxuN0-7])")


def _requoted(source: str) -> str:
    """Escape quotes inside the strings of calls. A string ends at a quote before another argument,
    before another call, or at the end of the calls."""
    pieces, at = list[str](), 0
    while (begun := _BEGIN.search(source, at)) is not None:
        end = re.compile(begun[1] + _FOLLOWS).search(source, begun.end())
        if end is None:
            break
        inner = re.sub(rf"(?<!\\){begun[1]}", rf"\\{begun[1]}", source[begun.end() : end.start()])
        pieces += [source[at : begun.end()], inner, begun[1]]
        at = end.end()
    return "".join([*pieces, source[at:]])


_BEGIN = re.compile(r"=\s*(['\"])")
_FOLLOWS = r"(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,\s*[\w.]+\(|\]?\s*\Z)))"


def _python_call(node: ast.expr, schemas: Schemas) -> Call:
    if not isinstance(node, ast.Call):
        raise ValueError("an expression that is no call")
    name = ast.unparse(node.func)
    values = dict(zip(schemas.get(name, {}), map(python_value, node.args), strict=False))
    if len(values) < len(node.args):
        raise ValueError("arguments without names")
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without names")
        values[keyword.arg] = python_value(keyword.value)
    return call_of({"name": name, "arguments": values})
