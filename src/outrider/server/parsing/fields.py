"""Fields of a model's output, which stand between delimiters, with text around them. Also their
state while they are written: text that is reported at once (Flow), and an open field (Region)."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from outrider.api.chat_template import PromptEnd
from outrider.server.events import Part, ToolClose, ToolDelta
from outrider.server.parsing.calls import ReadCalls, ReadHead
from outrider.server.parsing.delimiter import Delimiter
from outrider.server.parsing.json_text import JsonSpan, is_object

Kind: TypeAlias = Literal["text", "reasoning", "calls", "hidden", "other"]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the output.

    If one delimiter opens several fields, `when` decides by its groups. A field ends at one of
    `closes`, at the end of the text, or with `gives_way` where another field opens. With `keeps`,
    the opening delimiter is part of the field's text. A field of the kind "other" is shown as it
    was written; a hidden one is not shown.

    For calls, `read` parses the text, and `mend` corrects a text that ended but is not a valid
    call. `goes_on` returns for a text whether a delimiter after it is part of a value. A `balanced`
    field ends with the JSON value in it. With `head`, the arguments of calls are reported while
    they are written.
    """

    kind: Kind
    opens: tuple[Delimiter, ...]
    closes: tuple[Delimiter, ...] = ()
    when: Callable[[Mapping[str, str]], bool] | None = None
    gives_way: bool = False
    keeps: bool = False
    strip: bool = True
    read: ReadCalls | None = None
    head: ReadHead | None = None
    mend: Callable[[str], str] | None = None
    goes_on: Callable[[str], bool] | None = None
    balanced: bool = False

    @property
    def interrupts(self) -> bool:
        """True if the field may open inside thoughts; not for calls without delimiters."""
        return self.kind == "calls" and not self.keeps


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The fields of a model's output. `drops` are delimiters that are left out everywhere. With
    `shows_special`, delimiters are special tokens, so the parser needs text that contains these.
    `anchors` are texts with which an assistant's turn begins in a prompt. `name` identifies the
    format in notes and grammars."""

    name: str
    fields: tuple[Field, ...]
    drops: tuple[Delimiter, ...] = ()
    shows_special: bool = False
    anchors: tuple[str, ...] = ()

    @property
    def has_calls(self) -> bool:
        return any(one.kind == "calls" for one in self.fields)

    def without_calls(self) -> OutputFormat:
        """Return the format without calls, for requests that offer no tools."""
        return replace(self, fields=tuple(one for one in self.fields if one.kind != "calls"))

    def at_start(self) -> OutputFormat:
        """Return the format that recognises thoughts and calls only before any text."""
        fields = [
            replace(one, opens=tuple(replace(begin, at_start=True) for begin in one.opens))
            for one in self.fields
        ]
        return replace(self, fields=tuple(fields), drops=())

    def begun(self, prompt: PromptEnd | str) -> Field | None:
        """Return the field that the end of `prompt` has opened, by its template or by a message
        that is continued. A string is a prompt without turns."""
        text, turn = (prompt, len(prompt)) if isinstance(prompt, str) else prompt
        at = max((text.rfind(anchor) + len(anchor) for anchor in self._found(text)), default=0)
        end = PromptEnd(text[at:], max(0, turn - at))
        for found in self.fields:
            ends = [one.first for one in found.closes if one.first]
            if found.kind != "calls" and any(
                len(one.pieces) == 1 and end.is_open(one.first, ends, anywhere=not one.at_start)
                for one in found.opens
            ):
                return found
        return None

    def _found(self, prompt: str) -> Sequence[str]:
        return [anchor for anchor in self.anchors if anchor in prompt]


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
