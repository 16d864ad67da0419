"""The streaming parser: it takes a model's text in pieces and returns the parts of an answer.

Its decisions depend only on the characters, never on where a piece ends: text that may become a
delimiter is held back until more text comes. The text of a call is held until the call ends, and
shown as text if it is not a call. Once a name and the begin of JSON arguments have been read
(fields.py, Sending), the call is reported while it is written.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.server.events import Part, ReasoningDelta, TextDelta, ToolClose, ToolDelta, ToolOpen
from outrider.server.parsing.calls import BEHIND_CALL, Schemas
from outrider.server.parsing.delimiter import Delimiter, Match, Pending
from outrider.server.parsing.fields import Field, Flow, OutputFormat, Region, Sending
from outrider.server.parsing.json_text import NOT_CALLS, JsonSpan, before_begun, is_object


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
        self._is_start, self._is_behind_call, self._read_from = True, False, 0
        self.is_cut = False
        self._late: tuple[Delimiter, ...] = ()
        self._watched_now = self._watched()
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
        at, known = 0, dict[Delimiter, int]()
        while True:
            crossing = self._next(text, at, known, final=final)
            start = crossing if isinstance(crossing, int) else crossing.start
            self._put(text[at:start])
            if isinstance(crossing, int):
                self._held = text[start:]
                return
            at = crossing.match.end
            again = self._cross(crossing, text[start:at])
            if again:
                text, at = again + text[at:], 0
                known.clear()

    def _next(
        self, text: str, at: int, known: dict[Delimiter, int], *, final: bool
    ) -> _Crossing | int:
        """Return the first delimiter from `at` on, or the index before which there is none."""
        watched, self._read_from = self._watched_now, at
        for one in watched:
            if known.get(one, -1) < at or one.at_start or one.behind_call:
                known[one] = self._first(one, text, at)
        region = self._region
        end = region.span.end(text, at) if region is not None and region.span else None
        while True:
            start = min((known[one] for one in watched), default=len(text))
            if end is not None and end <= start:
                return _Crossing(end, Match(end), _CLOSES)
            if start >= len(text):
                return len(text)
            here = [one for one in watched if known[one] == start]
            found = [(one, one.match(text, start, final=final)) for one in here]
            if any(isinstance(match, Pending) for _, match in found):
                return start
            crossings = [
                _Crossing(start, match, opened, one)
                for one, match in found
                if isinstance(match, Match)
                and (opened := self._opened(watched[one], match.groups)) is not None
            ]
            best = max(crossings, key=lambda crossing: crossing.match.end, default=None)
            if best is not None and not self._is_text(best, text, at):
                return best
            for one in here:
                known[one] = self._first(one, text, start + 1)

    def _is_text(self, crossing: _Crossing, text: str, at: int) -> bool:
        """Return whether a closing delimiter is part of the region's text."""
        region, end = self._region, crossing.match.end
        if region is None or crossing.field is not _CLOSES:
            return False
        return region.goes_on(text, at, crossing.start, end)

    def _watched(self) -> dict[Delimiter, Sequence[Field]]:
        """Return the delimiters that are recognised now, with the fields that each may open:
        _CLOSES for one that closes the region, _DROPS for one that is left out."""
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
        return found

    def _opened(self, fields: Sequence[Field], groups: Mapping[str, str]) -> Field | None:
        """Return the field that a delimiter opens, if any."""
        return next((one for one in fields if one.when is None or one.when(groups)), None)

    def _first(self, one: Delimiter, text: str, at: int) -> int:
        """Return the first index at which the delimiter, or the begin of it, may stand."""
        if one.at_start or one.behind_call:
            return self._first_of_all(one, text, at)
        found = text.find(one.first, at)
        if found >= 0:
            return found
        begun = text.find(one.first[0], max(at, len(text) + 1 - len(one.first)))
        while begun >= 0 and not one.first.startswith(text[begun:]):
            begun = text.find(one.first[0], begun + 1)
        return len(text) if begun < 0 else begun

    def _first_of_all(self, one: Delimiter, text: str, at: int) -> int:
        region = self._region
        if region is None:
            may = self._is_start if one.at_start else self._is_behind_call
        else:
            may = one.at_start and region.is_empty
        begin = at + len(text[at:]) - len(text[at:].lstrip())
        if not may or text[self._read_from : begin].strip():
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
        self._watched_now = self._watched()

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
        self._watched_now = self._watched()
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


_CLOSES, _DROPS = Field("other", ()), Field("other", ())


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A delimiter at `start`, and its field, _CLOSES or _DROPS. `by` is None for the end of
    JSON."""

    start: int
    match: Match
    field: Field
    by: Delimiter | None = None
