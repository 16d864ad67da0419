"""The seam for whole rounds: draft, one target pass, accept, commit.

`Stages` is the reference implementation. A faster one (a native call, a captured graph) takes the
same batch and must return the same outcomes; it says in a sentence when it cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.core.draft import Outcome
from outrider.core.sequence import LiveSequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` unread prompt tokens of a sequence."""

    seq: LiveSequence
    num_tokens: int


class Round(Protocol):
    """Runs a round of `batch`, with prompt `chunks` of other sequences in the same target pass.

    Outcomes are clamped, committed and appended to their sequences' tokens. `num_waiting` is how
    many requests were not yet admitted; traces tell controllers.
    """

    def run(
        self, batch: Sequence[LiveSequence], chunks: Sequence[Chunk], *, num_waiting: int = 0
    ) -> list[Outcome]: ...

    def verify(
        self, batch: Sequence[LiveSequence], chunks: Sequence[Chunk], *, num_waiting: int = 0
    ) -> list[Outcome]:
        """The same, with the drafts that the sequences already have."""
        ...
