"""What a model's output is made of: fields between delimiters, and text around them; and how far
each is while it is written: text that is reported at once (Flow), and a field that is open."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from outrider.api.chat_messages import PromptEnd
from outrider.server.events import Part, ToolClose, ToolDelta
from outrider.server.parsing.calls import ReadCalls, ReadHead
from outrider.server.parsing.delimiter import Delimiter
from outrider.server.parsing.json_text import JsonSpan, is_object

Kind: TypeAlias = Literal["text", "reasoning", "calls", "hidden", "other"]


@dataclass(frozen=True, slots=True)
class Field:
    """One kind of part. Where one delimiter opens several fields, `when` tells by its groups which.
    A field goes on to one of `closes`, to the end of the text, or with `gives_way` to where another
    field opens. `keeps` says that what opens it is part of its text. A field of the kind "other" is
    shown as it was written, a hidden one nowhere.

    For calls, `read` makes calls of the text, and `mend` corrects a text that ended but is no call.
    `goes_on` says of a text that a delimiter behind it is part of a value. A `balanced` field ends
    with the JSON value in it. With `head` the arguments of calls are reported while they are
    written."""

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
        """True for one that opens amid thoughts, which end there. A call that is known by its form
        alone does not: thoughts speak of such."""
        return self.kind == "calls" and not self.keeps


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The fields of a model's output, and delimiters that are left out wherever they stand.
    `shows_special`: its delimiters are special tokens, so the text must have these. `anchors` are
    what an assistant's turn begins with in a prompt. `name` is what notes and grammars call it."""

    name: str
    fields: tuple[Field, ...]
    drops: tuple[Delimiter, ...] = ()
    shows_special: bool = False
    anchors: tuple[str, ...] = ()

    @property
    def has_calls(self) -> bool:
        return any(one.kind == "calls" for one in self.fields)

    def without_calls(self) -> OutputFormat:
        """Where no tool was offered nothing is a call."""
        return replace(self, fields=tuple(one for one in self.fields if one.kind != "calls"))

    def at_start(self) -> OutputFormat:
        """Where nothing but thoughts and calls comes before a thought or a call."""
        fields = [
            replace(one, opens=tuple(replace(begin, at_start=True) for begin in one.opens))
            for one in self.fields
        ]
        return replace(self, fields=tuple(fields), drops=())

    def begun(self, prompt: PromptEnd | str) -> Field | None:
        """The field that the end of `prompt` has opened: its template, or the message that is gone
        on with. A text is a prompt without turns."""
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


# A delimiter within a value is looked for so often in one call, so that no text is read for ever.
_MAX_PASSED = 64


@dataclass(slots=True)
class Flow:
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


# The begin of a call that is longer than this is read when the call has ended.
_MAX_HEAD = 1024


@dataclass(slots=True)
class Sending:
    """Calls of a region whose arguments are reported while they are written. `open` reports the
    name of one and gives its index; only `names` are reported. `at` is how far in the region's text
    calls go, `broken` where arguments began that are no JSON object, `begun` says that there was a
    call."""

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
        """The region ends. With `mends` it ended as calls do, so brackets may be missing."""
        if self._span is None:
            return
        missing = "".join(reversed(self._span.open))
        if mends and not self._span.quoted and is_object("".join(self._pieces) + missing):
            self._send(missing)
        self._close(self._seen)

    def _begin(self, text: str) -> str:
        """The arguments of the next call, as far as they came."""
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
    """A field that is open: its text, unless that flows, and what stood before that. `outer` are
    the thoughts amid which it opened. `span` finds the end of a balanced one, `sending` reports its
    calls early. `passed` are the begins and ends of delimiters that are part of its text. `calls`
    came amid these thoughts and end them, unless more than blanks is `behind`: then they are what
    is thought about."""

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
        """Whether what would close it, `text[start:end]`, is part of its text, which goes on with
        `text[at:]`."""
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
        """As the model wrote it, up to where it closed."""
        return self.opening + self.text
