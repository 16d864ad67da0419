"""The portfolio's draft model: the depth at which it pays, from measured cost and acceptance.

The value of a model's draft must be predicted before its cost is paid: acceptance from its earlier
drafts (estimate/acceptance.py), time from its last ones (`DraftCostMeter`). A model that has not
drafted for long makes some short drafts, since texts change.
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
from outrider.estimate.acceptance import Acceptance, RunningMedian
from outrider.estimate.cost import ASSUMED_DRAFT, ROW_COST
from outrider.estimate.theory import prefix_products

_WINDOW = 31
# Up to so many measurements, the assumed cost of a draft is used.
_SETTLED = 5


@dataclass(slots=True)
class DraftCostMeter:
    """A meter of drafting costs. `_drafting` is the seconds per token of the draft being verified,
    0 if the model did not draft or had to catch up; `_slowed` is how much its rows slow the pass.

    Between the end of drafting and the next round the target verifies, so the time between them is
    that of a pass, and now and then of a pause too. A draft is compared with the very pass that
    verified it, because a machine's speed drifts. The median leaves pauses and slowed rounds out.
    """

    clock: Clock = HOST_CLOCK
    _shares: RunningMedian = field(default_factory=lambda: RunningMedian(_WINDOW))
    _ended: float = 0.0
    _drafting: float = 0.0
    _slowed: float = 1.0
    _share: float = ASSUMED_DRAFT

    def begin_round(self) -> None:
        """Begin a round."""
        if not self._drafting:
            return
        passing = (self.clock() - self._ended) / self._slowed
        if passing > 0:
            self._shares.add(self._drafting / passing)
            if len(self._shares) >= _SETTLED:
                self._share = self._shares.low
        self._drafting = 0.0

    def drafted(self, seconds: float, num_passes: int) -> None:
        """Record that the model drafted in `seconds`, with so many passes of its own."""
        self._drafting = seconds / num_passes

    def end_drafting(self, num_rows: int) -> None:
        """Record that drafts of `num_rows` tokens in all were returned."""
        self._ended, self._slowed = self.clock(), 1 + ROW_COST * num_rows

    @property
    def share(self) -> float:
        """The time of one of the model's passes as a share of the target's."""
        return self._share


_log = logging.getLogger(__name__)

# Positions with rates of their own; later ones have the rate of the last.
_NUM_POSITIONS = 8
# Rounds of a request, or of all, without the model before it is probed; the number of rounds of a
# probe, since in the first one it must catch up and is not timed; and the depth of a probe.
LOOK_AFTER = 128
LOOK_AFTER_ALL = 256
LOOK_ROUNDS = 3
LOOK_DEPTH = 2
# Its expected value is computed anew in one of so many rounds without it: it hardly changes in
# between.
_BID_EVERY = 8


def goodput(
    num_expected: float, num_rows: int, share: float = 0.0, price: float | None = None
) -> float:
    """Return tokens per pass time: `num_expected` draft tokens and the target's own, for `num_rows`
    of drafts that took `share` of a pass to make. A row costs `price` of a pass, if known."""
    cost = ROW_COST if price is None else price
    return (1 + num_expected) / (1 + cost * num_rows + share)


@dataclass(frozen=True, slots=True)
class Bid:
    """The expected goodput of a draft of `depth` tokens by the model."""

    depth: int
    goodput: float


@dataclass(slots=True)
class _RequestBids:
    """Bids for one request. `num_idle` rounds passed since the model's last draft; `num_looks` of a
    probe are due. `bid` is the last one, for at most `limit` tokens."""

    num_idle: int = 0
    num_looks: int = 0
    broken: bool = False
    bid: Bid | None = None
    limit: int = 0

    @property
    def is_fresh(self) -> bool:
        """True if the last bid is still valid, given the same limit."""
        idle = self.num_idle
        return idle > 1 and idle % _BID_EVERY > 0


@dataclass(slots=True)
class ModelMember:
    """A member with any `drafter` that is not free; without `branches` it drafts chains only."""

    drafter: Drafter
    branches: bool = field(default=True, kw_only=True)
    pace: DraftCostMeter = field(default_factory=DraftCostMeter)
    _acceptance: Acceptance = field(default_factory=lambda: Acceptance(_NUM_POSITIONS))
    _requests: dict[int, _RequestBids] = field(default_factory=dict[int, _RequestBids])
    # Rounds of all requests since it last drafted for one.
    _num_idle: int = 0

    @property
    def _is_up_to_date(self) -> bool:
        """True if it has read every text, since the target has."""
        return self.drafter.needs.shares_memory

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        try:
            self.drafter.open(seq_id, prompt)
        except Exception:  # noqa: BLE001 - a drafter may be any code
            _log.warning("%s did not start; lookups draft alone.", self.drafter.name, exc_info=True)
        else:
            self._requests[seq_id] = _RequestBids()

    def close(self, seq_id: int) -> None:
        if self._requests.pop(seq_id, None) is not None:
            self.drafter.close(seq_id)

    def learn(self, row: DraftRow) -> None:
        """Learn the verdict on its last draft."""
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
        """Return the depth with the highest goodput; None if the model cannot draft."""
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

    def draft(self, wanted: Sequence[tuple[DraftRow, int]]) -> list[Draft]:
        """Return drafts of these depths. A request for which the model fails gets none, now and
        later; one without memory gets none now."""
        if not wanted:
            return []
        rows = [replace(row, budget=self._cut(row.budget, depth)) for row, depth in wanted]
        for row in rows:
            request = self._requests[row.seq_id]
            request.num_looks = max(request.num_looks - 1, 0)
        # The time of a model that must first catch up does not measure its drafts.
        on_time = self._is_up_to_date or not any(
            self._requests[row.seq_id].num_idle for row in rows
        )
        started = self.pace.clock()
        drafts = self._proposed(rows)
        if on_time and any(drafts):
            self.pace.drafted(self.pace.clock() - started, max(depth for _, depth in wanted))
        return [replace(draft, by=self.drafter.name) for draft in drafts]

    def _cut(self, budget: Budget, depth: int) -> Budget:
        cut = budget.cut(depth)
        return cut if self.branches else replace(cut, num_nodes=0)

    def _bid(self, seq_id: int, request: _RequestBids, depth: int, price: float | None) -> Bid:
        rates = self._acceptance.rates(seq_id)
        rates += rates[-1:] * (depth - len(rates))
        # After rounds without it, the model must first catch up.
        late = request.num_idle > 0 and not self._is_up_to_date
        best, num_expected = Bid(0, 0.0), 0.0
        for length, kept in enumerate(prefix_products(rates[:depth]), start=1):
            num_expected += kept
            value = goodput(num_expected, length, self.pace.share * (length + late), price)
            if value > best.goodput:
                best = Bid(length, value)
        return best

    def _proposed(self, rows: Sequence[DraftRow]) -> list[Draft]:
        try:
            return self.drafter.propose(rows)
        except Exception as error:  # noqa: BLE001 - a drafter may be any code
            if len(rows) > 1:
                return [draft for row in rows for draft in self._proposed([row])]
            if not isinstance(error, CapacityError):
                self._requests[rows[0].seq_id].broken = True
                _log.warning("%s failed; lookups draft alone.", self.drafter.name, exc_info=True)
            return [Draft.empty()]
