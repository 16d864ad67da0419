"""Values of C++ sources of tests: literals, calls and lists, as far as llama.cpp's chat cases go.

An expression is read from tokens, never run. One with something else in it raises UnreadableError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<raw>R"(?P<mark>[^(\s]*)\((?P<body>.*?)\)(?P=mark)")
    |(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<number>\d+)
    |(?P<name>[A-Za-z_]\w*(?:::\w+)*)
    |(?P<sign>->|\#|'(?:[^'\\]|\\.)*'|.)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_CODES = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)


class UnreadableError(ValueError):
    """A source that is more than values."""


@dataclass(frozen=True)
class Token:
    kind: str
    text: str


@dataclass(frozen=True)
class Call:
    name: str
    arguments: list[Any]


def tokens(source: str) -> list[Token]:
    found: list[Token] = []
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or ""
        if match["blank"] is not None:
            continue
        if match["raw"] is not None:
            found.append(Token("text", match["body"]))
        elif match["text"] is not None:
            found.append(Token("text", _unescaped(match["text"][1:-1])))
        else:
            found.append(Token("sign" if kind == "mark" else kind, match[0]))
    return found


def _unescaped(text: str) -> str:
    """Escapes by number are bytes of UTF-8."""

    def one(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] == "x":
            return bytes([int(code[1:], 16)]).decode("latin-1")
        return chr(int(code[1:], 16)) if code[0] == "u" else _ESCAPES.get(code, code)

    plain = _CODES.sub(one, text)
    return plain.encode("latin-1").decode() if r"\x" in text else plain


@dataclass
class Reader:
    """Reads `tokens` from `at` on; `names` have values."""

    tokens: list[Token]
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    at: int = 0

    def peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.tokens[at].text if at < len(self.tokens) else ""

    def take(self, *texts: str) -> bool:
        """Go over these tokens if they come next."""
        found = all(self._is(text, i) for i, text in enumerate(texts))
        self.at += len(texts) if found else 0
        return found

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise UnreadableError(f"{self.peek()!r} for {text!r}")

    def skip(self) -> None:
        """Go behind the next statement or block."""
        depth = 0
        while self.at < len(self.tokens):
            sign = self.peek() if self.tokens[self.at].kind == "sign" else ""
            self.at += 1
            depth += (sign in ("(", "[", "{")) - (sign in (")", "]", "}"))
            if depth < 0 or (depth == 0 and sign in (";", "}")):
                return

    def value(self) -> Any:
        found = self._one()
        while self.take("+"):
            found = found + self._one()
        return found

    def values(self, end: str) -> list[Any]:
        """Up to `end`, which is left behind."""
        found: list[Any] = []
        while not self.take(end):
            # A member's name, as in {.name = ...}.
            if self.take("."):
                self.at += 1
                self.expect("=")
            found.append(self.value())
            self.take(",")
        return found

    def _one(self) -> Any:
        token = self.tokens[self.at]
        self.at += 1
        if token.kind == "text":
            text = token.text
            while self.at < len(self.tokens) and self.tokens[self.at].kind == "text":
                text += self.tokens[self.at].text
                self.at += 1
            return text
        if token.kind == "number":
            return int(token.text)
        if token.text == "{":
            return self.values("}")
        if token.kind == "name":
            return self._named(token.text)
        raise UnreadableError(f"the sign {token.text!r}")

    def _named(self, name: str) -> Any:
        if self.take("("):
            arguments = self.values(")")
            return arguments[0] if name == "std::string" else Call(name, arguments)
        if self.take("<"):
            while not self.take(">"):
                self.at += 1
            self.expect("{")
            return self.values("}")
        known: Mapping[str, Any] = {"true": True, "false": False, **self.names}
        return known[name] if name in known else Call(name, [])

    def _is(self, text: str, ahead: int) -> bool:
        at = self.at + ahead
        return (
            at < len(self.tokens)
            and self.tokens[at] == Token(self.tokens[at].kind, text)
            and (self.tokens[at].kind != "text")
        )
