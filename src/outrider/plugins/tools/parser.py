"""The streaming parser: it takes a model's text in pieces and returns the parts of an answer, from
which each API's encoder makes its stream and its final object.

Its decisions depend only on the characters, never on where a piece ends: text that may become a
delimiter is held back until more text comes. The text of a call is held until the call ends, and
shown as text if it is not a call. Once a name and the begin of JSON arguments have been read
(Sending), the call is reported while it is written.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from outrider.plugins.tools.calls import BEHIND_CALL, ReadHead, Schemas
from outrider.plugins.tools.fields import Delimiter, Field, Match, OutputFormat, Pending
from outrider.plugins.tools.json_text import NOT_CALLS, JsonSpan, before_begun, is_object
from outrider.server.parts import Part, ReasoningDelta, TextDelta, ToolClose, ToolDelta, ToolOpen

# Maximum number of delimiters inside the values of one call, which bounds the time of parsing.
_MAX_PASSED = 64


@dataclass(slots=True)
class Flow:
    """Text that is reported at once, without the blanks around delimiters."""

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
        """Add text with its blanks."""
        self.at_start = False
        self.add(text)

    def cut(self) -> str:
        """Remove and return the blanks at the end."""
        blanks = "".join(self.blanks)
        self.blanks.clear()
        return blanks

    def end(self, *, strip: bool) -> None:
        blanks = self.cut()
        if strip:
            self.at_start = True
        elif blanks:
            self.parts.append(self.make(blanks))


# A call whose begin is longer than this is read only after its end.
_MAX_HEAD = 1024


@dataclass(slots=True)
class Sending:
    """Calls of a region whose arguments are reported while they are written. `open` reports the
    name of a call and returns its index; only calls of `names` are reported. `at` is the end of the
    last call in the region's text, `broken` the begin of arguments that are not a JSON object.
    `begun` is true after the first call."""

    read: ReadHead
    groups: Mapping[str, str]
    names: Container[str]
    open: Callable[[str], int]
    parts: list[Part]
    at: int = 0
    begun: bool = False
    broken: int | None = None
    _seen: int = 0
    _start: int = 0
    _index: int = 0
    _head: str = ""
    _is_over: bool = False
    _span: JsonSpan | None = None
    _pieces: list[str] = field(default_factory=list[str])

    def add(self, text: str) -> None:
        self._seen += len(text)
        while text:
            if self._span is None:
                text = self._begin(text)
                continue
            piece, end = self._span.escape(text, 0)
            self._send(piece)
            if end is None:
                return
            text = text[end:]
            self._close(self._seen - len(text))

    def finish(self, *, mends: bool) -> None:
        """End the region. With `mends`, a delimiter ended it, so missing brackets are added."""
        if self._span is None:
            return
        missing = "".join(reversed(self._span.open))
        if mends and not self._span.quoted and is_object("".join(self._pieces) + missing):
            self._send(missing)
        self._close(self._seen)

    def _begin(self, text: str) -> str:
        """Return the arguments of the next call, as far as they have come."""
        if self._is_over:
            return ""
        self._head += text
        found = self.read(self._head[:_MAX_HEAD], self.groups)
        if found is None or found[0] not in self.names:
            self._is_over = found is not None or len(self._head) >= _MAX_HEAD
            return ""
        name, at = found
        begun, self._head = self._head[at:], ""
        self._span, self._start = JsonSpan(), self._seen - len(begun)
        self._index, self.begun = self.open(name), True
        return begun

    def _send(self, piece: str) -> None:
        self._pieces.append(piece)
        self.parts.append(ToolDelta(self._index, piece))

    def _close(self, at: int) -> None:
        is_whole = is_object("".join(self._pieces))
        self.broken = self.broken if is_whole else self._start
        self.parts.append(ToolClose(self._index, is_whole))
        self._pieces.clear()
        self._span, self.at = None, at


@dataclass(slots=True)
class Region:
    """An open field: its text, unless that is reported at once by `flow`, and its `opening`.
    `outer` is the region of the thoughts inside which it opened. `span` finds the end of a balanced
    field; `sending` reports its calls early. `passed` has the begins and ends of delimiters that
    are part of its text. `calls` were found inside these thoughts and end them. If more than blanks
    follows (`behind`), the thoughts go on, and the calls are part of their text."""

    given: Field
    opening: str
    groups: Mapping[str, str]
    flow: Flow | None
    outer: Region | None = None
    span: JsonSpan | None = None
    sending: Sending | None = None
    pieces: list[str] = field(default_factory=list[str])
    passed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    behind: list[str] = field(default_factory=list[str])

    def add(self, text: str) -> None:
        if self.calls:
            self.behind.append(text)
            if text.isspace() or self.flow is None:
                return
            text = "".join(self.behind)
            self.calls.clear()
            self.behind.clear()
            self.flow.add_raw(text)
            return
        if self.span is not None:
            self.span.add(text)
        if self.flow is None:
            self.pieces.append(text)
            if self.sending is not None:
                self.sending.add(text)
        else:
            self.flow.add(text)

    @property
    def is_empty(self) -> bool:
        return self.flow is not None and self.flow.at_start

    def goes_on(self, text: str, at: int, start: int, end: int) -> bool:
        """Return whether the delimiter `text[start:end]` is part of the field, as `text[at:]`
        is."""
        body = self.text + text[at:start]
        if self.passed and len(body) < self.passed[-1][1]:
            return True
        ends = self.given.goes_on is None or not self.given.goes_on(body)
        if ends or len(self.passed) == _MAX_PASSED:
            return False
        self.passed.append((len(body), len(body) + end - start))
        return True

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def raw(self) -> str:
        """The field as the model wrote it, without its closing delimiter."""
        return self.opening + self.text


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class FormatParser:
    """An OutputParser of the format `given`. `begun` is the field that the prompt opened."""

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
        self._around = Flow(TextDelta, self._parts, at_start=False)
        self._region: Region | None = None
        # Whether only blanks, thoughts and calls came so far; and whether only blanks came after
        # the last call.
        self._is_start, self._is_behind_call = True, False
        self.is_cut = False
        self._late: tuple[Delimiter, ...] = ()
        self._watch()
        if begun is not None:
            self._open(begun, "", {})

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        self._read(self._held + text, final=False)
        return self._taken()

    def finish(self) -> list[Part]:
        """The remaining parts. A field that is still open ends here."""
        text = self._held
        while text or self._region is not None:
            self._read(text, final=True)
            text = self._close("") if self._region is not None else ""
        self._around.end(strip=False)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts = list(self._parts)
        self._parts.clear()
        return parts

    def _read(self, text: str, *, final: bool) -> None:
        at = 0
        while True:
            crossing = self._next(text, at, final=final)
            start = crossing if isinstance(crossing, int) else crossing.start
            self._put(text[at:start])
            if isinstance(crossing, int):
                self._held = text[start:]
                return
            at = crossing.match.end
            again = self._cross(crossing, text[start:at])
            if again:
                text, at = again + text[at:], 0

    def _next(self, text: str, at: int, *, final: bool) -> _Crossing | int:
        """Return the first delimiter from `at` on, or the index before which there is none."""
        region, start = self._region, at
        after_blanks = len(text) - len(text[at:].lstrip())
        end = region.span.end(text, at) if region is not None and region.span else None
        while True:
            begun = self._begins.search(text, start)
            start = len(text) if begun is None else begun.start()
            if end is not None and end <= start:
                return _Crossing(end, Match(end), _CLOSES)
            if start >= len(text):
                return len(text)
            is_first = start <= after_blanks
            here = [one for one in self._watched if self._may_stand(one, is_first=is_first)]
            found = [(one, one.match(text, start, final=final)) for one in here]
            if any(isinstance(match, Pending) for _, match in found):
                return start
            crossings = [
                _Crossing(start, match, opened, one)
                for one, match in found
                if isinstance(match, Match)
                and (opened := self._opened(self._watched[one], match.groups)) is not None
            ]
            best = max(crossings, key=lambda crossing: crossing.match.end, default=None)
            if best is not None and not self._is_text(best, text, at):
                return best
            start += 1

    def _may_stand(self, one: Delimiter, *, is_first: bool) -> bool:
        """Return whether a delimiter is recognised. `is_first` means that only blanks came since
        the last delimiter."""
        if not (one.at_start or one.behind_call):
            return True
        if self._region is not None:
            return is_first and one.at_start and self._region.is_empty
        return is_first and (self._is_start if one.at_start else self._is_behind_call)

    def _is_text(self, crossing: _Crossing, text: str, at: int) -> bool:
        """Return whether a closing delimiter is part of the region's text."""
        region, end = self._region, crossing.match.end
        if region is None or crossing.field is not _CLOSES:
            return False
        return region.goes_on(text, at, crossing.start, end)

    def _watch(self) -> None:
        """Set the delimiters that are recognised now, with the fields that each may open: _CLOSES
        for one that closes the region, _DROPS for one that is left out."""
        region, opens = self._region, list(self._format.fields)
        found: dict[Delimiter, Sequence[Field]] = {}
        if region is not None:
            outer = region.outer.given.closes if region.outer is not None else ()
            found.update(dict.fromkeys((*region.given.closes, *outer), (_CLOSES,)))
            if not region.given.gives_way:
                is_thought = region.given.kind == "reasoning"
                opens = [one for one in opens if is_thought and one.interrupts]
                # The prompt may have opened the thoughts, and the model may open them again.
                again = [replace(one, at_start=True) for one in region.given.opens if is_thought]
                found.update(dict.fromkeys(again, (_DROPS,)))
        for one in opens:
            for delimiter in one.opens:
                found[delimiter] = [*found.get(delimiter, ()), one]
        if region is None or (region.given.kind == "reasoning" and not region.given.gives_way):
            found.update(dict.fromkeys((*self._format.drops, *self._late), (_DROPS,)))
        self._watched, self._begins = found, begins_of(frozenset(one.first for one in found))

    def _opened(self, fields: Sequence[Field], groups: Mapping[str, str]) -> Field | None:
        """Return the field that a delimiter opens, if any."""
        return next((one for one in fields if one.when is None or one.when(groups)), None)

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._region is not None:
            self._region.add(text)
            return
        self._is_start = self._is_start and text.isspace()
        self._is_behind_call = self._is_behind_call and text.isspace()
        self._around.add(text)

    def _cross(self, crossing: _Crossing, delimiter: str) -> str:
        """Process a delimiter; return text that must be read again."""
        if crossing.field is _CLOSES:
            return self._close(delimiter, crossing)
        if crossing.field is not _DROPS:
            region, outer = self._region, None
            if region is not None and region.given.gives_way:
                self._close("")
            elif region is not None:
                outer = region
            self._open(crossing.field, delimiter, crossing.match.groups, outer)
        elif self._region is None:
            self._is_start = False
            self._around.end(strip=True)
        return ""

    def _open(
        self, opened: Field, delimiter: str, groups: Mapping[str, str], outer: Region | None = None
    ) -> None:
        """Open a field, inside the thoughts `outer`, which continue if it is not a call."""
        blanks = (self._around if outer is None or outer.flow is None else outer.flow).cut()
        self._is_start = self._is_start and opened.kind in ("reasoning", "calls")
        flow = None
        if opened.kind in ("text", "reasoning"):
            make = TextDelta if opened.kind == "text" else ReasoningDelta
            flow = Flow(make, self._parts, at_start=opened.strip)
        elif opened.kind == "hidden":
            flow = Flow(TextDelta, [], at_start=True)
        before = blanks if opened.keeps else blanks + delimiter
        span = JsonSpan() if opened.balanced else None
        sending = None
        if opened.head is not None and outer is None:
            sending = Sending(opened.head, groups, self._schemas, self._begin, self._parts)
        self._region = Region(opened, before, groups, flow, outer, span, sending)
        if opened.keeps:
            self._region.add(delimiter)
        self._watch()

    def _close(self, delimiter: str, crossing: _Crossing | None = None) -> str:
        """End the region; return text that must be read again."""
        region, self._region = self._region, None
        if region is None:
            return ""
        again = ""
        if region.flow is not None:
            region.flow.end(strip=region.given.strip)
            self._around.at_start = True
            self._report(region.calls)
        elif region.sending is not None and region.sending.begun:
            again = self._sent(region, region.sending, delimiter, mends=crossing is not None)
        elif not self._called(region, region.text, delimiter, mends=crossing is not None):
            again = self._not_called(region, delimiter, crossing)
        self._watch()
        return again

    def _sent(self, region: Region, sending: Sending, delimiter: str, *, mends: bool) -> str:
        """End a region whose calls were reported already; return text that must be read again."""
        sending.finish(mends=mends and region.given.mend is not None)
        text, broken, self._late = region.text, sending.broken, ()
        self._around.at_start = self._is_behind_call = True
        if broken is not None:
            # A delimiter that seemed to be part of a value may have ended it.
            for at, end in region.passed:
                if at >= broken:
                    return text[end:] + delimiter
        rest = text[sending.at :]
        if between := BEHIND_CALL.match(rest):
            rest = rest[between.end() :]
        if not rest or self._called(region, rest.rstrip(" \t\r\n]"), delimiter, mends=mends):
            return ""
        self.is_cut |= not mends
        return rest + delimiter

    def _not_called(self, region: Region, delimiter: str, crossing: _Crossing | None) -> str:
        text, outer, again = region.text, region.outer, ""
        self.is_cut |= crossing is None
        # If the answer was cut off inside a call, the calls before it are complete.
        size = 0 if crossing is not None else before_begun(text)
        if size and self._called(region, text[:size], ""):
            self._put(text[size:])
            return ""
        if region.passed:
            # The first delimiter that seemed to be part of a value may have ended it.
            at, end = region.passed[0]
            again, delimiter = text[end:] + delimiter, text[at:end]
            region.pieces[:] = [text[:at]]
            if self._called(region, text[:at], delimiter):
                return again
        elif outer is not None and crossing is not None and crossing.by in outer.given.closes:
            again, delimiter = delimiter, ""
        self._region = outer
        self._is_start = self._is_start and outer is not None
        self._is_behind_call = False
        if outer is None:
            self._around.add_raw(region.raw + delimiter)
        else:
            outer.add(region.raw + delimiter)
        return again

    def _called(self, region: Region, text: str, delimiter: str, *, mends: bool = False) -> bool:
        """Report the calls in a region's `text`; return whether it was calls. Inside thoughts, they
        wait for the text after them. With `mends`, the text has ended and may be corrected."""
        given, outer = region.given, region.outer
        if given.read is None:
            return False
        mend = given.mend if mends else None
        for one in (text,) if mend is None else (text, mend(text)):
            try:
                read = given.read(one, region.groups, self._schemas)
                calls = [(call.name, call.json) for call in read]
            except NOT_CALLS:
                continue
            if given.keeps and any(name not in self._schemas for name, _ in calls):
                continue
            if outer is None or (outer.is_empty and not outer.calls):
                # The model may still write the end of these empty thoughts; it is dropped.
                ends = outer.given.closes if outer is not None else ()
                self._late = tuple(replace(one, behind_call=True) for one in ends)
                self._report(calls)
            else:
                outer.calls += calls
                outer.behind.append(region.opening + text + delimiter)
                self._region = outer
            return bool(calls)
        return False

    def _report(self, calls: Sequence[tuple[str, str]]) -> None:
        """Report calls, each a name and its arguments."""
        for name, arguments in calls:
            index = self._begin(name)
            self._parts += [ToolDelta(index, arguments), ToolClose(index, is_object(arguments))]
            self._around.at_start = self._is_behind_call = True

    def _begin(self, name: str) -> int:
        """Report the begin of a call; return its index."""
        self._parts.append(ToolOpen(self._num_calls, self._new_id(), name))
        self._num_calls += 1
        return self._num_calls - 1


@cache
def begins_of(firsts: frozenset[str]) -> re.Pattern[str]:
    """Return an expression that finds one of these literals, or the begin of one at the end."""
    begins = {one[:size] for one in firsts for size in range(1, len(one))}
    found = [*map(re.escape, firsts), *(re.escape(one) + r"\Z" for one in begins)]
    return re.compile("|".join(found) or "(?!)")


_CLOSES, _DROPS = Field("other", ()), Field("other", ())


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A delimiter at `start`, and its field, _CLOSES or _DROPS. `by` is None for the end of
    JSON."""

    start: int
    match: Match
    field: Field
    by: Delimiter | None = None
