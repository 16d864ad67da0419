"""What a schedule sees and what it may ask for. No tensors, no clocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum, auto
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


_ORDER = (Stage.DRAFT, Stage.AHEAD, Stage.PREFILL, Stage.VERIFY)


@dataclass(frozen=True, slots=True)
class Work:
    """One stage of one sequence. `num_tokens` are those fed besides a draft."""

    seq_id: int
    stage: Stage
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """What a lane runs in one go: drafts first, then one target pass over all the rest."""

    works: tuple[Work, ...]

    def of(self, stage: Stage) -> tuple[Work, ...]:
        return tuple([work for work in self.works if work.stage is stage])

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Each sequence once, in the order of the works."""
        return tuple(dict.fromkeys([work.seq_id for work in self.works]))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that it has works of, in the order in which they run."""
        present = {work.stage for work in self.works}
        return tuple([stage for stage in _ORDER if stage in present])

    def alone(self, seq_id: int) -> Job:
        """The part of it that is about one sequence."""
        return Job(tuple(work for work in self.works if work.seq_id == seq_id))


@dataclass(frozen=True, slots=True)
class Pool:
    """Sequences by the stage they wait for, oldest first; those inside a job are absent.

    Each entry names the tokens the sequence has that the target's memory does not: 1 (the pending
    token) while decoding, the unread prompt before. Who waits in `prefill` may be given chunks of
    the prompt, or a first round that also reads all of the rest. `ahead` lists those whose drafts
    are being verified in another lane now, for which nothing was drafted ahead yet.
    `num_free_tokens` is the arena's room. `drafting` and `verifying` are in such a job now. A lane
    may wait for them as long as the pool is `patient`; it is not where nothing else would run.
    A job may read `most_prompt_tokens` (pace.py), None if only the schedule bounds that.
    """

    prefill: tuple[Work, ...]
    draft: tuple[Work, ...]
    verify: tuple[Work, ...]
    num_free_tokens: int
    ahead: tuple[Work, ...] = ()
    drafting: tuple[int, ...] = ()
    verifying: tuple[int, ...] = ()
    patient: bool = True
    most_prompt_tokens: int | None = None

    def chunk(self, size: int) -> int:
        """How many prompt tokens a job may read, where a schedule would read `size`."""
        return size if self.most_prompt_tokens is None else min(size, self.most_prompt_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.prefill or self.draft or self.verify or self.ahead)

    def without(self, seq_ids: Collection[int]) -> Pool:
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

    def next_job(self, lane: str, pool: Pool, num_live: int) -> Job | None: ...


class LaneOrder(Protocol):
    """In which order idle lanes are asked for their next job (sched/orders.py)."""

    def arrange(self, lanes: tuple[str, ...], pool: Pool) -> tuple[str, ...]: ...


@runtime_checkable
class JobObserver(Protocol):
    """A schedule or an order of lanes that learns from what jobs took."""

    def observe(self, trace: JobTrace) -> None:
        """A job of some lane ended."""
        ...
