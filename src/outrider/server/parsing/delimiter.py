"""Delimiters at which a part of a model's output begins or ends: literals or simple patterns.

Patterns come from checkpoints, so they are not run by a backtracking engine. A pattern is compiled
to literals and runs of characters, and is matched from left to right without going back: a decision
about a text stays valid when more text comes. Runs are possessive; a lazy run ends at the first
occurrence of the literal after it. Alternatives, references and look-around are refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeGuard

from outrider.server.parsing.calls import Call, Schemas, call_of, json_calls, offered
from outrider.server.parsing.json_text import mapping, python_value, schema_types, typed

# A longer text is not a delimiter, so the parser never holds back more than this.
MAX_CHARS = 256
_CLASSES: Mapping[str, Callable[[str], bool]] = {
    "w": lambda char: char.isalnum() or char == "_",
    "d": str.isdigit,
    "s": str.isspace,
    "W": lambda char: not (char.isalnum() or char == "_"),
    "D": lambda char: not char.isdigit(),
    "S": lambda char: not char.isspace(),
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass(frozen=True, slots=True)
class Literal:
    text: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A run of `least` or more characters that `takes` accepts; with `single`, at most one."""

    takes: Callable[[str], bool]
    least: int
    single: bool = False
    lazy: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A boundary of the group `name`: the first mark is its begin, the second its end."""

    name: str


Piece: TypeAlias = Literal | Run | Mark


@dataclass(frozen=True, slots=True)
class Match:
    """A match that ends at `end`, with the text of each named group."""

    end: int
    groups: Mapping[str, str] = field(default_factory=dict[str, str])


class Pending:
    """The result of a match that more text must decide."""


PENDING: Final = Pending()


@dataclass(frozen=True, slots=True, eq=False)
class Delimiter:
    """A delimiter, which begins with the literal `first`. With `at_start` it is recognised only at
    the start of an answer, with `behind_call` only after a call; blanks may come before it. With
    `ahead`, one of these texts must follow after blanks; it is not part of the delimiter."""

    pieces: tuple[Piece, ...]
    at_start: bool = False
    behind_call: bool = False
    ahead: tuple[str, ...] = ()
    first: str = field(init=False)

    def __post_init__(self) -> None:
        piece = self.pieces[0]
        object.__setattr__(self, "first", piece.text if isinstance(piece, Literal) else "")

    def match(
        self, text: str, at: int, *, final: bool, most: int = MAX_CHARS
    ) -> Match | Pending | None:
        """Match at index `at`. `final` means that no more text comes."""
        reader = _Reader(text, at, min(at + most, len(text)), len(text) < at + most and not final)
        begun: dict[str, int] = {}
        groups: dict[str, str] = {}
        for i, piece in enumerate(self.pieces):
            if isinstance(piece, Mark):
                if piece.name in begun:
                    groups[piece.name] = text[begun[piece.name] : reader.at]
                begun[piece.name] = reader.at
                continue
            if isinstance(piece, Literal):
                ok = reader.literal(piece)
            else:
                ok = reader.run(piece, self.pieces[i + 1 :])
            if ok is None:
                return PENDING
            if not ok:
                return None
        follows = reader.follows(self.ahead)
        return PENDING if follows is None else Match(reader.at, groups) if follows else None


@dataclass(slots=True)
class _Reader:
    """Reads pieces of `text` from `at` to `end`; with `is_open`, more text may come after `end`.
    Each method returns whether its piece was found, or None if more text must decide."""

    text: str
    at: int
    end: int
    is_open: bool

    def literal(self, piece: Literal) -> bool | None:
        wanted = piece.text
        if self.text.startswith(wanted, self.at, self.end):
            self.at += len(wanted)
            return True
        if self.is_open and wanted.startswith(self.text[self.at : self.end]):
            return None
        return piece.optional

    def run(self, piece: Run, behind: tuple[Piece, ...]) -> bool | None:
        if piece.lazy:
            return self._lazy(piece, [one for one in behind if isinstance(one, Literal)])
        start = self.at
        while self.at < self.end and piece.takes(self.text[self.at]):
            self.at += 1
            if piece.single:
                return True
        if self.at == self.end and self.is_open:
            return None
        return self.at - start >= piece.least

    def follows(self, wanted: tuple[str, ...]) -> bool | None:
        """Return whether one of `wanted` comes next, after blanks; true if none is wanted."""
        rest = self.text[self.at : self.end].lstrip()
        if not wanted or rest.startswith(wanted):
            return True
        return None if self.is_open and any(one.startswith(rest) for one in wanted) else False

    def _lazy(self, piece: Run, behind: list[Literal]) -> bool | None:
        """Read up to the literal after the run, without an optional literal before that one."""
        stop = next(one for one in behind if not one.optional)
        start = self.at
        found = self.text.find(stop.text, start + piece.least, self.end)
        last = self.end if found < 0 else found
        if not all(map(piece.takes, self.text[start:last])):
            return False
        if found < 0:
            return None if self.is_open else False
        before = behind[0] if behind[0].optional else None
        if before is not None and self.text.endswith(before.text, start + piece.least, found):
            last -= len(before.text)
        self.at = last
        return True


def literal(
    text: str, *, at_start: bool = False, behind_call: bool = False, ahead: tuple[str, ...] = ()
) -> Delimiter:
    """Return the delimiter of a literal text. Raises ValueError for an empty one."""
    if not text:
        raise ValueError("a delimiter is empty")
    return Delimiter((Literal(text),), at_start, behind_call, ahead)


def pattern(source: str) -> Delimiter:
    """Compile a pattern. Raises ValueError if it cannot be matched from left to right. Blanks at
    its beginning are left out, as blanks around delimiters are ignored anyway."""
    pieces = _joined(_Source(source).pieces())
    while pieces and _takes_blanks(pieces[0]):
        del pieces[0]
    if not pieces or not isinstance(pieces[0], Literal) or pieces[0].optional:
        raise ValueError(f"the pattern {source!r} does not begin with a literal")
    for i, piece in enumerate(pieces):
        if not isinstance(piece, Run):
            continue
        behind = [one for one in pieces[i + 1 :] if not isinstance(one, Mark)]
        after = behind[0] if behind else None
        if piece.lazy:
            solid = behind[1:2] if isinstance(after, Literal) and after.optional else behind[:1]
            if not solid or not isinstance(solid[0], Literal) or solid[0].optional:
                raise ValueError(f"the pattern {source!r} has a lazy run without an end")
        elif not piece.single and isinstance(after, Literal) and piece.takes(after.text[0]):
            raise ValueError(f"the pattern {source!r} would have to go back")
    return Delimiter(tuple(pieces))


def _takes_blanks(piece: Piece) -> bool:
    """Return whether the piece matches any number of blanks, and only blanks."""
    if not isinstance(piece, Run) or piece.least:
        return False
    return piece.takes(" ") and not piece.takes("x") and not piece.takes("<")


def _joined(pieces: Iterator[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if _is_solid(piece) and _is_solid(last):
            found[-1] = Literal(last.text + piece.text)
        else:
            found.append(piece)
    return found


def _is_solid(piece: Piece | None) -> TypeGuard[Literal]:
    return isinstance(piece, Literal) and not piece.optional


@dataclass(slots=True)
class _Source:
    """A parser of a pattern's source."""

    text: str
    at: int = 0
    groups: list[str] = field(default_factory=list[str])

    def pieces(self) -> Iterator[Piece]:
        while self.at < len(self.text):
            char = self._next()
            if char == "(":
                yield from self._group()
            elif char == ")":
                if not self.groups:
                    raise ValueError(f"the pattern {self.text!r} closes no group")
                yield Mark(self.groups.pop())
            elif char in "|^$*+?{}":
                raise ValueError(f"the pattern {self.text!r} has {char!r}, which is not read")
            else:
                yield self._counted(self._set(char))

    def _group(self) -> Iterator[Piece]:
        if self._take("?:"):
            inside, end, rest = self.text[self.at :].partition(")")
            if not end or not rest.startswith("?") or any(char in "\\[(.*+|" for char in inside):
                raise ValueError(f"the pattern {self.text!r} has a group that is not read")
            self.at += len(inside) + 2
            yield Literal(inside, optional=True)
            return
        if not self._take("?P<"):
            raise ValueError(f"the pattern {self.text!r} has a group without a name")
        name, end, _ = self.text[self.at :].partition(">")
        if not end or self.groups:
            raise ValueError(f"the pattern {self.text!r} has a group that is not read")
        self.at += len(name) + 1
        self.groups.append(name)
        yield Mark(name)

    def _set(self, char: str) -> str | Callable[[str], bool]:
        """Return the character, or the set of characters, that begins with `char`."""
        if char == ".":
            return lambda _: True
        if char == "[":
            return self._bracket()
        return self._escape() if char == "\\" else char

    def _escape(self) -> str | Callable[[str], bool]:
        char = self._next()
        if char in _CLASSES:
            return _CLASSES[char]
        if char.isalnum() and char not in _CONTROLS:
            raise ValueError(f"the pattern {self.text!r} has \\{char}, which is not read")
        return _CONTROLS.get(char, char)

    def _bracket(self) -> Callable[[str], bool]:
        negated = self._take("^")
        single: set[str] = set()
        tests: list[Callable[[str], bool]] = []
        while (char := self._next()) != "]" or not (single or tests):
            one = self._escape() if char == "\\" else char
            if callable(one):
                tests.append(one)
            elif self.text[self.at : self.at + 1] == "-" and self.text[self.at + 1] != "]":
                self._next()
                low, high = one, self._next()
                tests.append(lambda char, low=low, high=high: low <= char <= high)
            else:
                single.add(one)
        return lambda char: negated != (char in single or any(test(char) for test in tests))

    def _counted(self, one: str | Callable[[str], bool]) -> Piece:
        counts = {"*": (0, False), "+": (1, False), "?": (0, True)}
        sign = self.text[self.at : self.at + 1]
        if sign not in counts or not sign:
            return Literal(one) if isinstance(one, str) else Run(one, 1, single=True)
        self._next()
        least, single = counts[sign]
        if isinstance(one, str):
            if single:
                return Literal(one, optional=True)
            char = one
            return Run(lambda other: other == char, least)
        return Run(one, least, single=single, lazy=self._take("?"))

    def _take(self, text: str) -> bool:
        found = self.text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self.at == len(self.text):
            raise ValueError(f"the pattern {self.text!r} ends early")
        self.at += 1
        return self.text[self.at - 1]


# Calls in tags, and in Python's syntax: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2, LFM2.
#
# Values are written without escapes, so a closing tag is part of the value unless another tag
# follows it.
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
