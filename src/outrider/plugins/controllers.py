"""Controllers by rules: `slo` keeps to a latency target, `band` to a band of acceptance."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.core.config import EngineConfig
from outrider.core.draft import Budget, Choice, RoundTrace
from outrider.core.errors import ConfigError, ContractError
from outrider.core.protocols import Controller
from outrider.estimate.acceptance import BySequence, ms_per_token, nearest_rank

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


def controller_of(config: EngineConfig, *, k: int, num_nodes: int) -> Controller:
    """Return the controller that `config` names. Raises ConfigError if min_k is above k."""
    if config.min_k > k:
        raise ConfigError(
            f"min_k={config.min_k} is above k={k}, the longest draft.",
            hint="lower --min-k or raise --k",
        )
    if config.controller == "band":
        return BandController(
            k=k, min_k=config.min_k, target=config.target_acceptance, num_nodes=num_nodes
        )
    return SloController(k=k, min_k=config.min_k, target_ms=config.target_ms, num_nodes=num_nodes)
