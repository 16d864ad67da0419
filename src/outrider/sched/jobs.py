"""Stages, jobs, the pool of ready sequences, and the `Schedule` protocol. No tensors, no clocks.

`num_admissible` says which waiting requests may start: first come, first served, as memory and
batch allow. The functions at the end choose works from a pool in the ways that schedules share.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from typing import Protocol, runtime_checkable

from outrider.core.budget import JobTrace


class Stage(IntEnum):
    """What can be done to a sequence; PREFILL and VERIFY share one target pass in a job.

    AHEAD drafts for the likely verdicts of a sequence while another lane verifies it.
    """

    PREFILL = auto()
    DRAFT = auto()
    VERIFY = auto()
    AHEAD = auto()


class JobKind(Enum):
    """Which parts of the engine a job takes."""

    DRAFT = auto()
    """The drafter alone, for drafts that a later job verifies."""
    AHEAD = auto()
    """The drafter alone, for verdicts that are still open."""
    VERIFY = auto()
    """A target pass that does nothing but verify drafts which are there."""
    PREFILL = auto()
    """A target pass that reads prompts, and may verify such drafts."""
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


@dataclass(frozen=True, slots=True)
class StageItem:
    """One stage of one sequence. `num_tokens` are those fed besides a draft."""

    seq_id: int
    stage: Stage
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """What a lane runs in one go: drafts first, then one target pass over all the rest. `stages`
    are those that it has works of, in the order in which they run."""

    works: tuple[StageItem, ...]
    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)
    kind: JobKind = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Both are asked for several times a round: they are found once.
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
        """The part of it that is about one sequence."""
        return Job(tuple(work for work in self.works if work.seq_id == seq_id))


@dataclass(frozen=True, slots=True)
class ReadyQueues:
    """Sequences by the stage they wait for, oldest first; those inside a job are absent.

    Each entry names the tokens the sequence has that the target's memory does not: 1 (the pending
    token) while decoding, the unread prompt before. Who waits in `prefill` may be given chunks of
    the prompt, or a first round that also reads all of the rest. `ahead` lists those whose drafts
    are being verified in another lane now, for which nothing was drafted ahead yet.
    `num_free_tokens` is the arena's room. `drafting` and `verifying` are in such a job now, and for
    `num_ahead` something is drafted ahead: one job at a time uses the drafter. A lane may wait for
    them as long as the pool is `patient`; it is not where nothing else would run. A job may read
    `most_prompt_tokens` (pace.py), None if only the schedule bounds that.
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

    def chunk(self, size: int) -> int:
        """How many prompt tokens a job may read, where a schedule would read `size`."""
        return size if self.most_prompt_tokens is None else min(size, self.most_prompt_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.prefill or self.draft or self.verify or self.ahead)

    def without(self, seq_ids: Collection[int]) -> ReadyQueues:
        """The same, but nothing of these sequences may start."""
        prefill, draft, verify, ahead = (
            tuple(work for work in works if work.seq_id not in seq_ids)
            for works in (self.prefill, self.draft, self.verify, self.ahead)
        )
        return replace(self, prefill=prefill, draft=draft, verify=verify, ahead=ahead)


class Schedule(Protocol):
    """Which job each idle lane takes next. All state that jobs change is in the pool; what a
    schedule knows besides is what jobs took, if it is a JobObserver."""

    @property
    def lanes(self) -> tuple[str, ...]:
        """In the order in which idle ones are asked."""
        ...

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None: ...


class LaneOrder(Protocol):
    """In which order idle lanes are asked for their next job (plugins/lanes/lane_order.py)."""

    def arrange(self, lanes: tuple[str, ...], pool: ReadyQueues) -> tuple[str, ...]: ...


@runtime_checkable
class JobObserver(Protocol):
    """A schedule or an order of lanes that learns from what jobs took."""

    def observe(self, trace: JobTrace) -> None:
        """A job of some lane ended."""
        ...


def job_observers(*candidates: object) -> tuple[JobObserver, ...]:
    """Those of `candidates` that learn from jobs."""
    return tuple([one for one in candidates if isinstance(one, JobObserver)])


# What a text is expected to grow by where nobody limits it: a long answer of a chat.
OPEN_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be in flight at once: `num_sequences` of them, in `num_tokens` of the arena.

    A round may stage `spare` tokens beside those that a sequence has, and `beyond` past what it may
    finally keep, if that is less. A sequence counts for what it has and for the share `reserve` of
    what it may still emit, in whole pages. With a share of 1 none is ever stopped half-way for want
    of pages; with less more run at once, and some may have to be pre-empted. `max_waiting` requests
    may wait. No sequence ever holds more than `held` tokens, if that is not 0: pages before are
    given back. One that nobody gave a limit counts for `OPEN_TOKENS` more than it has: it writes
    until the model ends its text, long before the window's end.
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
        """Arena tokens that a sequence with so many, which may emit `num_left` more, counts for;
        `is_open` if nobody gave it a limit."""
        ahead = min(num_left, OPEN_TOKENS) if is_open else num_left
        tokens = num_tokens + math.ceil(ahead * self.reserve) + self.spare
        return min(self.most(num_tokens + num_left), self._whole_pages(tokens))

    def most(self, num_tokens: int) -> int:
        """Arena tokens, in whole pages, that a sequence which may keep `num_tokens` ever holds."""
        most = self._whole_pages(num_tokens + self.past_end)
        return min(most, self._whole_pages(self.held)) if self.held else most

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the arena holds when it is alone."""
        frees_pages = 0 < self._whole_pages(self.held) <= self.num_tokens
        return sys.maxsize if frees_pages else self.num_tokens - self.past_end

    @property
    def past_end(self) -> int:
        """Tokens that a round may stage past the last that is kept."""
        return self.spare if self.beyond is None else min(self.spare, self.beyond)

    def _whole_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size


def num_admissible(waiting: Sequence[int], running: Sequence[int], limits: Limits) -> int:
    """How many of `waiting`, in order, fit beside `running`: arena tokens that each counts for."""
    room = limits.num_tokens - sum(running)
    places = limits.num_sequences - len(running)
    count = 0
    for need in waiting[: max(places, 0)]:
        room -= need
        if room < 0:
            break
        count += 1
    return count


# The names of lanes that schedules have in common.
PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """Most prompt tokens in a pass, and most sequences in a job of each lane."""

    chunk: int
    prefill: int = 1024
    decode: int = 1024
    verify: int = 1024


def job_of(works: Sequence[StageItem]) -> Job | None:
    return Job(tuple(works)) if works else None


def rounds(works: Sequence[StageItem]) -> list[StageItem]:
    """Draft and verify of each of `works`, in one job."""
    found: list[StageItem] = []
    for work in works:
        found.append(StageItem(work.seq_id, Stage.DRAFT, work.num_tokens))
        found.append(StageItem(work.seq_id, Stage.VERIFY, work.num_tokens))
    return found


def shares(pool: ReadyQueues, room: int, most: int) -> list[StageItem]:
    """Unread tokens, pending ones included, of at most `most` sequences that wait for PREFILL, for
    a pass that has room for `room` tokens.

    The oldest gets half of the room, or all that it needs if that is less, so that it comes to its
    end; the rest goes to those that need least, which so do not wait for long prompts. What nobody
    else needs is the oldest's again.
    """
    if not pool.prefill:
        return []
    room = pool.chunk(room)
    oldest, *others = pool.prefill
    first = min(oldest.num_tokens, max(room // 2, 1))
    given: list[StageItem] = []
    left = room - first
    for work in sorted(others, key=lambda work: work.num_tokens)[: most - 1]:
        count = min(work.num_tokens, left)
        if count > 0:
            given.append(StageItem(work.seq_id, Stage.PREFILL, count))
        left -= count
    first = min(oldest.num_tokens, first + left)
    return [StageItem(oldest.seq_id, Stage.PREFILL, first), *given]


def chunks(pool: ReadyQueues, room: int, most: int) -> list[StageItem]:
    """Prompt tokens to read, without pending ones: those need a round."""
    waiting = {work.seq_id: work.num_tokens for work in pool.prefill}
    given = shares(pool, room, most)
    counts = [min(work.num_tokens, waiting[work.seq_id] - 1) for work in given]
    return [
        StageItem(work.seq_id, Stage.PREFILL, count)
        for work, count in zip(given, counts, strict=True)
        if count > 0
    ]


def beside(lane: str, pool: ReadyQueues, sizes: LaneSizes) -> Job | None:
    """What a lane takes that only reads prompts, or only verifies drafts that are there."""
    if lane == PREFILL:
        return job_of(chunks(pool, sizes.chunk, sizes.prefill))
    return job_of(pool.verify[: sizes.verify])
