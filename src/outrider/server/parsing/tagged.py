"""Calls in tags, and in Python's syntax: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2, LFM2.

Values are written without escapes, so a closing tag is part of the value unless another tag follows
it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.server.parsing.calls import Call, Schemas, call_of, json_calls, offered
from outrider.server.parsing.json_text import mapping, python_value, schema_types, typed


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of calls and their arguments. Opening tags are regular expressions with one group,
    the name; closing tags are texts. `edge` is text that the format has around a value. The group
    `text` of a key says whether its value is a string."""

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
            if not body.startswith(self.function_end, at):
                raise ValueError("a function without an end")
            at = _behind_blanks(body, at + len(self.function_end))
            found.append(Call(name, _unwrapped(values, types)))
        return found

    def offered_calls(self, body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
        """Read calls, only of offered tools (a ReadCalls)."""
        return offered(self.calls(body, groups, schemas), schemas)

    def goes_on(self, body: str) -> bool:
        """Return whether `body` ends inside a value, which then contains the next delimiter."""
        end, last = re.escape(self.key_end), re.escape(self.function_end)
        whole = rf"(?:{end}|{self.function})\s*(?:{last})?\s*\Z"
        return re.search(self.key, body) is not None and re.search(whole, body) is None

    def mend(self, body: str) -> str:
        """Return the text with its last closing tag, which models sometimes omit."""
        return body.rstrip().removesuffix(self.function_end) + self.function_end

    def _value(self, body: str, at: int, types: Mapping[str, Any]) -> tuple[str, int]:
        """Return a value and the index of the next tag. A value ends at its closing tag if another
        tag follows, or at the tag of one of the tool's arguments at the start of a line."""
        end, last = re.escape(self.key_end), re.escape(self.function_end)
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


def glm_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> list[Call]:
    """Read a name, then pairs of `<arg_key>` and `<arg_value>`: GLM 4.5 and later."""
    del groups
    at = body.find("<arg_key>") if "<arg_key>" in body else len(body)
    name = body[:at].strip()
    if not name or "<" in name or "\n" in name:
        raise ValueError("a call without a name")
    types = schemas.get(name, {})
    found: dict[str, Any] = {}
    while at < len(body):
        key = _GLM_KEY.match(body, at)
        end = _GLM_END.search(body, key.end()) if key is not None else None
        if key is None or end is None:
            raise ValueError("an argument without a value")
        value = body[key.end() : end.start()]
        found[key[1].strip()] = typed(value, types.get(key[1].strip()))
        at = end.end()
    return [Call(name, _unwrapped(found, types))]


_GLM_KEY = re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>")
_GLM_END = re.compile(r"</arg_value>\s*(?=\Z|<arg_key>)")


def glm_goes_on(body: str) -> bool:
    """Return whether a call of GLM ends inside a value."""
    return "<arg_value>" in body and not body.rstrip().endswith("</arg_value>")


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
