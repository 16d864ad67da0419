"""What a schedule sees and what it may ask for. No tensors, no clocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


class Stage(Enum):
    """What can be done to a sequence; PREFILL and VERIFY share one target pass in a job."""

    PREFILL = auto()
    DRAFT = auto()
    VERIFY = auto()


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
        return tuple(work for work in self.works if work.stage is stage)


@dataclass(frozen=True, slots=True)
class Pool:
    """Sequences by the stage they wait for, oldest first; those inside a job are absent.

    Each entry names the tokens the sequence has that the target's memory does not: 1 (the pending
    token) while decoding, the unread prompt before. `num_free_tokens` is the arena's room.
    """

    prefill: tuple[Work, ...]
    draft: tuple[Work, ...]
    verify: tuple[Work, ...]
    num_free_tokens: int


class Schedule(Protocol):
    """Which job each idle lane takes next. Stateless: all state is in the pool."""

    @property
    def lanes(self) -> tuple[str, ...]: ...
    def next_job(self, lane: str, pool: Pool, num_live: int) -> Job | None: ...
