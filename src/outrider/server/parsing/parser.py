"""The streaming parser: text of a model in, parts of an answer out, whatever the pieces.

What is decided depends on characters alone, never on where a piece ends: the parser holds back what
may still become a delimiter and reads on from there. The text of a call is kept until it ends, and
shown as text if it is none.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.server.events import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolClose,
    ToolDelta,
    ToolOpen,
)
from outrider.server.parsing.calls import NOT_CALLS, Call, Schemas, before_begun
from outrider.server.parsing.delimiter import Delimiter, Match, Pending
from outrider.server.parsing.fields import Field, OutputFormat


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class FormatParser:
    """An OutputParser of one answer in `given`. `begun` is the field that the prompt has opened."""

    def __init__(
        self,
        given: OutputFormat,
        schemas: Schemas,
        *,
        begun: Field | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._format = given if schemas else given.without_calls()
        self._schemas = schemas
        self._new_id = new_id
        self._parts: list[Part] = []
        self._held = ""
        self._num_calls = 0
        self._around = _Flow(TextDelta, self._parts, at_start=False)
        self._region: _Region | None = None
        self._watched_now = self._watched()
        # Whether nothing came so far but blanks, thoughts and calls.
        self._is_start, self._read_from = True, 0
        if begun is not None:
            self._open(begun, "", {})

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        self._read(self._held + text, final=False)
        return self._taken()

    def finish(self) -> list[Part]:
        """What was held back. A field that did not close ends here."""
        self._read(self._held, final=True)
        if self._region is not None:
            self._close("")
        self._around.end(strip=False)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts = list(self._parts)
        self._parts.clear()
        return parts

    def _read(self, text: str, *, final: bool) -> None:
        at, known = 0, dict[Delimiter, int]()
        while True:
            crossing = self._next(text, at, known, final=final)
            start = crossing if isinstance(crossing, int) else crossing.start
            self._put(text[at:start])
            if isinstance(crossing, int):
                self._held = text[start:]
                return
            at = crossing.match.end
            self._cross(crossing.field, text[start:at], crossing.match.groups)

    def _next(
        self, text: str, at: int, known: dict[Delimiter, int], *, final: bool
    ) -> _Crossing | int:
        """The first delimiter from `at` on, or up to where the text has none for certain."""
        watched, self._read_from = self._watched_now, at
        for one in watched:
            if known.get(one, -1) < at or one.at_start:
                known[one] = self._first(one, text, at)
        while True:
            start = min((known[one] for one in watched), default=len(text))
            if start >= len(text):
                return len(text)
            here = [one for one in watched if known[one] == start]
            found = [(one, one.match(text, start, final=final)) for one in here]
            if any(isinstance(match, Pending) for _, match in found):
                return start
            crossings = [
                _Crossing(start, match, opened)
                for one, match in found
                if isinstance(match, Match)
                and (opened := self._opened(watched[one], match.groups)) is not _NOBODY
            ]
            if crossings:
                return max(crossings, key=lambda crossing: crossing.match.end)
            for one in here:
                known[one] = self._first(one, text, start + 1)

    def _watched(self) -> dict[Delimiter, Sequence[Field]]:
        """Delimiters of now, and the fields that each may open: none for one that closes or is left
        out."""
        region = self._region
        found: dict[Delimiter, Sequence[Field]] = {}
        if region is not None:
            found.update(dict.fromkeys(region.given.closes, ()))
            if not region.given.gives_way:
                return found
        for one in self._format.fields:
            for delimiter in one.opens:
                found[delimiter] = [*found.get(delimiter, ()), one]
        if region is None:
            found.update(dict.fromkeys(self._format.drops, ()))
        return found

    def _opened(self, fields: Sequence[Field], groups: Mapping[str, str]) -> Field | None:
        """Which of `fields` opens; None where one closes, _NOBODY where none does."""
        if not fields:
            return None
        fitting = (one for one in fields if one.when is None or one.when(groups))
        return next(fitting, _NOBODY)

    def _first(self, one: Delimiter, text: str, at: int) -> int:
        """Where it may stand, whole or begun."""
        if one.at_start:
            return self._first_of_all(one, text, at)
        found = text.find(one.first, at)
        if found >= 0:
            return found
        begun = text.find(one.first[0], max(at, len(text) + 1 - len(one.first)))
        while begun >= 0 and not one.first.startswith(text[begun:]):
            begun = text.find(one.first[0], begun + 1)
        return len(text) if begun < 0 else begun

    def _first_of_all(self, one: Delimiter, text: str, at: int) -> int:
        begin = at + len(text[at:]) - len(text[at:].lstrip())
        if not self._is_start or self._region is not None or text[self._read_from : begin].strip():
            return len(text)
        is_there = text.startswith(one.first, begin) or one.first.startswith(text[begin:])
        return begin if is_there else len(text)

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._region is not None:
            self._region.add(text)
            return
        self._is_start = self._is_start and text.isspace()
        self._around.add(text)

    def _cross(self, opened: Field | None, delimiter: str, groups: Mapping[str, str]) -> None:
        if opened is not None:
            if self._region is not None:
                self._close("")
            self._open(opened, delimiter, groups)
        elif self._region is not None:
            self._close(delimiter)
        else:
            self._is_start = False
            self._around.end(strip=True)

    def _open(self, opened: Field, delimiter: str, groups: Mapping[str, str]) -> None:
        blanks = self._around.cut()
        self._is_start = self._is_start and opened.kind in ("reasoning", "calls")
        flow = None
        if opened.kind in ("text", "reasoning"):
            make = TextDelta if opened.kind == "text" else ReasoningDelta
            flow = _Flow(make, self._parts, at_start=opened.strip)
        before = blanks if opened.keeps else blanks + delimiter
        self._region = _Region(opened, before, groups, flow)
        if opened.keeps:
            self._region.add(delimiter)
        self._watched_now = self._watched()

    def _close(self, delimiter: str) -> None:
        region, self._region = self._region, None
        if region is None:
            return
        self._watched_now = self._watched()
        if region.flow is not None:
            region.flow.end(strip=region.given.strip)
        elif not self._called(region, region.text):
            text = region.text
            # Where the answer was cut off amid a call, those before it are whole.
            size = 0 if delimiter else before_begun(text)
            self._is_start = False
            if not size or not self._called(region, text[:size]):
                self._around.add_raw(region.raw + delimiter)
            else:
                self._around.at_start = True
                self._around.add(text[size:])
            return
        self._around.at_start = True

    def _called(self, region: _Region, text: str) -> bool:
        """Whether `text` of `region` was calls, which are told of."""
        if region.given.read is None:
            return False
        try:
            calls = region.given.read(text, region.groups, self._schemas)
            parts = [part for i, call in enumerate(calls) for part in self._call(i, call)]
        except NOT_CALLS:
            return False
        self._num_calls += len(calls)
        self._parts += parts
        return bool(calls)

    def _call(self, number: int, call: Call) -> list[Part]:
        index = self._num_calls + number
        return [
            ToolOpen(index, self._new_id(), call.name),
            ToolDelta(index, call.json),
            ToolClose(index),
        ]


_NOBODY = Field("other", ())


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A delimiter at `start`, and the field that it opens, if it opens one."""

    start: int
    match: Match
    field: Field | None


@dataclass(slots=True)
class _Flow:
    """Text that is told of at once, but for blanks at its edges: those before a delimiter and
    behind one do not count."""

    make: Callable[[str], Part]
    parts: list[Part]
    at_start: bool
    blanks: list[str] = field(default_factory=list[str])

    def add(self, text: str) -> None:
        if self.at_start:
            text = text.lstrip()
            if not text:
                return
            self.at_start = False
        if text.isspace():
            self.blanks.append(text)
            return
        body = text.rstrip()
        self.parts.append(self.make(self.cut() + body))
        if len(body) < len(text):
            self.blanks.append(text[len(body) :])

    def add_raw(self, text: str) -> None:
        """All of it, as it is."""
        self.at_start = False
        self.add(text)

    def cut(self) -> str:
        """Forget the blanks at the end; what they were."""
        blanks = "".join(self.blanks)
        self.blanks.clear()
        return blanks

    def end(self, *, strip: bool) -> None:
        blanks = self.cut()
        if strip:
            self.at_start = True
        elif blanks:
            self.parts.append(self.make(blanks))


@dataclass(slots=True)
class _Region:
    """A field that is open: its text, unless that flows, and what stood before that."""

    given: Field
    opening: str
    groups: Mapping[str, str]
    flow: _Flow | None
    pieces: list[str] = field(default_factory=list[str])

    def add(self, text: str) -> None:
        if self.flow is None:
            self.pieces.append(text)
        else:
            self.flow.add(text)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def raw(self) -> str:
        """As the model wrote it, up to where it closed."""
        return self.opening + self.text
