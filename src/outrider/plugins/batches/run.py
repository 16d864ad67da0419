"""Runs the lines of a batch through an LLM: the order of requests, and of written answers.

Lines are read ahead a window at a time and sorted by their ids, so that prompts with a common
beginning follow each other. A request waits while another one reads a page of tokens that both
begin with; then it finds the page in the KV cache. Answers are written in the order of lines, or in
the order of their ends.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from outrider.api.callers import Message, Prompt
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.structure import StructureOptions
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, defect_in
from outrider.core.params import SamplingParams
from outrider.plugins.batches.lines import Answers, BadLine, BatchLine, RawLine, read_line

_log = logging.getLogger(__name__)


class Handle(Protocol):
    """A request. `has_read` says that its prompt is in the KV cache, where others find it."""

    @property
    def done(self) -> bool: ...

    @property
    def has_read(self) -> bool: ...

    def events(self) -> Iterable[TextEvent]:
        """Events since the last call; they are not stored."""
        ...

    def result(self) -> GenerationResult:
        """The result. Raises the error of a failed request."""
        ...


class BatchEngine(Protocol):
    """Runs several requests at a time."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def has_free_slot(self) -> bool: ...

    def encode(self, prompt: Prompt, /) -> list[int]: ...

    def encode_chat(self, messages: str | Sequence[Message], /) -> list[int]: ...

    def submit(
        self, ids: Sequence[int], params: SamplingParams, /, *, sample: int, **structure: Any
    ) -> Handle:
        """Start a request; `structure` are StructureOptions."""
        ...

    def advance(self) -> object:
        """Run until something may have changed."""
        ...


# Most pages of tokens that are remembered as read.
_MOST_PAGES = 1 << 16


class AnswerSink(Protocol):
    """Receiver of answers: an AnswerFile, or a similar object."""

    def has(self, line: RawLine) -> bool: ...

    def write(self, line: RawLine, answer: str, *, is_error: bool) -> None: ...


@dataclass(slots=True)
class _OpenLine:
    """A line with unfinished requests. `text` is its answer, once there is one."""

    raw: RawLine
    line: BatchLine | BadLine
    results: list[GenerationResult | None] = field(default_factory=list[GenerationResult | None])
    num_prompt: list[int] = field(default_factory=list[int])
    num_left: int = 0
    error: Exception | None = None


@dataclass(slots=True)
class _Request:
    """One completion. `pages` has a name for each page of the prompt, which covers its ids and all
    before it; the first `num_read` are known to be in the KV cache. `index` is its index among the
    line's results."""

    owner: _OpenLine
    index: int
    ids: list[int]
    params: SamplingParams
    structure: StructureOptions
    sample: int
    pages: list[int]
    num_read: int = 0
    handle: Handle | None = None


@dataclass(slots=True)
class Batch:
    """A batch. `structure` is the structure of texts whose lines have none. `read_ahead` lines are
    read at once, and at most twice as many wait to be written; `run` yields after each job."""

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
        """Run all of `lines` that have no answer yet."""
        source = (line for line in lines if not self.file.has(line))
        is_over = False
        while not is_over or self._pending or self._running:
            if not is_over and not self._pending and len(self._open) <= self.read_ahead:
                is_over = not self._read_ahead(source)
            self._start()
            if self._running:
                self.llm.advance()
                self._collect()
            yield

    def _read_ahead(self, source: Iterator[RawLine]) -> bool:
        """Read a window of lines. True if there may be more."""
        window = list(islice(source, self.read_ahead))
        for raw in window:
            self._read_one(raw)
        self._pending.sort(key=lambda request: request.ids)
        # The next one is taken from the end.
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
        # The last id is read in any case, so its page does not count.
        for start in range(0, len(ids) - size, size):
            name = hash((name, *ids[start : start + size]))
            found.append(name)
        return found

    def _start(self) -> None:
        """Start as many requests as run at once, of those that do not wait for a page."""
        for index in range(len(self._pending) - 1, -1, -1):
            if not self.llm.has_free_slot:
                return
            request = self._pending[index]
            if not self._waits(request):
                del self._pending[index]
                self._submit(request)

    def _waits(self, request: _Request) -> bool:
        """True if another request is reading the next page that this one would read."""
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

    def _collect(self) -> None:
        """Handle the requests that the last job ended, and the prompts that it read."""
        still: list[_Request] = []
        for request in self._running:
            handle = request.handle
            if handle is None or handle.done:
                self._note_read(request)
                self._finish(request)
                continue
            if handle.has_read:
                self._note_read(request)
            for _ in handle.events():  # dropped: only results are written
                pass
            still.append(request)
        self._running = still

    def _note_read(self, request: _Request) -> None:
        """Note, once per request, that its pages are in the KV cache, where others find them."""
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
                owner.results[request.index] = result
                self.num_tokens += result.num_tokens
        except Exception as failed:  # noqa: BLE001 - the error for which the engine gave it up
            error = failed
        owner.error = owner.error or error
        owner.num_left -= 1
        if not owner.num_left:
            self._end(owner)

    def _end(self, found: _OpenLine) -> None:
        """Write the answer of a line, or store it until the lines before it are written."""
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
            error = error or ConfigError("the line requests nothing.")
            if (defect := defect_in(error)) is not None:
                _log.error("a defect in line %d", number, exc_info=defect)
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
