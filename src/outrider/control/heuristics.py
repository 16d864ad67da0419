"""Controllers by rules: `fixed` draft length, `slo` (latency target), `band` (acceptance band); and
the watchdog, which turns drafting off where hardly a draft is accepted, and retries."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from outrider.core.draft import Budget, Choice, RoundTrace
from outrider.core.errors import ConfigError, ContractError, foreign, words_of
from outrider.core.protocols import Controller
from outrider.estimate.acceptance import BySequence, ms_per_token, nearest_rank
from outrider.estimate.cost import ROW_COST

_log = logging.getLogger(__name__)


class FixedController:
    """A constant budget; observations are ignored."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        return [self._budget] * len(seq_ids)

    def observe(self, trace: RoundTrace) -> None:
        del trace


INITIAL = 4
LOWEST = 2
NUM_ROUNDS = 32
LONG_QUEUE = 10
SHORT_QUEUE = 5
LOW_ACCEPTANCE = 0.4
HIGH_ACCEPTANCE = 0.7
MARGIN = 0.9
PERCENT = 95
HEAT = 0.25
HOTTEST = 1.5


@dataclass(frozen=True, slots=True)
class SloStats:
    """Statistics of the controller. `acceptance` and `p95_ms` are those of the last decision, None
    before the first; acceptance is None also if nothing was drafted. `num_samples` counts rounds
    observed since then."""

    depth: int
    acceptance: float | None
    p95_ms: float | None
    num_increases: int
    num_decreases: int
    num_samples: int
    temperature: float = 1.0


class SloController:
    """One draft length from max(2, `min_k`) to `k`, at first 4, the same for all sequences. With
    `num_nodes` the longest drafts are trees of so many tokens, shorter ones of fewer in proportion.

    It decides after every 32 observed rounds, by the newest number of waiting requests, the 95th
    percentile of milliseconds per emitted token over these rounds, and their acceptance (accepted /
    drafted, of a tree its depth):

        one fewer   if  waiting > 10  or  p95 > target      or  acceptance < 0.4
        one more    if  waiting <= 5  and p95 < 0.9 target  and acceptance > 0.7

    While many requests wait in spite of the shortest drafts, drafts are also drawn at a higher
    temperature: one `HEAT` more at each decision, up to `HOTTEST` times the request's own, and one
    less when the queue is short again. Each decision discards its rounds. A round's milliseconds
    are those of the whole pass, draft included, over the tokens that the sequence got from it: a
    reader's wait for a token.

    Lengths depend on measured time, so two runs may draft differently. Output keeps its
    distribution under every exact rule, but it is the same text only if text is tied to the seed
    (greedy, match, coupled).
    """

    def __init__(self, *, k: int, min_k: int, target_ms: float, num_nodes: int = 0) -> None:
        if not 0 <= min_k <= k:
            raise ContractError("min_k lies between 0 and k")
        self._most = Budget(k, num_nodes=num_nodes, choice=Choice("latency"))
        self._lowest, self._highest = min(max(LOWEST, min_k), k), k
        self._target_ms = target_ms
        self._depth = max(self._lowest, min(INITIAL, k))
        self._temperature = 1.0
        self._rounds: list[RoundTrace] = []
        self._acceptance: float | None = None
        self._p95_ms: float | None = None
        self._num_increases = 0
        self._num_decreases = 0

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        budget = replace(self._most.cut(self._depth), temperature=self._temperature)
        return [budget] * len(seq_ids)

    def observe(self, trace: RoundTrace) -> None:
        if trace.num_emitted:
            self._rounds.append(trace)
        if len(self._rounds) == NUM_ROUNDS:
            self._decide()
            self._rounds.clear()

    def stats(self) -> SloStats:
        return SloStats(
            depth=self._depth,
            acceptance=self._acceptance,
            p95_ms=self._p95_ms,
            num_increases=self._num_increases,
            num_decreases=self._num_decreases,
            num_samples=len(self._rounds),
            temperature=self._temperature,
        )

    def _decide(self) -> None:
        num_waiting = self._rounds[-1].num_waiting
        p95_ms = nearest_rank([ms_per_token(trace) for trace in self._rounds], PERCENT)
        acceptance = _acceptance(self._rounds)
        self._p95_ms, self._acceptance = p95_ms, acceptance
        if num_waiting > LONG_QUEUE and self._depth == self._lowest:
            self._temperature = min(self._temperature + HEAT, HOTTEST)
        elif num_waiting <= SHORT_QUEUE:
            self._temperature = max(self._temperature - HEAT, 1.0)
        slow = num_waiting > LONG_QUEUE or p95_ms > self._target_ms
        quick = num_waiting <= SHORT_QUEUE and p95_ms < MARGIN * self._target_ms
        if slow or (acceptance is not None and acceptance < LOW_ACCEPTANCE):
            self._move(-1)
        elif quick and acceptance is not None and acceptance > HIGH_ACCEPTANCE:
            self._move(1)

    def _move(self, step: int) -> None:
        depth = max(self._lowest, min(self._depth + step, self._highest))
        self._num_increases += depth > self._depth
        self._num_decreases += depth < self._depth
        self._depth = depth


def _acceptance(rounds: Sequence[RoundTrace]) -> float | None:
    num_positions = sum(trace.num_positions for trace in rounds)
    return sum(trace.num_accepted for trace in rounds) / num_positions if num_positions else None


STEP = 1
HALF_WIDTH = 0.1
RECENT = 4
WINDOW = 32
# The edges belong to the band, and 0.8 - 0.7 is not 0.1.
_ROUNDING = 1e-9


@dataclass(slots=True)
class _SequenceRates:
    """State of a sequence. `rates` are the acceptances of its last drafting rounds, newest last."""

    depth: int
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    num_plain: int = 0


@dataclass(frozen=True, slots=True)
class BandStats:
    """Statistics of one sequence. `acceptance` is the mean over the last 32 rounds that drafted, 0
    before the first; `num_samples` is the number of these rounds."""

    depth: int
    acceptance: float
    num_samples: int


class BandController:
    """Draft lengths from `min_k` to `k`, at first 4. A pure function of the traces' counts. With
    `num_nodes` the longest drafts are trees of so many tokens, shorter ones of fewer in proportion.

    Each sequence has its own draft length, since each text is easy or hard in its own way. After a
    round that drafted, let a be the mean acceptance (accepted / drafted) of its last four such
    rounds, where of a tree only its depth counts as drafted:

        a > target + 0.1   one token more
        a < target - 0.1   one token fewer

    Refused drafts cost their rows and the drafter's time; drafts that are all accepted were too
    short. A sequence whose length fell to 0 observes nothing, so after `WINDOW` plain rounds it
    starts over with one token.
    """

    def __init__(self, *, k: int, min_k: int, target: float, num_nodes: int = 0) -> None:
        if not 0 <= min_k <= k:
            raise ContractError("min_k lies between 0 and k")
        self._most = Budget(k, num_nodes=num_nodes, choice=Choice("acceptance"))
        self._lowest, self._highest, self._target = min_k, k, target
        self._sequences: BySequence[_SequenceRates] = BySequence()

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        return [self._most.cut(self._sequence(seq_id).depth) for seq_id in seq_ids]

    def observe(self, trace: RoundTrace) -> None:
        seq = self._sequence(trace.seq_id)
        if trace.num_drafted:
            seq.rates.append(trace.num_accepted / trace.num_positions)
            seq.depth = self._adapted(seq)
        elif seq.depth == 0:
            seq.num_plain += trace.num_emitted > 0
            if seq.num_plain == WINDOW:
                self._sequences[trace.seq_id] = _SequenceRates(min(STEP, self._highest))

    def stats(self, seq_id: int) -> BandStats:
        seq = self._sequence(seq_id)
        mean = sum(seq.rates) / len(seq.rates) if seq.rates else 0.0
        return BandStats(seq.depth, mean, len(seq.rates))

    def _sequence(self, seq_id: int) -> _SequenceRates:
        fresh = max(self._lowest, min(INITIAL, self._highest))
        return self._sequences.note(seq_id, self._sequences.get(seq_id) or _SequenceRates(fresh))

    def _adapted(self, seq: _SequenceRates) -> int:
        if len(seq.rates) < RECENT:
            return seq.depth
        above = sum(list(seq.rates)[-RECENT:]) / RECENT - self._target
        if abs(above) <= HALF_WIDTH + _ROUNDING:
            return seq.depth
        if above > 0:
            return min(seq.depth + STEP, self._highest)
        return max(seq.depth - STEP, self._lowest)


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


@dataclass(frozen=True, slots=True)
class WatchdogStats:
    """The number of times that drafting was turned off for a request, and the last reason;
    `all_off` is the reason while it is off for all."""

    num_turned_off: int
    reason: str
    all_off: str


class Watchdog:
    """A Controller that follows `inner`, except for requests whose drafts do not pay. A pure
    function of the traces.

    With `shared` all requests are also judged together, and new requests begin with the common
    verdict. This spares short requests too, but makes a request's drafts depend on others.
    """

    def __init__(self, inner: Controller, *, shared: bool = False) -> None:
        self._inner = inner
        self._all = _Watch(SHARED_ROUNDS) if shared else None
        self._watches: BySequence[_Watch] = BySequence()
        self._num_turned_off = 0
        self._reason = ""

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        given = self._inner.budgets(seq_ids)
        reasons = [self._resting(seq_id) for seq_id in seq_ids]
        pairs = zip(given, reasons, strict=True)
        return [
            replace(budget, depth=0, why=why, choice=_REST) if why else budget
            for budget, why in pairs
        ]

    def observe(self, trace: RoundTrace) -> None:
        self._inner.observe(trace)
        if not trace.num_emitted:
            return
        watch = self._watch(trace.seq_id)
        if watch.observe(trace.drafter, trace.num_drafted, trace.num_accepted):
            self._num_turned_off += 1
            self._reason = watch.reason
            _log.warning("Drafting rests for request %d: %s.", trace.seq_id, watch.reason)
        all_requests = self._all
        if all_requests is not None and all_requests.observe(
            trace.drafter, trace.num_drafted, trace.num_accepted
        ):
            _log.warning("Drafting rests for all requests: %s.", all_requests.reason)

    def stats(self) -> WatchdogStats:
        all_off = self._all.reason if self._all is not None else ""
        return WatchdogStats(self._num_turned_off, self._reason, all_off)

    def _resting(self, seq_id: int) -> str:
        watch = self._watches.get(seq_id)
        if watch is not None and watch.resting:
            return watch.reason
        return self._all.reason if self._all is not None and self._all.resting else ""

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
