"""Members of a portfolio that cost time: their pace, their acceptance, their plans for a round.

A plan chooses the requests of a batch for which the member drafts, and a depth for each. The member
runs once a level for all of them, so its time is that of the deepest draft, and the round's goodput

    tokens / time = (tokens without it + sum of gains) / (time without it + share x depth)

decides. The gain of a request at depth j is the probability a_j that the member is right up to
there, without the part in which the draft of the others is right as well: q a_j P_j, with q
measured (1 if they were independent), and without the price of a row.

Nothing is learnt for free. A member that is wrong for a while, or whose cost is not known yet, may
lose time against plain decoding; `Allowance` bounds that loss, whatever the text does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, zip_longest
from typing import NamedTuple

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.draft import Budget, Draft
from outrider.core.errors import CapacityError
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.tree import ROOT
from outrider.drafters.common.context import ScoredDraft
from outrider.drafters.common.merge import Proposal, made_by
from outrider.estimate.acceptance import Acceptance, FadingRate, RunningMedian, prefix_products
from outrider.estimate.cost import (
    ASSUMED_DRAFT,
    LEAST_READ,
    LOSS_SHARE,
    MOST_SAVED,
    Allowance,
)

_log = logging.getLogger(__name__)

_WINDOW = 31
# Up to so many measurements, the assumed cost of a draft is used.
_SETTLED = 5
# Tokens that the member reads in the time of one of its passes, until that was measured.
_READ_AT_ONCE = 16
# A draft that took so many times as long as usual had a pause.
_PAUSE = 4.0
# A member that has more to read than this must catch up first.
_FEW_UNREAD = 32


@dataclass(slots=True)
class DraftCostMeter:
    """A meter of drafting costs. `_drafting` has the seconds of the draft being verified and the
    member's passes in it, None if it did not draft or read a long text before; `_slowed` is how
    much its rows slow the pass.

    Between the end of drafting and the next round the target verifies, so the time between them is
    that of a pass, and now and then of a pause too. A draft is compared with the very pass that
    verified it, because a machine's speed drifts. The median leaves pauses and slowed rounds out.
    """

    clock: Clock = HOST_CLOCK
    _shares: RunningMedian = field(default_factory=lambda: RunningMedian(_WINDOW))
    _passes: RunningMedian = field(default_factory=lambda: RunningMedian(_WINDOW))
    _reading: RunningMedian = field(default_factory=lambda: RunningMedian(_WINDOW))
    _by_passes: dict[int, RunningMedian] = field(default_factory=dict[int, RunningMedian])
    _costs: dict[int, float] = field(default_factory=dict[int, float])
    _ended: float | None = None
    _drafting: tuple[float, int] | None = None
    _slowed: float = 1.0
    _share: float = ASSUMED_DRAFT

    def begin_round(self) -> None:
        """Begin a round."""
        if self._ended is None:
            return
        passing = (self.clock() - self._ended) / self._slowed
        if passing > 0:
            self._passes.add(passing)
            if self._drafting is not None:
                self._add(self._drafting[0] / passing, self._drafting[1])
        self._drafting = self._ended = None

    def _add(self, passes: float, num_own: int) -> None:
        """Add a draft of `num_own` passes that took so many passes of the target."""
        self._shares.add(passes / num_own)
        self._by_passes.setdefault(num_own, RunningMedian(_WINDOW)).add(passes)
        self._costs.clear()
        if self.is_known:
            self._share = self._shares.low

    def cost(self, num_passes: int) -> float:
        """Return the expected time of a draft of so many passes, in passes of the target: that of
        drafts that were about as long, and the share of each pass more or less. A draft has costs
        that do not depend on its length."""
        found = self._costs.get(num_passes)
        if found is None:
            found = num_passes * self._share
            if self.is_known:
                near = min(self._by_passes, key=lambda own: (abs(own - num_passes), own))
                among = self._by_passes[near].low + (num_passes - near) * self._share
                found = max(found, among)
            self._costs[num_passes] = found
        return found

    def drafted(self, seconds: float, num_passes: int) -> None:
        """Record that the member drafted in `seconds`, with so many passes of its own."""
        self._drafting = (seconds, num_passes) if seconds else None

    def caught_up(self, passes: float, num_tokens: int) -> None:
        """Record that the member read `num_tokens` in the time of so many `passes`."""
        if num_tokens >= LEAST_READ:
            self._reading.add(passes / num_tokens)

    def end_drafting(self, slowed: float) -> None:
        """Record that drafts were returned, with which a pass takes `slowed` of a plain one."""
        self._ended, self._slowed = self.clock(), slowed

    @property
    def is_known(self) -> bool:
        """True if a few drafts were timed."""
        return len(self._shares) >= _SETTLED

    def passes(self, seconds: float) -> float:
        """Return `seconds` in passes of the target; 0 before its first one."""
        return seconds / self._passes.low if self._passes else 0.0

    def reading(self, num_tokens: int) -> float:
        """Return the expected time to read so many tokens, in passes of the target."""
        known = self._reading
        return num_tokens * (known.low if known else self._share / _READ_AT_ONCE)

    @property
    def share(self) -> float:
        """The time of one of the member's passes as a share of the target's."""
        return self._share


@dataclass(slots=True)
class Allowances:
    """The allowances of a portfolio's members together. `drafts` pays for passes; `all` pays for
    passes and for reading texts, before a request's first draft and after a pause. A text that was
    read stays read, so its further drafts have to pay for themselves alone."""

    drafts: Allowance = field(default_factory=partial(Allowance, most=MOST_SAVED))
    all: Allowance = field(default_factory=partial(Allowance, most=MOST_SAVED))

    def add(self, passes: float, reading: float = 0.0) -> None:
        """Book tokens gained minus time taken, and the time of reading."""
        self.drafts.add(passes)
        self.all.add(passes - reading)

    def next_round(self, num_rounds: int = 1) -> None:
        self.drafts.refill(num_rounds * LOSS_SHARE)
        self.all.refill(num_rounds * LOSS_SHARE)


# Positions with rates of their own; later ones have the rate of the last.
_NUM_POSITIONS = 8
# Rounds without the member before a trial, a draft that does not seem to pay: of one request, and
# of all. The number of rounds of a trial, since in the first one the member must catch up and is
# not timed; and the depth of its drafts.
LOOK_AFTER = 128
LOOK_AFTER_ALL = 256
LOOK_ROUNDS = 3
LOOK_DEPTH = 2
# Rates of an idle request are computed anew in one of so many rounds: they hardly change.
_RATES_EVERY = 8
# Rounds of a request, if it has so many left, that must repay the time in which the member reads
# its text.
HORIZON = 64
# Prior weight of q = 1, in tokens that both were expected to have right.
_OVERLAP_WEIGHT = 8.0
_OVERLAP_FADE = 1 - 1 / 256


@dataclass(slots=True)
class RowState:
    """One row of a round while members make plans for it. `levels` has the probability of each
    depth that the draft so far is accepted there. `price` is the gain, in tokens, that pays for one
    more row of the pass, at the present speed, and `cost` at that of plain decoding. A draft
    `alone` was drawn, and nothing is merged with it."""

    row: DraftRow
    price: float
    cost: float
    levels: list[float] = field(default_factory=list[float])
    alone: bool = False

    @property
    def num_gained(self) -> float:
        """Expected tokens of the draft so far, without those that pay for rows. Levels that do not
        pay will be cut."""
        return sum(max(p - self.price, 0.0) for p in self.levels)

    def add(self, levels: Sequence[float]) -> None:
        """Add a member's probabilities to be right where the others are not."""
        if not self.row.params.greedy:
            self.levels, self.alone = list(levels), True
            return
        pairs = zip_longest(self.levels, levels, fillvalue=0.0)
        self.levels = [min(a + b, 1.0) for a, b in pairs]


@dataclass(frozen=True, slots=True)
class Plan:
    """Depths by index of the row, and the round with them: its expected `tokens`, without those
    that pay for rows, in `time`, which counts passes of the target. By index of the row, `levels`
    has for each depth the probability that only this member is right there, and `shared` the number
    of tokens that the others would have right as well, if both were independent."""

    depths: dict[int, int]
    tokens: float = 0.0
    time: float = 1.0
    trial: bool = False
    levels: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    shared: dict[int, float] = field(default_factory=dict[int, float])

    @property
    def goodput(self) -> float:
        return self.tokens / self.time


class _Answer(NamedTuple):
    """A draft that the text will judge: it began at `start`. `rest` is the draft of the other
    members, with `shared` of whose tokens it was expected to agree; `rows` is the cost of its own
    nodes in tokens."""

    start: int
    draft: Draft
    rest: Draft
    shared: float
    rows: float


@dataclass(slots=True)
class _Request:
    """A member's knowledge of a request whose text began with `prompt_length` tokens. `num_idle`
    rounds passed since its last draft; `num_looks` of a trial are due. It has read `num_read`
    tokens."""

    prompt_length: int
    num_read: int = 0
    num_idle: int = 0
    num_looks: int = 0
    broken: bool = False
    answer: _Answer | None = None
    prefixes: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class ModelMember:
    """A member with any `drafter` that is not free; without `branches` it drafts chains only. A
    drafter that drafts `at_once` has all tokens from one pass. A pass of the target verifies
    `most_drafted` tokens of all requests at most, if given: more would be drafted for nothing."""

    drafter: Drafter
    branches: bool = field(default=True, kw_only=True)
    at_once: bool = field(default=False, kw_only=True)
    most_drafted: int | None = field(default=None, kw_only=True)
    pace: DraftCostMeter = field(default_factory=DraftCostMeter)
    _acceptance: Acceptance = field(default_factory=lambda: Acceptance(_NUM_POSITIONS))
    _overlap: FadingRate = field(default_factory=lambda: FadingRate(_OVERLAP_FADE))
    _requests: dict[int, _Request] = field(default_factory=dict[int, _Request])
    # Rounds of all requests since it last drafted for one.
    _num_idle: int = 0
    # The last round: the tokens that it gained, without those that pay for its rows, the seconds
    # that it took, the tokens that it read and the depth of its drafts.
    _gained: float = 0.0
    _seconds: float = 0.0
    _num_unread: int = 0
    _depth: int = 0
    _tried: bool = False

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def seconds(self) -> float:
        """The seconds of its draft in this round."""
        return self._seconds

    @property
    def _is_up_to_date(self) -> bool:
        """True if it has read every text, since the target has."""
        return self.drafter.needs.shares_memory

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        try:
            self.drafter.open(seq_id, prompt)
        except Exception:  # noqa: BLE001 - a drafter may be any code
            _log.warning("%s did not start; the others draft alone.", self.name, exc_info=True)
        else:
            self._requests[seq_id] = _Request(len(prompt))

    def close(self, seq_id: int) -> None:
        if self._requests.pop(seq_id, None) is not None:
            self.drafter.close(seq_id)

    def learn(self, row: DraftRow) -> None:
        """Learn the verdict of the text on its last draft."""
        request = self._requests.get(row.seq_id)
        if request is None:
            return
        answer, request.answer = request.answer, None
        if answer is None:
            self._acceptance.observe(row.seq_id, 0, 0)
            request.num_idle += 1
            self._num_idle += 1
            return
        written = row.tokens[answer.start :]
        own, rest = answer.draft.followed(written), answer.rest.followed(written)
        depth = answer.draft.max_depth
        self._acceptance.observe(row.seq_id, min(len(written), depth), own)
        self._overlap.add(min(own, rest), answer.shared)
        # The last token of a round is the target's own, even if it was drafted and cut.
        self._gained += min(own, len(written) - 1) - min(own, rest) - answer.rows
        request.num_idle = self._num_idle = 0

    def rested(self, num_rounds: int) -> None:
        """Count rounds in which no member was planned for."""
        self._num_idle += num_rounds * len(self._requests)
        for request in self._requests.values():
            request.num_idle += num_rounds

    def settle(self, allowances: Allowances, num_rows: int) -> tuple[float, float]:
        """Book the last round, whose verdicts have been learnt, for a batch of `num_rows`; return
        the tokens that were gained for each row, and the passes of the target that it took, both 0
        for a trial."""
        if not self._seconds and not self._gained:
            return 0.0, 0.0
        passes, reading = self.pace.passes(self._seconds), 0.0
        expected = self._cost(self._depth)
        if self._num_unread:
            expected += self.pace.reading(self._num_unread)
            reading = max(passes - self._cost(self._depth), 0.0)
            self.pace.caught_up(reading, self._num_unread)
        if self.pace.is_known and passes > _PAUSE * expected:
            # The machine has pauses without drafts too.
            reading *= _PAUSE * expected / passes
            passes = _PAUSE * expected
        gained, took = self._gained / num_rows, passes - reading
        allowances.add(gained - took, reading)
        self._gained = self._seconds = 0.0
        self._num_unread = 0
        return (0.0, 0.0) if self._tried else (gained, took)

    def plan(self, states: Sequence[RowState], now: Plan, allowances: Allowances) -> Plan | None:
        """Return the plan of highest goodput, if it is above that of `now`, the round without this
        member; None if there is none, or the allowances do not pay for it."""
        if not self._may_raise(states, now):
            return None
        best = self._best(states, now, allowances)
        return None if best is None else self._with_levels(best, states)

    def _may_raise(self, states: Sequence[RowState], now: Plan) -> bool:
        """Return whether a plan could be above `now`, if the others drafted nothing and rows were
        free."""
        most = now.tokens
        for state in states:
            request = self._requests.get(state.row.seq_id)
            if request is not None:
                self._refresh(state.row.seq_id, request, state.row.budget.depth)
                most += sum(request.prefixes)
        return most > now.goodput * (now.time + self.pace.share)

    def _gains(
        self, states: Sequence[RowState], rate: float, allowances: Allowances
    ) -> dict[int, list[float]]:
        """Return the gain of each depth, by index of the rows for which some depth gains at this
        `rate` of tokens in the time of a pass."""
        gains: dict[int, list[float]] = {}
        credit = allowances.all.left
        for index, request in self._ready(states):
            row, price = states[index].row, states[index].price
            reading, owed = self._reading(request, row)
            if reading and owed > credit:
                continue
            levels = self._levels(states[index], request)
            num_left = request.prompt_length + row.params.max_tokens - len(row.tokens)
            repays = max(min(HORIZON, num_left / rate), 1)
            lost = self._lost(states[index]) + rate * reading / repays
            gain = [added - lost for added in accumulate(level - price for level in levels)]
            if max(gain) > 0:
                gains[index] = gain
                credit -= reading
        return gains

    def _best(self, states: Sequence[RowState], now: Plan, allowances: Allowances) -> Plan | None:
        gains = self._gains(states, now.goodput, allowances)
        best, goodput, more, kept = None, now.goodput, 0.0, 0.0
        depths: dict[int, int] = {}
        chances = [self._requests[states[index].row.seq_id].prefixes for index in gains]
        most = now.tokens + sum(map(max, gains.values()))
        for depth in range(1, max(map(len, gains.values()), default=0) + 1):
            time = now.time + self._cost(depth)
            if most <= goodput * time:
                # No deeper draft can be better.
                break
            kept += sum(own[depth - 1] for own in chances if depth <= len(own))
            if not self._may_take(depth, allowances, 1 - kept / (depth * len(gains))):
                break
            for index, gain in gains.items():
                known = gain[depths[index] - 1] if index in depths else 0.0
                if depth <= len(gain) and gain[depth - 1] > known:
                    depths[index] = depth
                    more += gain[depth - 1] - known
            if self.most_drafted is not None and sum(depths.values()) > self.most_drafted:
                break
            found = (now.tokens + more) / time
            if found > goodput:
                best, goodput = Plan(dict(depths), now.tokens + more, time), found
        return best

    def trial(self, states: Sequence[RowState], allowances: Allowances) -> Plan | None:
        """Return the plan of a trial for one request, if one is due and the allowances pay."""
        for index, request in self._ready(states):
            row = states[index].row
            if not request.num_looks:
                if request.num_idle < LOOK_AFTER and self._num_idle < LOOK_AFTER_ALL:
                    continue
                request.num_looks = LOOK_ROUNDS
                # One request at a time: the others wait as if they had been tried as well.
                self._num_idle = 0
                for other in self._requests.values():
                    other.num_idle = min(other.num_idle, LOOK_AFTER // 2)
            depth = min(LOOK_DEPTH, row.budget.depth)
            while depth > 1 and not allowances.drafts.pays(self._cost(depth)):
                depth -= 1
            drafting = self._cost(depth)
            _, owed = self._reading(request, row)
            if allowances.drafts.pays(drafting) and allowances.all.pays(drafting + owed):
                return self._with_levels(Plan({index: depth}, trial=True), states)
            request.num_looks = 0
        return None

    def _may_take(self, depth: int, allowances: Allowances, refused: float) -> bool:
        """Return whether the allowances pay for a draft of this depth, of which a share `refused`
        is expected to be. Before its cost is known, a draft is as short as a trial."""
        cost = self._cost(depth)
        if not allowances.drafts.pays(cost):
            return False
        if self.at_once or depth == 1:
            return True
        is_settled = depth <= LOOK_DEPTH or self.pace.is_known
        return is_settled and allowances.drafts.risks(refused * cost)

    def _cost(self, depth: int) -> float:
        """Return the time of a draft of this depth, in passes of the target."""
        return self.pace.cost(1 if self.at_once else depth)

    def _with_levels(self, plan: Plan, states: Sequence[RowState]) -> Plan:
        levels: dict[int, list[float]] = {}
        shared: dict[int, float] = {}
        for index, depth in plan.depths.items():
            state = states[index]
            request = self._requests[state.row.seq_id]
            levels[index] = self._levels(state, request)[:depth]
            pairs = zip(request.prefixes[:depth], state.levels, strict=False)
            shared[index] = sum(own * others for own, others in pairs)
        return replace(plan, levels=levels, shared=shared)

    def draft(self, states: Sequence[RowState], plan: Plan) -> dict[int, Draft | Proposal]:
        """Return drafts by index of the row: a drawn one as a Draft, a chosen one as a Proposal. A
        request for which the member fails gets none, now and later; one without memory gets none
        now."""
        rows = [self._cut(states[index].row, depth) for index, depth in plan.depths.items()]
        requests = [self._requests[row.seq_id] for row in rows]
        unread = [self._unread(request, row) for request, row in zip(requests, rows, strict=True)]
        for request in requests:
            request.num_looks = max(request.num_looks - 1, 0)
        started = self.pace.clock()
        drafts = self._proposed(rows)
        seconds = self.pace.clock() - started
        self._seconds, self._num_unread, self._tried = seconds, sum(unread), plan.trial
        self._depth = max(row.budget.depth for row in rows)
        if not self._num_unread and any(drafts):
            self.pace.drafted(seconds, 1 if self.at_once else self._depth)
        found: dict[int, Draft | Proposal] = {}
        for index, row, request, draft in zip(plan.depths, rows, requests, drafts, strict=True):
            request.num_read = len(row.tokens)
            if draft.probs_NV is not None:
                found[index] = made_by(draft, self.name, seconds, trial=plan.trial)
            elif draft.tokens:
                offer = self._scored(draft, request)
                found[index] = Proposal(self.name, offer, seconds, plan.trial)
        return found

    def expect(self, state: RowState, plan: Plan, index: int, own: Draft, rest: Draft) -> None:
        """Remember its `own` draft for the row until the text has judged it. `rest` is the draft of
        the other members."""
        nodes = len(own) - rest.followed(own.tokens)
        start = len(state.row.tokens)
        answer = _Answer(start, own, rest, plan.shared[index], state.cost * nodes)
        self._requests[state.row.seq_id].answer = answer

    def _ready(self, states: Sequence[RowState]) -> Iterator[tuple[int, _Request]]:
        """Return rows for which it may draft now, with its knowledge of their requests."""
        for index, state in enumerate(states):
            request = self._requests.get(state.row.seq_id)
            if request is None or request.broken or state.alone:
                continue
            names = state.row.params.drafters
            if state.row.budget.depth and (not names or self.name in names):
                yield index, request

    def _reading(self, request: _Request, row: DraftRow) -> tuple[float, float]:
        """Return the time of reading the text, in passes of the target, and what the allowances owe
        of it: reading it for the first time may take a tenth of the target's own time, or a long
        prompt would never be read."""
        num_unread = self._unread(request, row)
        reading = self.pace.reading(num_unread)
        free = 0.0 if request.num_read else num_unread * ASSUMED_DRAFT / _READ_AT_ONCE
        return reading, max(reading - free, 0.0)

    def _unread(self, request: _Request, row: DraftRow) -> int:
        """Return the tokens that it must read first; 0 for few, which the draft's pass reads."""
        num_unread = 0 if self._is_up_to_date else len(row.tokens) - request.num_read
        return num_unread if num_unread > _FEW_UNREAD or not request.num_read else 0

    def _levels(self, state: RowState, request: _Request) -> list[float]:
        """Return for each depth the probability that this member is right there and the others are
        not. A drawn draft replaces theirs."""
        depth = state.row.budget.depth
        self._refresh(state.row.seq_id, request, depth)
        own = request.prefixes[:depth]
        if not state.row.params.greedy or not state.levels:
            return own
        overlap = self._overlap.posterior(1.0, _OVERLAP_WEIGHT)
        pairs = zip_longest(own, state.levels[:depth], fillvalue=0.0)
        return [a - min(overlap * a * others, a, others) for a, others in pairs]

    def _lost(self, state: RowState) -> float:
        """Return the tokens, without those that pay for rows, that are lost if a drawn draft
        replaces the draft of the others."""
        return 0.0 if state.row.params.greedy else state.num_gained

    def _refresh(self, seq_id: int, request: _Request, depth: int) -> None:
        """Compute the a_j anew if they may have changed."""
        idle = request.num_idle
        if len(request.prefixes) >= depth and idle > 1 and idle % _RATES_EVERY:
            return
        rates = self._acceptance.rates(seq_id)
        rates += rates[-1:] * (depth - len(rates))
        request.prefixes = prefix_products(rates)

    def _scored(self, draft: Draft, request: _Request) -> ScoredDraft:
        """Return the draft with the probabilities of its nodes: siblings share that of their depth,
        each half as much as its elder sibling."""
        if draft.is_chain:
            return ScoredDraft(draft.tokens, tuple(request.prefixes[: len(draft)]))
        depths: list[int] = []
        worths: list[float] = []
        for node, parent in enumerate(draft.parents):
            depths.append(0 if parent == ROOT else depths[parent] + 1)
            rank = sum(other == parent for other in draft.parents[:node])
            above = 1.0 if parent == ROOT else worths[parent]
            before = request.prefixes[depths[node] - 1] if depths[node] else 1.0
            rate = request.prefixes[depths[node]] / before if before else 0.0
            worths.append(above * rate / 2 ** (rank + 1))
        return ScoredDraft(draft.tokens, tuple(worths), draft.parents)

    def _cut(self, row: DraftRow, depth: int) -> DraftRow:
        budget: Budget = row.budget.cut(depth)
        return replace(row, budget=budget if self.branches else replace(budget, num_nodes=0))

    def _proposed(self, rows: Sequence[DraftRow]) -> list[Draft]:
        try:
            return self.drafter.propose(rows)
        except Exception as error:  # noqa: BLE001 - a drafter may be any code
            if len(rows) > 1:
                return [draft for row in rows for draft in self._proposed([row])]
            if not isinstance(error, CapacityError):
                self._requests[rows[0].seq_id].broken = True
                _log.warning("%s failed; the others draft alone.", self.name, exc_info=True)
            return [Draft.empty()]
