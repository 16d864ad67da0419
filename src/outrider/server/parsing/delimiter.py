"""Delimiters at which a part of a model's output begins or ends: literals or simple patterns.

Patterns come from checkpoints, so they are not run by a backtracking engine. A pattern is compiled
to literals and runs of characters, and is matched from left to right without going back: a decision
about a text stays valid when more text comes. Runs are possessive; a lazy run ends at the first
occurrence of the literal after it. Alternatives, references and look-around are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeGuard

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
