"""The portfolio's draft model: how deep it would pay to ask it, from measured cost and acceptance.

A model's draft must be foretold before it is paid for: acceptance from its earlier drafts
(estimate/acceptance.py), time from its last ones (`DraftCostMeter`). A model that was not asked for
long is asked for some short drafts, since texts change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.core.budget import Budget
from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.draft import Draft
from outrider.core.errors import CapacityError
from outrider.core.protocols import Drafter, DraftRow
from outrider.estimate.acceptance import Acceptance
from outrider.estimate.online import RunningMedian
from outrider.estimate.theory import prefix_products
from outrider.estimate.worth import ASSUMED_DRAFT, ROW_COST

_WINDOW = 31
# Before so many measurements, what is assumed of any drafter stands.
_SETTLED = 5


@dataclass(slots=True)
class DraftCostMeter:
    """`_drafting` is what a token of the draft took that is being verified, 0 if the model did not
    draft or had to catch up; `_slowed` is how much longer its rows make the pass.

    From one answer to the next question the target verifies, so the time between them is that of a
    pass, and now and then of a rest besides. A draft is compared with the very pass that verified
    it, because a machine's speed drifts. The median leaves rests and slowed rounds out.
    """

    clock: Clock = HOST_CLOCK
    _shares: RunningMedian = field(default_factory=lambda: RunningMedian(_WINDOW))
    _ended: float = 0.0
    _drafting: float = 0.0
    _slowed: float = 1.0
    _share: float = ASSUMED_DRAFT

    def asked(self) -> None:
        """A round begins."""
        if not self._drafting:
            return
        passing = (self.clock() - self._ended) / self._slowed
        if passing > 0:
            self._shares.add(self._drafting / passing)
            if len(self._shares) >= _SETTLED:
                self._share = self._shares.low
        self._drafting = 0.0

    def drafted(self, seconds: float, num_passes: int) -> None:
        """The model drafted in `seconds`, with so many passes of its own."""
        self._drafting = seconds / num_passes

    def answered(self, num_rows: int) -> None:
        """Drafts of `num_rows` tokens in all were handed over."""
        self._ended, self._slowed = self.clock(), 1 + ROW_COST * num_rows

    @property
    def share(self) -> float:
        """The time of one of the model's passes as a share of the target's."""
        return self._share


_log = logging.getLogger(__name__)

# Places that are told apart; those behind them are kept as the last one is.
_NUM_PLACES = 8
# Rounds of a request, or of all, without the model before a short look at it; how many rounds that
# takes, since in the first one it must catch up and is not timed; and how deep it drafts.
LOOK_AFTER = 128
LOOK_AFTER_ALL = 256
LOOK_ROUNDS = 3
LOOK_DEPTH = 2
# What it would bring is worked out anew in so many rounds without it: it hardly changes in between.
_BID_EVERY = 8


def goodput(
    num_expected: float, num_rows: int, share: float = 0.0, price: float | None = None
) -> float:
    """Tokens a pass's time: `num_expected` draft tokens and the target's own, for `num_rows` of
    drafts that took `share` of a pass to make. A row costs `price` of a pass, if that was
    measured."""
    cost = ROW_COST if price is None else price
    return (1 + num_expected) / (1 + cost * num_rows + share)


@dataclass(frozen=True, slots=True)
class Bid:
    """What a draft of `depth` tokens by the model is expected to bring."""

    depth: int
    goodput: float


@dataclass(slots=True)
class _RequestBids:
    """`num_idle` rounds went by without it since its last draft, and `num_looks` more of a look are
    due. `bid` is the last one, for a draft of at most `limit` tokens."""

    num_idle: int = 0
    num_looks: int = 0
    broken: bool = False
    bid: Bid | None = None
    limit: int = 0

    @property
    def is_fresh(self) -> bool:
        """Whether the last bid still stands, if the limit does."""
        idle = self.num_idle
        return idle > 1 and idle % _BID_EVERY > 0


@dataclass(slots=True)
class ModelMember:
    """Asks `drafter`, which may be any that is not free; without `branches` for chains alone."""

    drafter: Drafter
    branches: bool = field(default=True, kw_only=True)
    pace: DraftCostMeter = field(default_factory=DraftCostMeter)
    _acceptance: Acceptance = field(default_factory=lambda: Acceptance(_NUM_PLACES))
    _requests: dict[int, _RequestBids] = field(default_factory=dict[int, _RequestBids])
    # Of all requests, since it last drafted for one.
    _num_idle: int = 0

    @property
    def _is_up_to_date(self) -> bool:
        """Whether it has read every text, since the target has."""
        return self.drafter.needs.shares_memory

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        try:
            self.drafter.open(seq_id, prompt)
        except Exception:  # noqa: BLE001 - a drafter may be anybody's code
            _log.warning("%s did not start; lookups draft alone.", self.drafter.name, exc_info=True)
        else:
            self._requests[seq_id] = _RequestBids()

    def close(self, seq_id: int) -> None:
        if self._requests.pop(seq_id, None) is not None:
            self.drafter.close(seq_id)

    def hear(self, row: DraftRow) -> None:
        """What became of its last draft."""
        request = self._requests.get(row.seq_id)
        if request is None:
            return
        last = row.last
        if last is None or last.draft.by != self.drafter.name:
            self._acceptance.observe(row.seq_id, 0, 0)
            request.num_idle += 1
            self._num_idle += 1
            return
        self._acceptance.observe(row.seq_id, last.draft.max_depth, last.num_accepted)
        request.num_idle = self._num_idle = 0

    def bid(self, row: DraftRow) -> Bid | None:
        """The depth that brings most; None if it cannot be asked."""
        request, depth = self._requests.get(row.seq_id), row.budget.depth
        if request is None or request.broken or not depth:
            return None
        if request.num_idle >= LOOK_AFTER or self._num_idle >= LOOK_AFTER_ALL:
            request.num_looks, self._num_idle = LOOK_ROUNDS, 0
        if request.num_looks:
            return Bid(min(LOOK_DEPTH, depth), float("inf"))
        if request.bid is None or request.limit != depth or not request.is_fresh:
            bid = self._bid(row.seq_id, request, depth, row.budget.price)
            request.bid, request.limit = bid, depth
        return request.bid

    def draft(self, asked: Sequence[tuple[DraftRow, int]]) -> list[Draft]:
        """Drafts of these depths. A request that it fails for gets none, now and later; one that
        there is no memory for, none now."""
        if not asked:
            return []
        rows = [replace(row, budget=self._cut(row.budget, depth)) for row, depth in asked]
        for row in rows:
            request = self._requests[row.seq_id]
            request.num_looks = max(request.num_looks - 1, 0)
        # A model that must first read what it missed says nothing of what its drafts take.
        on_time = self._is_up_to_date or not any(
            self._requests[row.seq_id].num_idle for row in rows
        )
        started = self.pace.clock()
        drafts = self._proposed(rows)
        if on_time and any(drafts):
            self.pace.drafted(self.pace.clock() - started, max(depth for _, depth in asked))
        return [replace(draft, by=self.drafter.name) for draft in drafts]

    def _cut(self, budget: Budget, depth: int) -> Budget:
        cut = budget.cut(depth)
        return cut if self.branches else replace(cut, num_nodes=0)

    def _bid(self, seq_id: int, request: _RequestBids, depth: int, price: float | None) -> Bid:
        rates = self._acceptance.rates(seq_id)
        rates += rates[-1:] * (depth - len(rates))
        # After rounds without it, it must first read what it missed.
        late = request.num_idle > 0 and not self._is_up_to_date
        best, num_expected = Bid(0, 0.0), 0.0
        for place, kept in enumerate(prefix_products(rates[:depth]), start=1):
            num_expected += kept
            found = goodput(num_expected, place, self.pace.share * (place + late), price)
            if found > best.goodput:
                best = Bid(place, found)
        return best

    def _proposed(self, rows: Sequence[DraftRow]) -> list[Draft]:
        try:
            return self.drafter.propose(rows)
        except Exception as error:  # noqa: BLE001 - a drafter may be anybody's code
            if len(rows) > 1:
                return [draft for row in rows for draft in self._proposed([row])]
            if not isinstance(error, CapacityError):
                self._requests[rows[0].seq_id].broken = True
                _log.warning("%s failed; lookups draft alone.", self.drafter.name, exc_info=True)
            return [Draft.empty()]
