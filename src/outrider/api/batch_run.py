"""Runs the lines of a batch through an LLM: which request starts when, and which answer is written.

Lines are read ahead a window at a time and sorted by their ids, so that prompts which begin alike
follow each other. A request waits while another one reads a page of tokens that both begin with;
once it is in memory the one that waited finds it there. Answers are written in the order of lines,
or as they end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from outrider.api.batch_files import RawLine
from outrider.api.batch_lines import Answers, BadLine, BatchLine, read_line
from outrider.api.prompts import Message, Prompt
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.structure import StructureOptions
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams


class Handle(Protocol):
    """A request. `has_read` says that its prompt is in memory, where others find it."""

    @property
    def done(self) -> bool: ...

    @property
    def has_read(self) -> bool: ...

    def events(self) -> Iterable[TextEvent]:
        """What it wrote since it was last asked; nobody keeps it then."""
        ...

    def result(self) -> GenerationResult:
        """Raises what the request failed of."""
        ...


class BatchEngine(Protocol):
    """Runs requests beside each other."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def has_free_place(self) -> bool: ...

    def encode(self, prompt: Prompt, /) -> list[int]: ...

    def encode_chat(self, messages: str | Sequence[Message], /) -> list[int]: ...

    def submit(
        self, ids: Sequence[int], params: SamplingParams, /, *, sample: int, **structure: Any
    ) -> Handle:
        """`structure` are StructureOptions."""
        ...

    def advance(self) -> object:
        """Returns when something may have changed."""
        ...


# Pages of tokens that are remembered to have been read.
_MOST_PAGES = 1 << 16


class AnswerSink(Protocol):
    """Where answers go: an AnswerFile, or something like it."""

    def has(self, line: RawLine) -> bool: ...

    def write(self, line: RawLine, answer: str, *, is_error: bool) -> None: ...


@dataclass(slots=True)
class _OpenLine:
    """A line whose requests have not all ended. `text` is its answer, once there is one."""

    raw: RawLine
    line: BatchLine | BadLine
    results: list[GenerationResult | None] = field(default_factory=list[GenerationResult | None])
    num_prompt: list[int] = field(default_factory=list[int])
    num_left: int = 0
    error: Exception | None = None


@dataclass(slots=True)
class _Request:
    """One completion. `pages` names what its prompt begins with, a name for each page of ids and
    all before it; `num_read` of them are known to be in memory."""

    owner: _OpenLine
    place: int
    ids: list[int]
    params: SamplingParams
    structure: StructureOptions
    sample: int
    pages: list[int]
    num_read: int = 0
    handle: Handle | None = None


@dataclass(slots=True)
class Batch:
    """`structure` is what texts must be whose lines say nothing of it. `read_ahead` lines are read
    at once, and at most twice as many wait to be written; `run` yields after each job."""

    llm: BatchEngine
    answers: Answers
    file: AnswerSink
    defaults: SamplingParams
    structure: StructureOptions = field(default_factory=StructureOptions)
    ordered: bool = True
    read_ahead: int = 256
    num_tokens: int = 0
    _open: OrderedDict[int, _OpenLine] = field(default_factory=OrderedDict[int, _OpenLine])
    _ended: set[int] = field(default_factory=set[int])
    _pending: list[_Request] = field(default_factory=list[_Request])
    _running: list[_Request] = field(default_factory=list[_Request])
    _reading: Counter[int] = field(default_factory=Counter[int])
    _read: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])

    def run(self, lines: Iterator[RawLine]) -> Generator[None]:
        """All of `lines` that have no answer yet."""
        source = (line for line in lines if not self.file.has(line))
        is_over = False
        while not is_over or self._pending or self._running:
            if not is_over and not self._pending and len(self._open) <= self.read_ahead:
                is_over = not self._read_ahead(source)
            self._start()
            if self._running:
                self.llm.advance()
                self._hear()
            yield

    def _read_ahead(self, source: Iterator[RawLine]) -> bool:
        """Whether there may be more."""
        window = list(islice(source, self.read_ahead))
        for raw in window:
            self._read_one(raw)
        self._pending.sort(key=lambda request: request.ids)
        # The next is at the end.
        self._pending.reverse()
        return len(window) == self.read_ahead

    def _read_one(self, raw: RawLine) -> None:
        line = _line_of(raw, self.defaults)
        found = self._open[raw.number] = _OpenLine(raw, line)
        if isinstance(line, BadLine):
            found.error = line.error
            self._end(found)
            return
        try:
            requests = [r for ids in self._ids(line) for r in self._requests(found, line, ids)]
        except Exception as error:  # noqa: BLE001 - a line's mistake is its own
            found.error = error
            self._end(found)
            return
        found.num_left = len(requests)
        found.results = [None] * len(requests)
        self._pending += requests

    def _ids(self, line: BatchLine) -> list[list[int]]:
        if line.chat is not None:
            return [self.llm.encode_chat(line.chat)]
        return [self.llm.encode(prompt) for prompt in line.prompts]

    def _requests(self, owner: _OpenLine, line: BatchLine, ids: list[int]) -> list[_Request]:
        first = len(owner.num_prompt) * line.params.n
        owner.num_prompt.append(len(ids))
        pages = self._pages(ids)
        single, structure = replace(line.params, n=1), line.structure or self.structure
        return [
            _Request(owner, first + sample, ids, single, structure, sample, pages)
            for sample in range(line.params.n)
        ]

    def _pages(self, ids: list[int]) -> list[int]:
        size, name, found = self.llm.config.page_size, 0, list[int]()
        # The last id is read in any case.
        for start in range(0, len(ids) - size, size):
            name = hash((name, *ids[start : start + size]))
            found.append(name)
        return found

    def _start(self) -> None:
        """As many as run at once, of those that wait for no page."""
        for index in range(len(self._pending) - 1, -1, -1):
            if not self.llm.has_free_place:
                return
            request = self._pending[index]
            if not self._waits(request):
                del self._pending[index]
                self._submit(request)

    def _waits(self, request: _Request) -> bool:
        """Whether the next page that it would read is being read by another one."""
        pages = request.pages
        while request.num_read < len(pages) and pages[request.num_read] in self._read:
            request.num_read += 1
        return request.num_read < len(pages) and self._reading[pages[request.num_read]] > 0

    def _submit(self, request: _Request) -> None:
        try:
            request.handle = self.llm.submit(
                request.ids, request.params, sample=request.sample, **request.structure
            )
        except Exception as error:  # noqa: BLE001 - a line's mistake is its own
            self._finish(request, error)
            return
        self._running.append(request)
        self._reading.update(request.pages[request.num_read :])

    def _hear(self) -> None:
        """What the last job ended, and which prompts it has read."""
        still: list[_Request] = []
        for request in self._running:
            handle = request.handle
            if handle is None or handle.done:
                self._note_read(request)
                self._finish(request)
                continue
            if handle.has_read:
                self._note_read(request)
            for _ in handle.events():  # nobody reads them
                pass
            still.append(request)
        self._running = still

    def _note_read(self, request: _Request) -> None:
        """Once for each request: its pages are in memory, where others find them."""
        if request.num_read > len(request.pages):
            return
        for page in request.pages[request.num_read :]:
            self._reading[page] -= 1
            if not self._reading[page]:
                del self._reading[page]
        for page in request.pages:
            self._read[page] = None
            self._read.move_to_end(page)
        while len(self._read) > _MOST_PAGES:
            self._read.popitem(last=False)
        request.num_read = len(request.pages) + 1

    def _finish(self, request: _Request, error: Exception | None = None) -> None:
        owner = request.owner
        try:
            if request.handle is not None and error is None:
                result = request.handle.result()
                owner.results[request.place] = result
                self.num_tokens += result.num_tokens
        except Exception as failed:  # noqa: BLE001 - what the engine gave the request up for
            error = failed
        owner.error = owner.error or error
        owner.num_left -= 1
        if not owner.num_left:
            self._end(owner)

    def _end(self, found: _OpenLine) -> None:
        """Write its answer, or keep it until those before it are written."""
        self._ended.add(found.raw.number)
        if not self.ordered:
            self._write(found.raw.number)
            return
        while self._open and (number := next(iter(self._open))) in self._ended:
            self._write(number)

    def _write(self, number: int) -> None:
        found = self._open.pop(number)
        self._ended.remove(number)
        results = [result for result in found.results if result is not None]
        error = found.error
        if isinstance(found.line, BadLine) or error is not None:
            error = error or ConfigError("the line asks for nothing.")
            text = self.answers.bad(found.line, found.raw.name, error)
        else:
            text = self.answers.good(found.line, found.raw.name, found.num_prompt, results)
        self.file.write(found.raw, text, is_error=error is not None)


def _line_of(raw: RawLine, defaults: SamplingParams) -> BatchLine | BadLine:
    if raw.data is None:
        return BadLine(raw.number, ConfigError("the line is too long."))
    try:
        return read_line(raw.number, raw.data.decode("utf-8-sig"), defaults)
    except UnicodeDecodeError:
        return BadLine(raw.number, ConfigError("the line is not UTF-8 text."))
