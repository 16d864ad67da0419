"""Acceptance: closed forms of its effect, and its estimate for each position of a next draft.

a_j is the probability that position j is accepted given that all before it were. If the rate beta
were equal at every position, a request's beta would be Beta(u, v) after its judgements, starting
from all requests, and a_j = (u + j - 1) / (u + v + j - 1). But position j is refused s_j times as
often over all requests, and a request's own judgements of a position make a Beta distribution:

    p_j = 1 - s_j (1 - (u + j - 1) / (u + v + j - 1))
    a_j = (S p_j + accepted) / (S + judged)

Some requests are hard: their tokens are accepted at a small rate r, whatever others' are. So each
judged token changes the odds that a request is hard, from the share of hard ones among the last
requests. With h, the probability by these odds, which its first `NEW` drafts bring to 0 again since
its own counts then show the same, a draft is accepted up to position j with

    P_j = (1 - h) a_1 ... a_j + h r^j

Counts fade with each drafted round, and more slowly with each other round, so a hard request is
tried again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import TypeVar

from outrider.core.draft import RoundTrace
from outrider.core.errors import ContractError

# Closed forms: expected tokens of a round, and speed-up.
#
# beta is the probability that a drafted token is accepted given that all before it were, the same
# at every position; K tokens are drafted a round. Then
#
#     E = 1 + beta + ... + beta^K = (1 - beta^(K+1)) / (1 - beta)  tokens a round
#     S = E / (1 + T)                                           verification as long as a pass
#     S = E T_plain / (T_draft + T_verify)                      from measured times
#
# with T the time of drafting K tokens as a share of a target pass over one token. Accepted /
# drafted, the rate that a run counts, is (E - 1) / K and lower than beta. E is equation 1 of
# Leviathan, Kalman, Matias 2023 (arXiv 2211.17192). `docs/theory.md` has examples.


def expected_tokens(beta: float, k: int) -> float:
    """E, the target's own token included; between 1 and `k` + 1."""
    if not 0 <= beta <= 1:
        raise ContractError("beta lies between 0 and 1")
    if k < 0:
        raise ContractError("k is at least 0")
    # The quotient loses digits near beta = 1, the sum none.
    return math.fsum(beta**i for i in range(k + 1))


def prefix_products(rates: Sequence[float]) -> list[float]:
    """Probability for each position that its token and all before it are accepted; `rates` are
    those of the single positions, each given that all before were accepted."""
    return list(accumulate(rates, mul))


def beta_rates(u: float, v: float, k: int) -> list[float]:
    """The rates a_1 to a_k of a request whose beta is drawn from Beta(u, v); `u`, `v` > 0.

    If beta is drawn once a request from Beta(u, v), then a_j = (u + j - 1) / (u + v + j - 1): a
    draft with a long accepted prefix is likely to belong to an easy request. With a rate a_j at
    each position, E = 1 + a_1 + a_1 a_2 + ... E is convex in beta, so the mean beta alone would
    give too little.
    """
    if not u > 0:
        raise ContractError("u is above 0")
    if not v > 0:
        raise ContractError("v is above 0")
    return [(u + index) / (u + v + index) for index in range(k)]


def measured_speed_up(tokens: float, *, plain: float, draft: float, verify: float) -> float:
    """S from the times of a plain pass, of a round's draft passes and of its verifying pass, in
    any one unit; the value to compare results with."""
    return tokens * plain / (draft + verify)


# Estimators that learn during a run, in constant time per value: one implementation of each.
#
# A rate is hits a trial. Old counts fade: each trial leaves a share `fade` of them, so about 1 / (1
# - fade) trials count. With a prior of `mean`, as good as `weight` trials, the estimate is the mean
# of a Beta distribution,
#
#     posterior = (weight mean + hits) / (weight + trials)
#
# A prior of mean 1 estimates the ratio of hits to expected hits: then `trials` are the sum of the
# expectations. A prior that is to fade as well is put into the counts at the start.
#
# These run for every token of every request. So if several counts change together, one call changes
# them.
T = TypeVar("T")

# At least as many sequences as ever run at once, so only ended ones are forgotten.
MOST_SEQUENCES = 1024
# Passes that may lack some of their traces: lanes, each with one in progress.
_MOST_OPEN = 64


@dataclass(slots=True)
class FadingRate:
    """Hits per trial, or any other amount per trial. With a `fade` of 1 nothing fades."""

    fade: float
    hits: float = 0.0
    trials: float = 0.0

    def add(self, hits: float, trials: float = 1.0) -> None:
        self.hits = self.fade * self.hits + hits
        self.trials = self.fade * self.trials + trials

    @property
    def mean(self) -> float:
        """The rate; 0 before the first trial."""
        return self.hits / self.trials if self.trials else 0.0

    def posterior(self, mean: float, weight: float) -> float:
        return (weight * mean + self.hits) / (weight + self.trials)


def add_to_first(
    rates: Sequence[FadingRate],
    num_rates: int,
    hit: int | None,
    trials: float = 1.0,
    weight: float = 1.0,
) -> None:
    """Add a trial to each of the first `num_rates`; number `hit` had a hit and the others none. All
    of it counts `weight` times."""
    trials *= weight
    for number in range(num_rates):
        rate = rates[number]
        rate.hits = rate.fade * rate.hits + weight * (number == hit)
        rate.trials = rate.fade * rate.trials + trials


@dataclass(slots=True)
class RequestRates:
    """Rates of one request by kind of trial, given the rate of each over all requests:

        f    = (V + all hits) / (V + all expected)
        rate = (W f expected + hits) / (W + trials)

    f is the ratio of this request's hits to the expected ones over all kinds together. W (`weight`)
    and V (`evenness`) state the likeness of requests. `f expected` is at most `highest`.
    """

    num_kinds: int
    fade: float
    weight: float
    evenness: float
    highest: float = math.inf
    _kinds: list[FadingRate] = field(init=False)
    _all: FadingRate = field(init=False)

    def __post_init__(self) -> None:
        self._kinds = [FadingRate(self.fade) for _ in range(self.num_kinds)]
        self._all = FadingRate(self.fade)

    def add(self, kind: int, hit: float, expected: float) -> None:
        """Count a trial with an expected rate of `expected`."""
        own, every, fade = self._kinds[kind], self._all, self.fade
        every.hits = fade * every.hits + hit
        every.trials = fade * every.trials + expected
        own.hits = fade * own.hits + hit
        own.trials = fade * own.trials + 1

    def rate(self, kind: int, expected: float) -> float:
        """The probability of a hit in the next trial."""
        own, every, evenness = self._kinds[kind], self._all, self.evenness
        prior = (evenness + every.hits) / (evenness + every.trials) * expected
        if prior > self.highest:
            prior = self.highest
        return (self.weight * prior + own.hits) / (self.weight + own.trials)


@dataclass(slots=True)
class FadingMean:
    """A mean in which the newest value counts `share`, the older ones the rest."""

    share: float
    value: float | None = None

    def add(self, value: float) -> None:
        known = self.value
        self.value = value if known is None else known + self.share * (value - known)


@dataclass(slots=True)
class RunningMedian:
    """The median of the newest `size` values."""

    size: int
    _newest: deque[float] = field(default_factory=deque[float])
    _ordered: list[float] = field(default_factory=list[float])

    def add(self, value: float) -> None:
        self._newest.append(value)
        insort(self._ordered, value)
        if len(self._ordered) > self.size:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]

    @property
    def median(self) -> float:
        """The median; the mean of the two middle values, if there are two."""
        middle = len(self._ordered) // 2
        if len(self._ordered) % 2:
            return self._ordered[middle]
        return (self._ordered[middle - 1] + self._ordered[middle]) / 2

    @property
    def low(self) -> float:
        """The median; the lower of the two middle values, if there are two."""
        return self._ordered[(len(self._ordered) - 1) // 2]

    def __len__(self) -> int:
        return len(self._ordered)


class BySequence(OrderedDict[int, T]):
    """Values by sequence. The end of a sequence is not reported: of more than `MOST_SEQUENCES` the
    one least recently noted is forgotten."""

    def note(self, seq_id: int, value: T) -> T:
        self[seq_id] = value
        self.move_to_end(seq_id)
        if len(self) > MOST_SEQUENCES:
            self.popitem(last=False)
        return value


class OpenPasses:
    """Collects the traces of passes, which come one by one."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, list[RoundTrace]] = OrderedDict()

    def add(self, trace: RoundTrace) -> list[RoundTrace] | None:
        """Add a trace. Returns all traces of its pass, if it was the last of them."""
        if trace.batch_size == 1:
            return [trace]
        traces = self._open.setdefault(trace.pass_index, [])
        traces.append(trace)
        if len(traces) >= trace.batch_size:
            return self._open.pop(trace.pass_index)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return None


def seconds_of(trace: RoundTrace) -> float:
    """Duration of the round: the sum of its stages."""
    return trace.draft_seconds + trace.verify_seconds + trace.accept_seconds


def ms_per_token(trace: RoundTrace) -> float:
    """Milliseconds per emitted token."""
    return 1000 * seconds_of(trace) / trace.num_emitted


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """The smallest of `values` that at least `percent` of them do not exceed."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def fit_line(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, of the line nearest to samples (x, y, weight)."""
    total = sum([weight for _, _, weight in samples])
    mean_x = sum([weight * x for x, _, weight in samples]) / total
    mean = sum([weight * y for _, y, weight in samples]) / total
    spread = sum([weight * (x - mean_x) ** 2 for x, _, weight in samples])
    if spread == 0:
        return mean, 0.0
    slope = sum([weight * (x - mean_x) * y for x, y, weight in samples]) / spread
    slope = min(max(slope, 0.0), mean / mean_x)
    return mean - slope * mean_x, slope


# The prior rate, and the number of judgements that it counts as.
FIRST_RATE = 0.7
FIRST_WEIGHT = 4.0
# u + v of a request that was never judged: the likeness of requests.
LIKENESS = 8.0
# S, in judgements.
POSITION_WEIGHT = 16.0
# Prior weight of s_j = 1, in rejections.
SHAPE_WEIGHT = 8.0
# r; the share of hard requests at first, which counts as one request, and the most of the newest
# requests that it follows; the largest logarithm of odds.
HARD_RATE = 0.1
FIRST_HARD, MOST_NEWEST = 0.05, 3
MOST_LOG_ODDS = 5.0
# Drafts of a request after which its own counts say how hard it is.
NEW = 8.0
# The rate of a first request that is not hard.
_FIRST_EASY = (FIRST_RATE - FIRST_HARD * HARD_RATE) / (1 - FIRST_HARD)
# Odds count no token as more certain than this.
_LEAST_REFUSED = 0.01
# Weights of the old counts after a new one: of all requests, of one, and of one without drafts.
SHARED_FADE = 1 - 1 / 256
FIRST_FADE = 1 - 1 / 48
FADE = 1 - 1 / 48
IDLE_FADE = 1 - 1 / 128


@dataclass(slots=True)
class _SequenceCounts:
    """Counts of rejections of judged tokens, at each position and in `all`; `num_idle` rounds
    without drafts came after these counts. `log_odds` of a hard request come from its judgements
    alone, and `hardness` is h by them and the share of hard requests."""

    positions: list[FadingRate]
    all: FadingRate
    num_idle: int = 0
    log_odds: float = 0.0
    hardness: float = 0.0

    @property
    def newness(self) -> float:
        """1 before the first judged draft, 0 after `NEW` ones."""
        return max(1 - self.positions[0].trials / NEW, 0.0)

    def settle(self) -> None:
        """Fade the counts by the idle rounds after them."""
        kept = IDLE_FADE**self.num_idle
        self.log_odds *= kept
        for rate in (*self.positions, self.all):
            rate.hits *= kept
            rate.trials *= kept
        self.num_idle = 0


@dataclass(slots=True)
class _SharedCounts:
    """Counts over all requests: acceptance at the first position, and at each position the
    rejections for each expected one."""

    positions: list[FadingRate]
    first: FadingRate
    newest: deque[_SequenceCounts] = field(default_factory=lambda: deque(maxlen=MOST_NEWEST))
    _shape: list[float] | None = None

    @property
    def shape(self) -> list[float]:
        """s_1 to s_k."""
        if self._shape is None:
            # Inlined instead of calls of `posterior`, since this is computed after every round.
            self._shape = [
                (SHAPE_WEIGHT + one.hits) / (SHAPE_WEIGHT + one.trials) for one in self.positions
            ]
        return self._shape

    def add(self, num_judged: int, refused_at: int | None, expected: float, easy: float) -> None:
        """Count a round. `expected` is the request's rejection rate at any position, and `easy` the
        probability that it is not hard."""
        add_to_first(self.positions, num_judged, refused_at, expected, easy)
        self.first.add(easy * (refused_at != 0), easy)
        self._shape = None

    def hardness(self, log_odds: float) -> float:
        """h of a request with these odds of its own."""
        hits = FIRST_HARD + sum([one.hardness for one in self.newest])
        share = hits / (1 + len(self.newest))
        return 1 / (1 + (1 - share) / share * math.exp(-log_odds))


class Acceptance:
    """Acceptance estimates for drafts of up to `k` tokens."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._shared = _SharedCounts(self._rates(SHARED_FADE), FadingRate(FIRST_FADE))
        self._sequences: BySequence[_SequenceCounts] = BySequence()

    def observe(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """Count a round. Positions after the first rejection were not judged."""
        seq = self._sequences.get(seq_id)
        num_judged = min(num_accepted + 1, num_drafted, self._k)
        if not num_judged:
            if seq is not None:
                seq.num_idle += 1
            return
        shared = self._shared
        if seq is None:
            seq = _SequenceCounts(self._rates(FADE), FadingRate(FADE))
            shared.newest.append(seq)
        self._sequences.note(seq_id, seq)
        if seq.num_idle:
            seq.settle()
        u, v = self._beta(seq)
        refused_at = num_accepted if num_accepted < num_judged else None
        refused = min(max(v / (u + v), _LEAST_REFUSED), 1 - _LEAST_REFUSED)
        odds = FADE * seq.log_odds + num_accepted * math.log(HARD_RATE / (1 - refused))
        if refused_at is not None:
            odds += math.log((1 - HARD_RATE) / refused)
        seq.log_odds = min(max(odds, -MOST_LOG_ODDS), MOST_LOG_ODDS)
        seq.hardness = shared.hardness(seq.log_odds)
        shared.add(num_judged, refused_at, v / (u + v), 1 - seq.hardness * seq.newness)
        add_to_first(seq.positions, num_judged, refused_at)
        seq.all.add(refused_at is not None, num_judged)

    def knows(self, seq_id: int) -> bool:
        """True if counts of a judged draft of the sequence are stored."""
        return seq_id in self._sequences

    def is_new(self, seq_id: int) -> bool:
        """True if a refused draft changes much of what is known of the sequence."""
        seq = self._sequences.get(seq_id)
        return seq is None or seq.newness > 0

    def rates(self, seq_id: int) -> list[float]:
        """a_1 to a_k of one sequence."""
        seq = self._sequences.get(seq_id)
        if seq is not None and seq.num_idle:
            seq.settle()
        pairs = zip(beta_rates(*self._beta(seq), self._k), self._shared.shape, strict=True)
        prior = [1 - refused if (refused := s * (1 - a)) < 1 else 0.0 for a, s in pairs]
        if seq is not None:
            prior = [
                (POSITION_WEIGHT * rate + one.trials - one.hits) / (POSITION_WEIGHT + one.trials)
                for rate, one in zip(prior, seq.positions, strict=True)
            ]
        # Each accepted token makes a hard request less likely.
        hard = self._shared.hardness(0.0 if seq is None else seq.log_odds)
        if seq is not None:
            hard *= seq.newness
        easy = 1 - hard
        rates: list[float] = []
        for own in prior:
            weight = easy + hard
            easy, hard = easy * own, hard * HARD_RATE
            rates.append((easy + hard) / weight if weight else 0.0)
        return rates

    def prefixes(self, seq_id: int) -> list[float]:
        """Probability for each position that a draft is accepted up to it."""
        return prefix_products(self.rates(seq_id))

    def _beta(self, seq: _SequenceCounts | None) -> tuple[float, float]:
        # The mean is that of the first position: later ones are judged of easy requests only.
        mean = self._shared.first.posterior(_FIRST_EASY, FIRST_WEIGHT)
        u, v = LIKENESS * mean, LIKENESS * (1 - mean)
        return (u, v) if seq is None else (u + seq.all.trials - seq.all.hits, v + seq.all.hits)

    def _rates(self, fade: float) -> list[FadingRate]:
        return [FadingRate(fade) for _ in range(self._k)]
