"""A `fixed` draft length; the watchdog, which turns drafting off where hardly a draft is accepted,
and retries; and the guard of a caller's own controller."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from outrider.core.draft import Budget, Choice, RoundTrace
from outrider.core.errors import ConfigError, foreign, words_of
from outrider.core.protocols import Controller
from outrider.estimate.acceptance import BySequence
from outrider.estimate.cost import ROW_COST

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FixedController:
    """A constant budget; observations are ignored."""

    budget: Budget

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        return [self.budget] * len(seq_ids)

    def observe(self, trace: RoundTrace) -> None:
        del trace


# Watchdog: when drafting is dead.
#
# A draft of n tokens adds n rows to a pass, and a row costs at least `ROW_COST` of a plain pass.
# So a draft must bring 0.04 n tokens on average. Over m rounds that drafted, with a the accepted
# tokens of each, drafting is dead when
#
#     (sum of a + 1) / m + 2.33 s / sqrt(m)  <  0.04 (sum of n) / m         m >= 24 rounds
#
# The left side is an upper confidence bound of the mean of a; s is the deviation of a, not below
# that of a single token in m rounds. Drafts are then left out for 64 rounds, tried for 6, and
# left out twice as long after each failed trial, up to 1024. Counts fade. Only counts of the
# request itself decide, so its text depends neither on time nor on other requests.
LEAST_ROUNDS = 24
CONFIDENCE = 2.33
FIRST_REST = 64
LONGEST_REST = 1024
PROBE_ROUNDS = 6
# Weight of the old counts after a new round.
FADE = 1 - 1 / 128
# Drafting is turned off for all requests together on stronger evidence than for one.
SHARED_ROUNDS = 256

_REST = Choice("rest")


@dataclass(slots=True)
class _FadedCounts:
    """Faded sums over rounds that drafted: rounds, tokens drafted, accepted, accepted squared.
    `num_rounds` does not fade."""

    num_rounds: int = 0
    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    squares: float = 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.num_rounds += 1
        self.rounds = FADE * self.rounds + 1
        self.drafted = FADE * self.drafted + num_drafted
        self.accepted = FADE * self.accepted + num_accepted
        self.squares = FADE * self.squares + num_accepted**2

    @property
    def mean(self) -> float:
        return self.accepted / self.rounds

    @property
    def needed(self) -> float:
        """Tokens per round that would pay for the rows."""
        return ROW_COST * self.drafted / self.rounds

    @property
    def highest(self) -> float:
        """The upper confidence bound of the mean."""
        rounds, mean = self.rounds, self.mean
        variance = max(self.squares / rounds - mean**2, 1 / rounds)
        return (self.accepted + 1) / rounds + CONFIDENCE * math.sqrt(variance / rounds)


@dataclass(slots=True)
class _Watch:
    """State of one request, or of all. `left` rounds of rest or of a probe remain; with `reason` it
    rests or probes."""

    least_rounds: int = LEAST_ROUNDS
    counts: _FadedCounts = field(default_factory=_FadedCounts)
    reason: str = ""
    probing: bool = False
    left: int = 0
    rest: int = FIRST_REST

    @property
    def resting(self) -> bool:
        return bool(self.reason) and not self.probing

    def observe(self, drafter: str, num_drafted: int, num_accepted: int) -> bool:
        """Count a round. True if drafting is turned off by it."""
        if self.resting:
            self.left -= 1
            if self.left <= 0:
                self.probing, self.left, self.counts = True, PROBE_ROUNDS, _FadedCounts()
            return False
        if not num_drafted:
            return False
        self.counts.add(num_drafted, num_accepted)
        if self.probing:
            self._end_probe()
            return False
        counts = self.counts
        if counts.num_rounds < self.least_rounds or counts.highest >= counts.needed:
            return False
        self.reason = (
            f"the last drafts of {drafter!r} gained {counts.mean:.2f} tokens a round, where "
            f"{counts.needed:.2f} would pay for their rows; they are tried again from time to time"
        )
        self.left = self.rest
        return True

    def _end_probe(self) -> None:
        self.left -= 1
        if self.left > 0:
            return
        self.probing = False
        if self.counts.mean >= self.counts.needed:
            self.reason, self.rest, self.counts = "", FIRST_REST, _FadedCounts()
        else:
            self.rest = min(2 * self.rest, LONGEST_REST)
            self.left = self.rest


@dataclass(slots=True)
class Watchdog:
    """A Controller that follows `inner`, except for requests whose drafts do not pay. A pure
    function of the traces.

    With `shared` all requests are also judged together, and new requests begin with the common
    verdict. This spares short requests too, but makes a request's drafts depend on others.
    """

    inner: Controller
    shared: bool = False
    _all: _Watch = field(default_factory=partial(_Watch, SHARED_ROUNDS))
    _watches: BySequence[_Watch] = field(default_factory=BySequence[_Watch])

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        given = self.inner.budgets(seq_ids)
        reasons = [self._resting(seq_id) for seq_id in seq_ids]
        pairs = zip(given, reasons, strict=True)
        return [
            replace(budget, depth=0, why=why, choice=_REST) if why else budget
            for budget, why in pairs
        ]

    def observe(self, trace: RoundTrace) -> None:
        self.inner.observe(trace)
        if not trace.num_emitted:
            return
        seen = trace.num_drafted, trace.num_accepted
        # A request that never drafted has nothing to watch.
        is_watched = trace.num_drafted > 0 or trace.seq_id in self._watches
        watch = self._watch(trace.seq_id) if is_watched else None
        if watch is not None and watch.observe(trace.drafter, *seen):
            _log.warning("Drafting rests for request %d: %s.", trace.seq_id, watch.reason)
        if self.shared and self._all.observe(trace.drafter, *seen):
            _log.warning("Drafting rests for all requests: %s.", self._all.reason)

    def _resting(self, seq_id: int) -> str:
        watch = self._watches.get(seq_id)
        if watch is not None and watch.resting:
            return watch.reason
        return self._all.reason if self._all.resting else ""

    def _watch(self, seq_id: int) -> _Watch:
        return self._watches.note(seq_id, self._watches.get(seq_id) or _Watch())


@dataclass(slots=True)
class GuardedController:
    """A wrapper of a caller's own controller, which is not trusted: once it raises, or returns
    anything but budgets of at most `most`, drafting is off, and every request has the reason."""

    controller: Controller
    most: Budget
    _fault: str = ""

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        if not self._fault:
            try:
                with foreign():
                    return self._checked(self.controller.budgets(seq_ids), len(seq_ids))
            except Exception as error:  # noqa: BLE001 - a controller may be third-party code
                self._turn_off(error)
        return [Budget(0, why=self._fault, choice=_REST)] * len(seq_ids)

    def observe(self, trace: RoundTrace) -> None:
        if self._fault:
            return
        try:
            with foreign():
                self.controller.observe(trace)
        except Exception as error:  # noqa: BLE001 - a controller may be third-party code
            self._turn_off(error)

    def _checked(self, given: object, count: int) -> list[Budget]:
        budgets = list(cast("Sequence[object]", given))
        if len(budgets) != count or not all(isinstance(budget, Budget) for budget in budgets):
            raise ConfigError(f"it gave {type(given).__name__} where {count} budgets were due")
        found = cast("list[Budget]", budgets)
        if any(b.depth > self.most.depth or b.num_nodes > self.most.size for b in found):
            raise ConfigError(f"it gave a budget above {self.most.depth} tokens deep")
        if not all(b.price is None or 0 <= b.price < math.inf for b in found):
            raise ConfigError("it gave a price that is no finite number from 0 up")
        return found

    def _turn_off(self, error: Exception) -> None:
        self._fault = f"the controller failed: {words_of(error)}"
        _log.warning("Speculation is off: %s", self._fault, exc_info=error)
