"""Stages, jobs, the pool of ready sequences, and the `Schedule` protocol. No tensors, no clocks.

`num_admissible` says which waiting requests may start: first come, first served, as memory and
batch allow. The functions at the end choose works from a pool; several schedules share them.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from typing import Protocol, runtime_checkable

from outrider.core.config import CHUNK, CHUNK_WITH_ROUNDS, EngineConfig
from outrider.core.draft import JobTrace
from outrider.core.errors import ContractError


class Stage(IntEnum):
    """A stage of a sequence. PREFILL and VERIFY share one target pass in a job.

    AHEAD drafts for the likely verdicts of a sequence while another lane verifies it.
    """

    PREFILL = auto()
    DRAFT = auto()
    VERIFY = auto()
    AHEAD = auto()


class JobKind(Enum):
    """The parts of the engine that a job uses."""

    DRAFT = auto()
    """The drafter alone; a later job verifies the drafts."""
    AHEAD = auto()
    """The drafter alone, for verdicts that are not known yet."""
    VERIFY = auto()
    """A target pass that only verifies existing drafts."""
    PREFILL = auto()
    """A target pass that reads prompts, and may verify existing drafts too."""
    ROUND = auto()
    """Drafting, then the target pass over what was drafted."""


_ORDER = (Stage.DRAFT, Stage.AHEAD, Stage.PREFILL, Stage.VERIFY)


def _kind(stages: tuple[Stage, ...]) -> JobKind:
    if len(stages) == 1:
        return JobKind[stages[0].name]
    return JobKind.ROUND if Stage.DRAFT in stages else JobKind.PREFILL


def _every_mix() -> tuple[tuple[tuple[Stage, ...], JobKind], ...]:
    """Stages in the order in which they run, and the kind, for each sum of `1 << stage`."""
    sums = range(1 << (max(Stage) + 1))
    mixes = [tuple([stage for stage in _ORDER if bits >> stage & 1]) for bits in sums]
    return tuple([(stages, _kind(stages)) for stages in mixes])


_MIXES = _every_mix()


@dataclass(slots=True, unsafe_hash=True)
class StageItem:
    """One stage of one sequence. `num_tokens` are the tokens fed in addition to a draft. Nothing
    changes one; it is not frozen, since three are made for each sequence of each round."""

    seq_id: int
    stage: Stage
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a lane: drafts first, then one target pass over everything else. `stages` are the
    stages that the job contains, in the order in which they run."""

    works: tuple[StageItem, ...]
    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)
    kind: JobKind = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Both are read several times a round, so they are computed once.
        bits = 0
        for work in self.works:
            bits |= 1 << work.stage
        stages, kind = _MIXES[bits]
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "kind", kind)

    def of(self, stage: Stage) -> tuple[StageItem, ...]:
        if stage not in self.stages:
            return ()
        return tuple([work for work in self.works if work.stage is stage])

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Each sequence once, in the order of the works."""
        return tuple(dict.fromkeys([work.seq_id for work in self.works]))

    def alone(self, seq_id: int) -> Job:
        """Return the part of the job that concerns one sequence."""
        return Job(tuple(work for work in self.works if work.seq_id == seq_id))


@dataclass(frozen=True, slots=True)
class ReadyQueues:
    """Sequences by the stage they wait for, oldest first; sequences inside a job are absent.

    Each entry counts the tokens of the sequence that the target's memory does not hold: 1 (the
    pending token) while decoding, the unread prompt before. A sequence in `prefill` may get chunks
    of its prompt, or a first round that also reads all of the rest. `ahead` lists the sequences
    whose drafts are being verified in another lane now, and for which nothing was drafted ahead
    yet. `num_free_tokens` is the free capacity of the arena. The sequences in `drafting` and
    `verifying` are in such a job now, and `num_ahead` sequences are being drafted ahead: only one
    job at a time uses the drafter. A lane may wait for running jobs while the pool is `patient`,
    that is, unless nothing else would run. A job may read `most_prompt_tokens` (admission.py).
    """

    prefill: tuple[StageItem, ...]
    draft: tuple[StageItem, ...]
    verify: tuple[StageItem, ...]
    num_free_tokens: int
    ahead: tuple[StageItem, ...] = ()
    drafting: tuple[int, ...] = ()
    verifying: tuple[int, ...] = ()
    patient: bool = True
    most_prompt_tokens: int | None = None
    num_ahead: int = 0

    def chunk(self, size: int | None) -> int:
        """Return how many prompt tokens a job may read, if its schedule would read `size`; None is
        the default, which is smaller while other sequences decode."""
        if size is None:
            size = CHUNK_WITH_ROUNDS if self.is_decoding else CHUNK
        return size if self.most_prompt_tokens is None else min(size, self.most_prompt_tokens)

    @property
    def is_decoding(self) -> bool:
        return bool(self.draft or self.verify or self.ahead or self.drafting or self.verifying)

    @property
    def has_work(self) -> bool:
        return bool(self.prefill or self.draft or self.verify or self.ahead)

    def without(self, seq_ids: Collection[int]) -> ReadyQueues:
        """Return the same pool without the works of these sequences."""
        prefill, draft, verify, ahead = (
            tuple(work for work in works if work.seq_id not in seq_ids)
            for works in (self.prefill, self.draft, self.verify, self.ahead)
        )
        return replace(self, prefill=prefill, draft=draft, verify=verify, ahead=ahead)


class Schedule(Protocol):
    """A policy that chooses the next job of each idle lane. All state that jobs change is in the
    pool; a schedule that is a JobObserver also learns from the times of jobs."""

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes, in the order in which idle ones get a job."""
        ...

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None: ...


class LaneOrder(Protocol):
    """A policy for the order in which idle lanes get their jobs (plugins/lanes/lane_order.py)."""

    def arrange(self, lanes: tuple[str, ...], pool: ReadyQueues) -> tuple[str, ...]: ...


@runtime_checkable
class JobObserver(Protocol):
    """A schedule or a lane order that learns from the times of jobs."""

    def observe(self, trace: JobTrace) -> None:
        """Learn from a job that ended."""
        ...


def job_observers(*candidates: object) -> tuple[JobObserver, ...]:
    """Return the candidates that learn from jobs."""
    return tuple([one for one in candidates if isinstance(one, JobObserver)])


# Tokens that a request without a limit is expected to emit: a long answer of a chat.
OPEN_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the work in flight: `num_sequences` sequences in `num_tokens` tokens of the arena.

    A round may stage `spare` tokens in addition to those of a sequence, but no more than `beyond`
    tokens past the sequence's final length. A sequence counts for its tokens and for the share
    `reserve` of the tokens that it may still emit, in whole pages. With a share of 1 no sequence
    ever stops half-way for lack of pages; with a smaller share more sequences run at once, and some
    may be pre-empted. `max_waiting` requests may wait. If `held` is not 0, no sequence ever holds
    more than `held` tokens: pages before those are given back. A request without a limit counts for
    `OPEN_TOKENS` more tokens: the model usually ends its text long before the window's end.
    """

    num_sequences: int
    num_tokens: int
    page_size: int = 1
    spare: int = 0
    reserve: float = 1.0
    max_waiting: int = 1_000_000
    beyond: int | None = None
    held: int = 0

    def expected(self, num_tokens: int, num_left: int, *, is_open: bool = False) -> int:
        """Return the arena tokens that a sequence of `num_tokens` tokens counts for, if it may emit
        `num_left` more; `is_open` if the request sets no limit."""
        ahead = min(num_left, OPEN_TOKENS) if is_open else num_left
        tokens = num_tokens + math.ceil(ahead * self.reserve) + self.spare
        return min(self.most(num_tokens + num_left), self._whole_pages(tokens))

    def most(self, num_tokens: int) -> int:
        """Return the most arena tokens that a sequence of `num_tokens` holds, in whole pages."""
        most = self._whole_pages(num_tokens + self.past_end)
        return min(most, self._whole_pages(self.held)) if self.held else most

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the arena holds when it runs alone."""
        frees_pages = 0 < self._whole_pages(self.held) <= self.num_tokens
        return sys.maxsize if frees_pages else self.num_tokens - self.past_end

    @property
    def past_end(self) -> int:
        """Tokens that a round may stage past the last token that can be accepted."""
        return self.spare if self.beyond is None else min(self.spare, self.beyond)

    def _whole_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size


def num_admissible(waiting: Sequence[int], running: Sequence[int], limits: Limits) -> int:
    """Return how many of `waiting` fit, in order, with `running`: arena tokens of each."""
    num_free = limits.num_tokens - sum(running)
    num_slots = limits.num_sequences - len(running)
    count = 0
    for need in waiting[: max(num_slots, 0)]:
        num_free -= need
        if num_free < 0:
            break
        count += 1
    return count


# Names of lanes that schedules have in common.
PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """The most prompt tokens of a pass (None is the default), and the most sequences of a job in
    each lane."""

    chunk: int | None
    prefill: int = 1024
    decode: int = 1024
    verify: int = 1024


def job_of(works: Sequence[StageItem]) -> Job | None:
    return Job(tuple(works)) if works else None


def rounds(works: Sequence[StageItem]) -> list[StageItem]:
    """Return the draft and the verification of each of `works`, in one job."""
    items: list[StageItem] = []
    for work in works:
        items.append(StageItem(work.seq_id, Stage.DRAFT, work.num_tokens))
        items.append(StageItem(work.seq_id, Stage.VERIFY, work.num_tokens))
    return items


def shares(pool: ReadyQueues, num_tokens: int | None, most: int) -> list[StageItem]:
    """Divide `num_tokens` of a pass among at most `most` sequences that wait for PREFILL.

    Counts include pending tokens. The oldest prompt gets half of the tokens, or all that it needs
    if that is less, so that it is finished. The rest goes to the prompts that need least, so that
    they do not wait for long ones. The oldest prompt also gets what is left over.
    """
    if not pool.prefill:
        return []
    size = pool.chunk(num_tokens)
    oldest, *others = pool.prefill
    first = min(oldest.num_tokens, max(size // 2, 1))
    given: list[StageItem] = []
    left = size - first
    for work in sorted(others, key=lambda work: work.num_tokens)[: most - 1]:
        count = min(work.num_tokens, left)
        if count > 0:
            given.append(StageItem(work.seq_id, Stage.PREFILL, count))
        left -= count
    first = min(oldest.num_tokens, first + left)
    return [StageItem(oldest.seq_id, Stage.PREFILL, first), *given]


def chunks(pool: ReadyQueues, num_tokens: int | None, most: int) -> list[StageItem]:
    """Return the prompt tokens to read, without the pending ones: those need a round."""
    waiting = {work.seq_id: work.num_tokens for work in pool.prefill}
    given = shares(pool, num_tokens, most)
    counts = [min(work.num_tokens, waiting[work.seq_id] - 1) for work in given]
    return [
        StageItem(work.seq_id, Stage.PREFILL, count)
        for work, count in zip(given, counts, strict=True)
        if count > 0
    ]


def lane_job(lane: str, pool: ReadyQueues, sizes: LaneSizes) -> Job | None:
    """Return the next job of a lane that only reads prompts, or only verifies existing drafts."""
    if lane == PREFILL:
        return job_of(chunks(pool, sizes.chunk, sizes.prefill))
    return job_of(pool.verify[: sizes.verify])


class SingleLane:
    """A schedule of one lane, in which a job drafts and verifies (single). A target pass reads at
    most `chunk` tokens of `prefill_batch` prompts, with rounds of `batch` sequences.

    Sequences that already decode always take part, so a long prompt cannot delay them for more than
    one chunk. First rounds and prompt chunks share the chunk: a prompt whose rest fits is read in
    the pass of its first round.
    """

    lanes = ("main",)

    def __init__(self, chunk: int | None, *, batch: int = 1024, prefill_batch: int = 1024) -> None:
        self._chunk, self._batch, self._prefill_batch = chunk, batch, prefill_batch

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None:
        del lane, num_live
        waiting = {work.seq_id: work.num_tokens for work in pool.prefill}
        decoding = list(pool.draft[: self._batch])
        reads: list[StageItem] = []
        for work in shares(pool, self._chunk, self._prefill_batch):
            is_rest = work.num_tokens == waiting[work.seq_id]
            if is_rest and len(decoding) < self._batch:
                decoding.append(work)
            else:  # without a round, the pending token is not read
                reads.append(StageItem(work.seq_id, Stage.PREFILL, work.num_tokens - is_rest))
        return job_of([*rounds(decoding), *reads])


def single_lane(config: EngineConfig) -> SingleLane:
    """Return the schedule with the sizes of a resolved configuration."""
    batch = config.most_batch
    return SingleLane(
        config.prefill_chunk,
        batch=config.decode_batch or batch,
        prefill_batch=config.prefill_batch or batch,
    )


# State machine of sequences (waiting for a stage, or running in a job), for engine and simulator.
#
# A sequence waits for PREFILL while it has unread tokens besides the pending one; then it
# alternates between DRAFT and VERIFY. One job may do both, and a job with the VERIFY of a sequence
# that waits for PREFILL reads all of the rest. PREFILL is served in the order of arrival, however
# many chunks were read; the other stages are served first come, first served. While a VERIFY of a
# sequence runs, an AHEAD of it may run on another lane; it does not change the sequence's state.
_STAGES = (Stage.PREFILL, Stage.DRAFT, Stage.VERIFY)


class Ledger:
    """The states of an engine's sequences. With `drafts_ahead` those in VERIFY may have AHEAD."""

    def __init__(self, *, drafts_ahead: bool = False) -> None:
        self._drafts_ahead = drafts_ahead
        self._num_added = 0
        self._arrival: dict[int, int] = {}
        self._unread: dict[int, int] = {}
        self._waiting: dict[Stage, list[int]] = {stage: [] for stage in _STAGES}
        self._running: dict[int, Stage] = {}
        self._ahead: list[int] = []
        self._drafted_ahead: set[int] = set()

    @property
    def num_live(self) -> int:
        return len(self._unread)

    def num_unread(self, seq_id: int) -> int:
        """Return a sequence's tokens that are not in memory, the pending one included."""
        return self._unread[seq_id]

    def add(self, seq_id: int, num_unread: int) -> None:
        """Add a sequence with `num_unread` tokens (at least one) to feed."""
        if num_unread < 1:
            raise ContractError("its pending token is unread at least")
        if seq_id in self._unread:
            raise ContractError("the sequence is there already")
        self._unread[seq_id] = num_unread
        self._arrival[seq_id] = self._num_added
        self._num_added += 1
        self._await_next(seq_id)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence: finished early, cancelled, failed or pre-empted."""
        self._unread.pop(seq_id, None)
        self._arrival.pop(seq_id, None)
        self._running.pop(seq_id, None)
        for waiting in (*self._waiting.values(), self._ahead):
            if seq_id in waiting:
                waiting.remove(seq_id)

    def is_running(self, seq_id: int) -> bool:
        """Return whether a job of the sequence has started and not ended, AHEAD included."""
        return seq_id in self._running or seq_id in self._drafted_ahead

    def pool(self, num_free_tokens: int, *, patient: bool = True) -> ReadyQueues:
        return ReadyQueues(
            self._works(Stage.PREFILL),
            self._works(Stage.DRAFT),
            self._works(Stage.VERIFY),
            num_free_tokens,
            tuple([StageItem(seq_id, Stage.AHEAD, 0) for seq_id in self._ahead]),
            self._seq_ids_in(Stage.DRAFT),
            self._seq_ids_in(Stage.VERIFY),
            patient,
            num_ahead=len(self._drafted_ahead),
        )

    def _works(self, stage: Stage) -> tuple[StageItem, ...]:
        unread = self._unread
        return tuple([StageItem(seq_id, stage, unread[seq_id]) for seq_id in self._waiting[stage]])

    def _seq_ids_in(self, stage: Stage) -> tuple[int, ...]:
        """Return the sequences that are in a job of `stage` now."""
        return tuple([seq_id for seq_id, own in self._running.items() if own is stage])

    def start(self, job: Job) -> None:
        for seq_id, stages in _stages_of(job).items():
            if stages == [Stage.AHEAD]:
                self._ahead.remove(seq_id)
                self._drafted_ahead.add(seq_id)
                continue
            stage = self._stage_awaited(seq_id)
            # Recorded first: `undo` then finds it, wherever an interrupt comes.
            self._running[seq_id] = stage
            self._waiting[stage].remove(seq_id)
            if self._drafts_ahead and stages == [Stage.VERIFY]:
                self._ahead.append(seq_id)

    def undo(self, job: Job) -> None:
        """Put the sequences of a failed job back to the front of their queues."""
        for seq_id, stages in reversed(_stages_of(job).items()):
            if stages == [Stage.AHEAD]:
                self._drafted_ahead.discard(seq_id)
                continue
            self._withdraw(seq_id)
            stage = self._running.pop(seq_id, None)
            # An interrupt may have come before the job was started, or while it was being started.
            if stage is not None and seq_id not in self._waiting[stage]:
                self._await(seq_id, stage, index=0)

    def finish(self, job: Job, finished: Callable[[int], bool]) -> None:
        """Move each sequence of `job` to its next stage; `finished` is for those verified."""
        last = {work.seq_id: work for work in job.works}
        for seq_id, work in last.items():
            if work.stage is Stage.AHEAD:
                self._drafted_ahead.discard(seq_id)
                continue
            del self._running[seq_id]
            match work.stage:
                case Stage.PREFILL:
                    self._unread[seq_id] -= work.num_tokens
                    self._await_next(seq_id)
                case Stage.DRAFT:
                    self._await(seq_id, Stage.VERIFY)
                case Stage.VERIFY:
                    self._withdraw(seq_id)
                    self._unread[seq_id] = 1
                    if finished(seq_id):
                        del self._unread[seq_id], self._arrival[seq_id]
                    else:
                        self._await_next(seq_id)

    def _stage_awaited(self, seq_id: int) -> Stage:
        return next(stage for stage in _STAGES if seq_id in self._waiting[stage])

    def _withdraw(self, seq_id: int) -> None:
        """Withdraw the offer for AHEAD: the sequence's verdict is no longer open."""
        if seq_id in self._ahead:
            self._ahead.remove(seq_id)

    def _await_next(self, seq_id: int) -> None:
        self._await(seq_id, Stage.PREFILL if self._unread[seq_id] > 1 else Stage.DRAFT)

    def _await(self, seq_id: int, stage: Stage, index: int | None = None) -> None:
        waiting = self._waiting[stage]
        if stage is Stage.PREFILL:
            insort(waiting, seq_id, key=self._arrival.__getitem__)
        else:
            waiting.insert(len(waiting) if index is None else index, seq_id)


def _stages_of(job: Job) -> dict[int, list[Stage]]:
    stages: dict[int, list[Stage]] = {}
    for work in job.works:
        stages.setdefault(work.seq_id, []).append(work.stage)
    return stages
