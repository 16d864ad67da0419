"""The program of a drafter's process; `__main__.py` starts it.

The process ends when its line to the engine closes, so it never outlives the engine, and has a
process group of its own, because Ctrl-C is meant for the engine. `WorkerServer` stores each
sequence's text, terms and newest draft, and gives its drafter the rows that a drafter inside the
engine would get. User errors are sent to the engine, which raises them; any other error ends the
process, which is then started anew.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

from outrider.cache.pages import salted
from outrider.core.draft import Draft, Outcome
from outrider.core.errors import DrafterError, OutriderError, SequenceError
from outrider.core.protocols import AheadRow, DraftAhead, Drafter, DraftRow
from outrider.core.rng import KeyedRng, Pick, Rng, draw_for
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import CommonIds, DraftSampler
from outrider.drafters.common.native import fused_model_drafts
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model, prepare_torch
from outrider.plugins.lanes.ahead.choices import capacity_needed
from outrider.plugins.lanes.ahead.drafter import ahead
from outrider.plugins.lanes.process.frames import Frame, Kind, Pipe, receive, send
from outrider.plugins.lanes.process.messages import (
    Answer,
    Asked,
    AskedAhead,
    Hello,
    Proposal,
    SamplingTerms,
    failure,
    read_about,
    read_asking,
    read_terms,
)
from outrider.plugins.lanes.process.options import ChildOptions
from outrider.plugins.lanes.process.shared import MemoryPipe, SharedProbs


@dataclass(frozen=True, slots=True)
class Inner:
    """The process's drafter, `ahead` if it can draft ahead; `pick` is its `rng`'s operator."""

    drafter: Drafter
    vocab_size: int
    pick: Pick
    ahead: DraftAhead | None = None


def build_inner(options: ChildOptions) -> Inner:
    """Load the draft model and wire it. Raises the errors of `load_model`."""
    prepare_torch(deterministic=options.deterministic, threads=options.threads)
    loaded = load_model(Path(options.folder), _load_options(options), name=options.name)
    kernels, size = loaded.kernels, options.vocab_size
    model = CommonIds.over(loaded, vocab_size=size, num_common=options.num_common)
    draw = draw_for(options.sampler)
    sampler = DraftSampler(kernels.argmax, "the draft model", draw, kernels.sampling)
    pick, choices = kernels.sampling.pick, options.ahead
    batch = options.batch_size
    if choices is None:
        fused = fused_model_drafts(model, sampler, batch_size=batch)
        return Inner(ModelDrafter(model, sampler, chunk=options.chunk, fused=fused), size, pick)
    needed = capacity_needed(choices.k, choices.fan_out, 1)
    capacity = replace(needed, num_rows=options.max_rows, num_logits=options.max_logits)
    drafter = ahead(model, sampler, choices, capacity, chunk=options.chunk, batch_size=batch)
    return Inner(drafter, size, pick, drafter)


def _load_options(options: ChildOptions) -> LoadOptions:
    capacity = ModelCapacity(
        num_slots=options.num_slots,
        page_size=options.page_size,
        max_rows=options.max_rows,
        max_logits=options.max_logits,
    )
    states = replace(capacity.states, **dict[str, Any](options.states))
    return LoadOptions(
        capacity=replace(capacity, states=states),
        dtype=options.dtype,
        device=options.device,
        force_reference=options.force_reference,
        threads=options.threads,
    )


@dataclass(slots=True)
class _Text:
    """The text of one sequence, which shares pages with texts of the same `salt`. `opened` says
    whether the drafter knows it; `draft` is the newest, with its distributions."""

    tokens: list[int]
    salt: str = ""
    terms: SamplingTerms | None = None
    opened: bool = False
    draft: Draft = field(default_factory=Draft.empty)

    def own(self, received: Draft) -> Draft:
        """Return `received` with its distributions, if it was made here: messages lack them."""
        mine = (self.draft.tokens, self.draft.parents)
        return self.draft if mine == (received.tokens, received.parents) else received


class WorkerServer:
    """A server that answers a frame at a time, with probs in `distributions`."""

    def __init__(self, inner: Inner, distributions: SharedProbs) -> None:
        self._inner = inner
        self._distributions = distributions
        self._texts: dict[int, _Text] = {}
        self._trouble: Frame | None = None
        self._ahead_seconds = 0.0

    def hello(self, *, in_memory: bool) -> Hello:
        num_distributions = len(self._distributions.probs_LV)
        drafts_ahead = self._inner.ahead is not None
        return Hello(self._inner.vocab_size, num_distributions, drafts_ahead, in_memory)

    def answer(self, frame: Frame) -> Frame | None:
        """Return the answer, if there is one. Raises DrafterError for a foreign frame."""
        match frame.kind:
            case Kind.OPEN:
                seq_id, tokens, salt = read_about(frame.body)
                self._texts[seq_id] = _Text(tokens, salt)
            case Kind.TERMS:
                seq_id, terms = read_terms(frame.body)
                self._text(seq_id).terms = terms
            case Kind.PROPOSE:
                return self._propose(read_asking(frame.body, Asked.take))
            case Kind.AHEAD:
                self._propose_after(read_asking(frame.body, AskedAhead.take))
            case Kind.CLOSE:
                self._close(read_about(frame.body)[0])
            case _:
                raise DrafterError(f"a drafter's process cannot answer {frame.kind.name}.")
        return None

    def _propose(self, asked: Sequence[Asked]) -> Frame:
        rows = [self._row(one) for one in asked]
        # A failure after the last answer is reported with the next one.
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            return trouble
        began = perf_counter()
        try:
            self._open(rows)
            proposals = self._proposals(rows, self._inner.drafter.propose(rows))
        except (OutriderError, SequenceError) as error:
            return failure(error)
        answer = Answer(proposals, perf_counter() - began, self._ahead_seconds)
        self._ahead_seconds = 0.0
        return answer.frame()

    def _propose_after(self, asked: Sequence[AskedAhead]) -> None:
        if self._inner.ahead is None:
            return
        rows = [self._ahead_row(one) for one in asked]
        began = perf_counter()
        try:
            self._inner.ahead.propose_after(rows)
        except (OutriderError, SequenceError) as error:
            self._trouble = failure(error)
        self._ahead_seconds += perf_counter() - began

    def _close(self, seq_id: int) -> None:
        if self._texts.pop(seq_id).opened:
            self._inner.drafter.close(seq_id)

    def _open(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            text = self._text(row.seq_id)
            if not text.opened:
                with salted(text.salt):
                    self._inner.drafter.open(row.seq_id, row.tokens)
                text.opened = True

    def _proposals(self, rows: Sequence[DraftRow], drafts: Sequence[Draft]) -> list[Proposal]:
        """Return the drafts as they are sent, and write their distributions one after another."""
        proposals: list[Proposal] = []
        end = 0
        for row, draft in zip(rows, drafts, strict=True):
            self._text(row.seq_id).draft = draft
            if draft.probs_NV is None:
                proposals.append(Proposal(draft, None))
                continue
            self._distributions.write(end, draft.probs_NV)
            proposals.append(Proposal(draft, end))
            end += len(draft)
        return proposals

    def _row(self, asked: Asked) -> DraftRow:
        text = self._text(asked.seq_id)
        if asked.num_known > len(text.tokens) or text.terms is None:
            raise DrafterError(f"sequence {asked.seq_id} was sent in the wrong order.")
        text.tokens[asked.num_known :] = asked.new
        last = asked.last
        if last is not None:
            last = Outcome(asked.seq_id, text.own(last.draft), last.verdict)
        return DraftRow(
            asked.seq_id,
            text.tokens,
            last,
            asked.budget,
            text.terms.params,
            replace(asked.key, choose=self._inner.pick),
            shaper=text.terms.shaper,
        )

    def _ahead_row(self, asked: AskedAhead) -> AheadRow:
        text = self._text(asked.seq_id)
        if text.terms is None:
            raise DrafterError(f"sequence {asked.seq_id} was sent in the wrong order.")
        key = replace(asked.key, choose=self._inner.pick)
        return AheadRow(
            asked.seq_id,
            asked.start,
            asked.pending,
            text.own(asked.draft),
            asked.budget,
            text.terms.params,
            _After(key),
            asked.window,
        )

    def _text(self, seq_id: int) -> _Text:
        if seq_id not in self._texts:
            raise DrafterError(f"a drafter's process does not know sequence {seq_id}.")
        return self._texts[seq_id]


@dataclass(frozen=True, slots=True)
class _After:
    """The random numbers of the round after one that emits so many tokens."""

    key: KeyedRng

    def __call__(self, num_emitted: int) -> Rng:
        return replace(self.key, start=self.key.start + num_emitted)


@dataclass(frozen=True, slots=True)
class Inherited:
    """Descriptors that the engine opened: its socket, the memory for distributions, and that for
    messages if there is any."""

    line: socket.socket
    distribution_file: int
    message_file: int | None = None

    @classmethod
    def named(cls, words: Sequence[str]) -> Inherited:
        line, *files = map(int, words)
        return cls(socket.socket(fileno=line), *files)

    def pipe(self) -> MemoryPipe | None:
        """Return the pipe for messages after HELLO, if it is not the socket; the socket then only
        reports that the engine is gone."""
        if self.message_file is None:
            return None
        pipe = MemoryPipe.over(self.message_file, rank=1)
        if pipe is not None:
            Thread(target=_end_with, args=(self.line, pipe), daemon=True).start()
        return pipe


def _end_with(line: socket.socket, pipe: MemoryPipe) -> None:
    with suppress(OSError):
        line.recv(1)
    pipe.end()


def serve(
    inherited: Inherited,
    options: ChildOptions,
    build: Callable[[ChildOptions], Inner] = build_inner,
) -> None:
    """Load, say hello, and answer until the engine says EXIT or is gone."""
    line = inherited.line
    try:
        inner = build(options)
        distributions = SharedProbs.over(
            inherited.distribution_file, options.num_distributions, options.vocab_size
        )
    except OutriderError as error:
        send(line, failure(error))
        return
    server = WorkerServer(inner, distributions)
    memory = inherited.pipe()
    pipe: Pipe = line if memory is None else memory
    try:
        send(line, server.hello(in_memory=memory is not None).frame())
        while (frame := receive(pipe)) is not None and frame.kind is not Kind.EXIT:
            answer = server.answer(frame)
            if answer is not None:
                send(pipe, answer)
    except ConnectionError:
        return  # the engine ended during an answer
