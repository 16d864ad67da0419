"""Goodput controller of drafters that score their tokens: each draft is cut to the part that pays.

Look-ups cost next to nothing, and each gives the acceptance probability P_i of every node of its
draft. So the longest draft is requested, and its length is chosen afterwards, from that very
draft: of all nodes of a batch, the C with the largest P_i that maximise

    sum of P_i - L (T(b + C) - T(b))

T(rows) are the measured seconds of a pass (estimate/cost.py), b the number of sequences, and L the
tokens a second that the batch writes at present: the alternative gain of the additional rows' time.
That is the best stationary policy (Dinkelbach 1967, "On nonlinear fractional programming": the
ratio of tokens to time is maximised where their difference at the price L is). C = 0 is plain
decoding. Drafts that lose time all the same, since their drafter boasts, stop as soon as an
`Allowance` (estimate/cost.py) is spent. A length depends on the text, on deterministic drafts and
on time, never on a drawn token, so every exact rule preserves the target's distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from outrider.core.draft import Budget, Choice, Draft, Reason, RoundTrace, Trimmed
from outrider.core.errors import ContractError
from outrider.estimate.acceptance import FadingRate, OpenPasses
from outrider.estimate.cost import ASSUMED, LOSS_SHARE, Allowance, CostMeter, CostTable

# Exploration of draft lengths: `DepthSweep` at first, `Probes` later, for a bounded share of time;
# `BatchRests` stops drafts that gain a batch next to nothing.
#
# `DepthSweep` measures a few depths when nothing is known yet. `Probes` looks again later: at plain
# decoding and at longer drafts while drafts pay, at short drafts while they do not. Each look that
# changes nothing doubles the wait for the next. The cost of looks, against the time without them,
# is booked, and no look begins while this cost is above `SHARE` of all time. Both classes count
# observed rounds, so decisions follow from traces alone.
# Largest share of the time of all rounds since the sweep.
SHARE = 0.01
# Long enough to measure also a drafter that must catch up first.
PROBE_ROUNDS = 4
FIRST_GAP = 32
LONGEST_GAP = 256
# Informative rounds of one depth in the sweep; a depth also ends after `MOST_SWEEP_ROUNDS` of any
# kind.
SWEEP_ROUNDS = 3
MOST_SWEEP_ROUNDS = 12


def sweep_depths(k: int) -> tuple[int, ...]:
    """0, powers of two and `k`."""
    powers = (1 << power for power in range(k.bit_length()))
    return tuple(sorted({0, k, *powers}))


@dataclass(slots=True)
class DepthSweep:
    """The first rounds: a few at each depth of `depths`."""

    depths: tuple[int, ...]
    _stage: int = 0
    _num_telling: int = 0
    _num_rounds: int = 0

    @property
    def depth(self) -> int | None:
        """The depth to draft now; None once the sweep is over."""
        return self.depths[self._stage] if self._stage < len(self.depths) else None

    def advance(self, *, telling: bool) -> bool:
        """Count a round. True if its depth is done."""
        self._num_telling += telling
        self._num_rounds += 1
        if self._num_telling < SWEEP_ROUNDS and self._num_rounds < MOST_SWEEP_ROUNDS:
            return False
        self.skip()
        return True

    def skip(self) -> None:
        """Go on to the next depth."""
        self._stage += 1
        self._num_telling = self._num_rounds = 0

    def end(self) -> None:
        self._stage = len(self.depths)


@dataclass(slots=True)
class Probes:
    """Later looks at other depths, which may cost `share` of the time. Times are seconds of rounds;
    `num_started` counts looks."""

    share: float = SHARE
    num_started: int = 0
    spent: float = 0.0
    total: float = 0.0
    _left: int = 0
    _since: int = 0
    _gap: int = field(default=FIRST_GAP)
    _was_plain: bool = False

    @property
    def is_on(self) -> bool:
        return self._left > 0

    @property
    def looks_deeper(self) -> bool:
        """True for a look at longer drafts: every other one, while drafts pay."""
        return self.num_started % 2 == 0

    def book(self, seconds: float, due: float) -> None:
        """Book a round that took `seconds`; its tokens take `due` without a look. Rounds of looks
        that gain repay others."""
        self.total += seconds
        if self.is_on:
            self.spent = max(self.spent + seconds - due, 0.0)

    def is_due(self, *, urgent: bool) -> bool:
        """True if a look may begin; an urgent one waits less."""
        waited = self._since >= (PROBE_ROUNDS if urgent else self._gap)
        return waited and self.spent <= self.share * self.total

    def begin(self, *, is_plain: bool) -> None:
        """Begin a look. `is_plain` says that plain decoding seems best now."""
        self._left, self._since, self._was_plain = PROBE_ROUNDS, 0, is_plain
        self.num_started += 1

    def advance(self, *, is_plain: bool) -> None:
        """Count a round."""
        if not self.is_on:
            self._since += 1
            return
        self._left -= 1
        if not self.is_on:
            changed = is_plain != self._was_plain
            self._gap = FIRST_GAP if changed else min(2 * self._gap, LONGEST_GAP)


# Smaller batches do not rest for a small gain, which changes with each text there.
LEAST_RESTING = 4
# The least speed-up of a batch that goes on drafting. Drafts also end some texts before others, and
# passes over the remaining texts are worth less.
LEAST_GAIN = 1.05
# Passes that are judged together, at first and after each rest; the length of a rest in passes.
FIRST_JUDGED, LATER_JUDGED = 32, 12
FIRST_REST, LONGEST_REST = 64, 512
# Smaller batches rest where so many passes had no draft, and nothing was accepted between them, for
# so many passes at most: a copy in the text may begin within a rest. Calls take this share of time.
IDLE, LONGEST_IDLE_REST, IDLE_SHARE = 16, 16, SHARE / 4
_DRAFTING_FADE = 1 - 1 / 16


@dataclass(slots=True)
class BatchRests:
    """Rests of drafting: passes without drafts, while drafts gain a batch less than `LEAST_GAIN`.

    Look-ups need no model, but each pass calls them and cuts their drafts, which takes about as
    much time as small gains save. A rest ends early when half of the sequences have ended. In small
    batches for which drafters find nothing, they are called so rarely that calls take `IDLE_SHARE`
    of the time.
    """

    _left: int = 0
    _size: int = 0
    _length: int = FIRST_REST
    _num_judged: int = FIRST_JUDGED
    _gain: FadingRate = field(default_factory=lambda: FadingRate(1.0))
    _num_passes: int = 0
    _num_idle: int = 0
    _drafting: FadingRate = field(default_factory=lambda: FadingRate(_DRAFTING_FADE))

    def is_on(self, num_sequences: int) -> bool:
        return self._left > 0 and 2 * num_sequences > self._size

    def rested(self) -> None:
        """A pass without drafts ended."""
        self._left -= 1

    def observe(
        self, num_sequences: int, tokens: float, num_plain: float, drafting: float, *, drafted: bool
    ) -> None:
        """Count a pass that could draft: `tokens` per sequence in the time of `num_plain` ones, and
        of `drafting` more."""
        self._left = 0
        if num_sequences < LEAST_RESTING:
            if drafted:
                # Drafts that lose are limited elsewhere, and a trial goes on without rests.
                if tokens > 1:
                    self._num_idle = 0
                return
            self._num_idle += 1
            self._drafting.add(drafting)
            if self._num_idle >= IDLE:
                self._size = num_sequences
                self._left = min(int(self._drafting.mean / IDLE_SHARE), LONGEST_IDLE_REST)
            return
        self._gain.add(tokens, num_plain + drafting)
        self._num_passes += 1
        if self._num_passes < self._num_judged:
            return
        if self._gain.mean < LEAST_GAIN:
            self._left, self._size = self._length, num_sequences
            self._length = min(2 * self._length, LONGEST_REST)
            self._num_judged = LATER_JUDGED
        else:
            self._length, self._num_judged = FIRST_REST, FIRST_JUDGED
        self._gain, self._num_passes = FadingRate(1.0), 0


# Levels of a draft with corrections of their own; deeper ones count as the last.
_NUM_LEVELS = 8
# Prior: expected nodes, all of them accepted; later trials count fully.
_SUPPOSED = 8.0
_FADE = 1 - 1 / 128
_HIGHEST = 0.99
# Passes over which tokens a second are averaged, and the most passes that a draft counts as: more
# time is that of a pause.
_PACE_FADE = 1 - 1 / 64
_LONGEST_DRAFTING = 8.0
# Costs are updated after each of the first passes, then after every so many.
_FREQUENT, _REFRESH = 32, 32
# After those, one of so many passes without drafts is measured: they are alike.
_PLAIN_EVERY = 8
# Drafts of one drafter over which its gains are averaged; before so many nodes it may draft.
_GAIN_FADE, _FEW_NODES = 1 - 1 / 16, 12
# Passes that must be left of the allowance for drafts of which the last ones lost time.
_LEAST_LEFT = 0.5
# Rounds in a row without any verified node, before a short draft is tried all the same.
_FIRST_GAP, _LONGEST_GAP, _SHORT = 32, 512, 4
_RESTING = Budget(0, choice=Choice("gain"))


def _is_scored(draft: Draft) -> bool:
    """True for a deterministic draft with scores; a sampled one must not be cut by its tokens."""
    return bool(draft.accept_probs) and draft.probs_NV is None


@dataclass(frozen=True, slots=True)
class _Expected:
    """Expectation of one sequence's draft: its drafter, and the sum of P for each level."""

    by: str
    levels: tuple[float, ...]


def _no_levels() -> list[FadingRate]:
    return [FadingRate(_FADE) for _ in range(_NUM_LEVELS)]


@dataclass(slots=True)
class _Corrections:
    """Ratio of accepted to expected nodes of a drafter, level by level."""

    levels: list[FadingRate] = field(default_factory=_no_levels)

    def corrected(self, draft: Draft) -> tuple[list[float], list[int]]:
        """P of every node, never rising along the draft, and its level from 0."""
        factors = [level.posterior(1.0, _SUPPOSED) for level in self.levels]
        levels: list[int] = []
        probs: list[float] = []
        lowest = _HIGHEST
        for parent, expected in zip(draft.parents, draft.accept_probs, strict=True):
            level = 0 if parent < 0 else min(levels[parent] + 1, _NUM_LEVELS - 1)
            levels.append(level)
            lowest = min(lowest, expected * factors[level])
            probs.append(lowest)
        return probs, levels

    def learn(self, levels: Sequence[float], num_accepted: int) -> None:
        for level, expected in enumerate(levels):
            self.levels[level].add(float(num_accepted > level), expected)


class ScoredController:
    """Budgets are the largest, or 0 while drafting rests; `trim` cuts drafts. A pure function of
    drafts and traces."""

    def __init__(self, *, k: int, num_nodes: int = 0, most_drafted: int | None = None) -> None:
        """`most_drafted` limits the tokens of all drafts of a pass, if given."""
        if k < 0:
            raise ContractError("k is at least 0")
        self._most_drafted = most_drafted
        self._most = self._priced = Budget(k, num_nodes=num_nodes, choice=Choice("gain"))
        self._meter = CostMeter()
        self._costs: CostTable = ASSUMED
        self._pass_seconds: dict[int, list[float]] = {}
        self._corrections: dict[str, _Corrections] = {}
        self._expected: dict[int, _Expected] = {}
        # Tokens a second in units of plain decoding.
        self._pace = FadingRate(_PACE_FADE)
        self._open = OpenPasses()
        self._num_passes = 0
        self._num_idle, self._gap = 0, _FIRST_GAP
        self._rests = BatchRests()
        self._allowance = Allowance()
        self._gains: dict[str, FadingRate] = {}

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        if self._rests.is_on(len(seq_ids)):
            return [_RESTING] * len(seq_ids)
        if self._costs is ASSUMED or self._seconds(len(seq_ids), 0) <= 0:
            return [self._most] * len(seq_ids)
        row_cost = self._row_cost(len(seq_ids))
        # Tokens that pay for the row of a drafted node, on average over a few rows.
        price = self._gain * len(seq_ids) * row_cost
        last = self._priced
        if (last.price, last.row_cost) != (price, row_cost):
            last = self._priced = replace(self._most, price=price, row_cost=row_cost)
        return [last] * len(seq_ids)

    def trim(self, seq_ids: Sequence[int], drafts: Sequence[Draft]) -> Trimmed:
        """Cut the drafts of sequences that draft together, each to its beginning that pays. Drafts
        without probabilities, and sampled ones, stay as they are."""
        scored = [index for index, draft in enumerate(drafts) if _is_scored(draft)]
        num_fixed = sum(map(len, drafts)) - sum(len(drafts[index]) for index in scored)
        probs: dict[int, list[float]] = {}
        levels: dict[int, list[int]] = {}
        for index in scored:
            known = self._corrections.setdefault(drafts[index].by, _Corrections())
            probs[index], levels[index] = known.corrected(drafts[index])
        may = {index for index in scored if self._may_draft(drafts[index].by, len(seq_ids))}
        counts, choice = self._choose(len(seq_ids), num_fixed, probs, may)
        trimmed = list(drafts)
        for index in scored:
            count = counts.get(index, 0)
            cut = drafts[index].first(count)
            trimmed[index] = cut.as_trial() if count and choice.reason == "look" else cut
            self._expect(seq_ids[index], drafts[index], levels[index][:count])
        return Trimmed(trimmed, choice)

    def observe(self, trace: RoundTrace) -> None:
        if trace.batch_size == 1 and self._rests.is_on(1):
            self._rests.rested()
            return
        traces = self._open.add(trace)
        if traces is None:
            return
        rounds = [one for one in traces if one.num_emitted]
        judged = self._judged(rounds)
        if not rounds or any(one.num_prompt_tokens for one in traces):
            return
        rests = self._rests.is_on(len(rounds))
        if rests:
            self._rests.rested()
            if len(rounds) < LEAST_RESTING:
                return
        self._num_passes += 1
        drafted = any(one.num_drafted for one in rounds)
        if drafted or self._num_passes < _FREQUENT or self._num_passes % _PLAIN_EVERY == 0:
            self._meter.observe(traces, caught_up=True)
        if self._num_passes < _FREQUENT or self._num_passes % _REFRESH == 0:
            self._costs = self._meter.table() or self._costs
            self._pass_seconds.clear()
        plain = self._seconds(len(rounds), 0)
        took = self._seconds(len(rounds), sum(one.num_drafted for one in rounds))
        if plain <= 0:
            return
        tokens = sum(one.num_emitted for one in rounds) / len(rounds)
        drafting = min(rounds[0].draft_seconds / plain, _LONGEST_DRAFTING)
        self._pace.add(tokens, took / plain + drafting)
        self._book(judged, len(rounds), took / plain - 1)
        if not rests and self._costs is not ASSUMED:
            self._rests.observe(len(rounds), tokens, took / plain, drafting, drafted=drafted)

    def _judged(self, rounds: Sequence[RoundTrace]) -> list[tuple[str, RoundTrace]]:
        """Correct the probabilities of the drafters of scored drafts; return their rounds, each
        with its drafter."""
        judged: list[tuple[str, RoundTrace]] = []
        for one in rounds:
            expected = self._expected.pop(one.seq_id, None)
            if expected is not None and one.num_drafted:
                self._corrections[expected.by].learn(expected.levels, one.num_accepted)
                judged.append((expected.by, one))
        return judged

    def _book(
        self, judged: Sequence[tuple[str, RoundTrace]], num_sequences: int, slowed: float
    ) -> None:
        """Book the tokens that scored drafts gained and the time of their rows, in passes, if the
        rows of the pass took `slowed` of a plain one."""
        self._allowance.add(LOSS_SHARE)
        if self._costs is ASSUMED or not judged:
            return
        row = slowed / sum(one.num_drafted for _, one in judged)
        for by, one in judged:
            gained, cost = one.num_accepted / num_sequences, row * one.num_drafted
            self._allowance.add(gained - cost)
            # Gains count up to twice the cost, so that a good time is forgotten soon.
            known = self._gains.setdefault(by, FadingRate(_GAIN_FADE))
            known.add(min(gained, 2 * cost) if cost > 0 else gained, one.num_drafted)

    def _may_draft(self, by: str, num_sequences: int) -> bool:
        """False for a drafter whose last drafts gained less than their rows cost, while no more may
        be lost."""
        known = self._gains.get(by)
        if known is None or known.trials < _FEW_NODES or self._allowance.pays(_LEAST_LEFT):
            return True
        return known.mean >= self._row_cost(num_sequences)

    def _row_cost(self, num_sequences: int) -> float:
        """Time of one more row in plain passes, on average over a few rows."""
        plain, rows = self._seconds(num_sequences, 0), max(num_sequences, 4)
        return (self._seconds(num_sequences, rows) - plain) / (rows * plain) if plain > 0 else 0.0

    @property
    def _gain(self) -> float:
        """Present speed-up over plain decoding, at least 1."""
        return max(self._pace.mean, 1.0)

    def _choose(
        self,
        num_sequences: int,
        num_fixed: int,
        probs: dict[int, list[float]],
        may: Collection[int],
    ) -> tuple[Mapping[int, int], Choice]:
        """The number of nodes of each draft to verify: of all nodes of those that `may` draft, the
        likeliest first, the beginning that is worth most at the price of time."""
        every = sorted(
            ((-p, node, index) for index, row in probs.items() for node, p in enumerate(row))
        )
        if self._most_drafted is not None:
            every = every[: max(self._most_drafted - num_fixed, 0)]
        nodes = [node for node in every if node[2] in may]
        seconds = partial(self._seconds, num_sequences)
        start = seconds(num_fixed)
        rate = self._gain * num_sequences / seconds(0) if seconds(0) > 0 else 0.0
        best, expected, count, worth = 0.0, 0.0, 0, 0.0
        for number, (lost, _, _) in enumerate(nodes, start=1):
            worth -= lost
            value = worth - rate * (seconds(num_fixed + number) - start)
            if value > best:
                best, count, expected = value, number, worth
        if not every:
            return {}, Choice("gain")
        if self._costs is not ASSUMED and self._costs.target.points[0][0] > num_sequences:
            # No costs are known for so few rows, so the first drafted row would seem to be free.
            return {}, Choice("trial")
        reason: Reason = "gain"
        if count:
            self._num_idle, self._gap = 0, _FIRST_GAP
        elif num := self._short_trial(len(every)):
            nodes = every
            reason, count, expected = "look", num, -sum(node[0] for node in nodes[:num])
        counts = Counter(index for _, _, index in nodes[:count])
        if self._costs is ASSUMED or num_fixed:
            return counts, Choice(reason)
        tokens, took = num_sequences + expected, seconds(count)
        gain = tokens * start / (num_sequences * took) if took > 0 else None
        return counts, Choice(reason, tokens, took, gain)

    def _short_trial(self, num_nodes: int) -> int:
        """Size of an occasional short draft, as costs may have been measured in a bad moment."""
        self._num_idle += 1
        if self._num_idle < self._gap:
            return 0
        self._num_idle, self._gap = 0, min(2 * self._gap, _LONGEST_GAP)
        return min(num_nodes, _SHORT)

    def _expect(self, seq_id: int, draft: Draft, levels: Sequence[int]) -> None:
        if not levels:
            self._expected.pop(seq_id, None)
            return
        sums = [0.0] * (max(levels) + 1)
        for level, expected in zip(levels, draft.accept_probs, strict=False):
            sums[level] += expected
        self._expected[seq_id] = _Expected(draft.by, tuple(sums))

    def _seconds(self, num_sequences: int, num_drafted: int) -> float:
        """Seconds of a pass over so many drafted nodes of so many sequences."""
        known = self._pass_seconds.setdefault(num_sequences, [])
        while len(known) <= num_drafted:
            rows = num_sequences + len(known)
            known.append(self._costs.round_seconds(num_sequences, rows, 0, 0))
        return known[num_drafted]
