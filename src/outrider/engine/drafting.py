"""The engine's side of a drafter: who is open, what may be drafted ahead, and whether it hangs.

A drafter that fails to open a sequence, or hangs, costs drafts and nothing else. One that hangs is
never called again: the thread that it hangs in still owns it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.core.clock import HOST_CLOCK, Clock, patience
from outrider.core.errors import foreign, words_of
from outrider.core.interrupts import breakable, is_interrupt
from outrider.core.protocols import AheadRow, Drafter, Remembering
from outrider.core.sequence import LiveSequence
from outrider.drafters.process.client import ProcessDrafter
from outrider.engine.guard import name_of

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Drafting:
    """`ahead` says that the drafter drafts ahead; `timeout` is how many seconds it may take. That
    is no limit where it drafts in the target's memory, which it could still write when given up."""

    drafter: Drafter
    ahead: bool = False
    timeout: float = 10.0
    clock: Clock = HOST_CLOCK
    hung: str = ""
    _opened: set[int] = field(default_factory=set[int])
    _late: set[int] = field(default_factory=set[int])
    _window: float = 0.0
    _rounds: dict[int, AheadRow] = field(default_factory=dict[int, AheadRow])

    def open(self, seq: LiveSequence) -> None:
        if self.hung:
            seq.no_drafts = self.hung
        if seq.no_drafts:
            return
        if seq.seq_id in self._opened:
            # It was to be closed once nothing is drafted ahead for it any more.
            self._late.discard(seq.seq_id)
            return
        try:
            with breakable():
                self.drafter.open(seq.seq_id, seq.tokens)
        except BaseException as error:
            if is_interrupt(error):
                raise
            name, words = name_of(self.drafter), words_of(error)
            seq.no_drafts = f"drafter {name!r} did not start: {words}"
            _log.warning("Speculation is off for a request: %s", seq.no_drafts, exc_info=True)
        else:
            self._opened.add(seq.seq_id)

    def close(self, seq_id: int, *, in_use: bool) -> None:
        """Now, or as soon as nothing is drafted ahead for it any more."""
        self._rounds.pop(seq_id, None)
        if seq_id not in self._opened:
            return
        if in_use:
            self._late.add(seq_id)
            return
        self._opened.discard(seq_id)
        self._late.discard(seq_id)
        if self.hung:
            return
        try:
            self.drafter.close(seq_id)
        except BaseException as error:
            if is_interrupt(error):
                raise
            _log.warning("A drafter failed to close a sequence.", exc_info=True)

    def forget(self) -> None:
        """What the drafter learnt from requests. None may be open."""
        if isinstance(self.drafter, Remembering) and not self.hung:
            with foreign():
                self.drafter.forget()

    def released(self, seq_ids: Iterable[int]) -> None:
        """Nothing is drafted ahead for these any more."""
        for seq_id in self._late.intersection(seq_ids):
            self.close(seq_id, in_use=False)

    def begin(self, batch: Sequence[LiveSequence]) -> None:
        """The drafts of `batch` are now verified, so what follows them may be drafted ahead."""
        if not self.ahead:
            return
        for seq in batch:
            self._rounds.pop(seq.seq_id, None)
            if seq.budget.depth > 0 and seq.shaper is None and not seq.no_drafts:
                self._rounds[seq.seq_id] = ahead_row(seq, self._window)

    def verified(self, seconds: float) -> None:
        """A verification beside which drafts may be made took so long."""
        self._window = seconds if not self._window else 0.75 * self._window + 0.25 * seconds

    def rounds(self, seq_ids: Sequence[int]) -> list[AheadRow]:
        return [self._rounds[seq_id] for seq_id in seq_ids if seq_id in self._rounds]

    def allowance(self, num_new: int) -> float:
        """Seconds for a draft before which `num_new` tokens of text are read."""
        return patience(self.timeout, num_new)

    def overdue(self, deadlines: Mapping[str, float]) -> list[str]:
        """Which of the lanes that draft are past their time."""
        now = self.clock()
        return [lane for lane, deadline in deadlines.items() if now > deadline]

    def patience(self, deadlines: Mapping[str, float]) -> float | None:
        """Seconds until one of them is; None where nothing is drafted, or none ever is."""
        soonest = min(deadlines.values(), default=math.inf)
        return None if soonest == math.inf else max(soonest - self.clock(), 0.0) + 0.001

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should hear of the drafter."""
        return self.drafter.notes if isinstance(self.drafter, ProcessDrafter) else ()

    def shut_down(self) -> None:
        """End the drafter's process, if it lives in one."""
        if isinstance(self.drafter, ProcessDrafter):
            self.drafter.shut_down()

    def give_up(self) -> None:
        self.hung = f"drafter {self.drafter.name!r} gave no answer for {self.timeout:g} seconds."
        _log.error("Speculation is off: %s", self.hung)


def ahead_row(seq: LiveSequence, window: float = 0.0) -> AheadRow:
    """What a drafter needs to draft what follows the draft of `seq`, in `window` seconds if that is
    known."""
    start = len(seq.tokens)
    return AheadRow(
        seq_id=seq.seq_id,
        start=start,
        pending=seq.tokens[-1],
        draft=seq.draft,
        budget=seq.budget,
        params=seq.params,
        noise_after=lambda count: seq.noise_at(start + count),
        window=window,
    )
