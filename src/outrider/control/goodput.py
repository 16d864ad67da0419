"""Goodput controller: draft lengths that maximise tokens a second, per request and round.

It learns from rounds their cost (estimate/cost.py) and the acceptance at each position of a
request's next draft (estimate/acceptance.py). Plain decoding is one of the choices; unmeasured
lengths are tried for a bounded share of the time (scored.py). Lengths depend on measured time,
so two runs may draft differently; they do not depend on the draws of their round, so every exact
rule preserves the target's distribution.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outrider.control.scored import SHARE, DepthSweep, Probes, sweep_depths
from outrider.core.draft import Budget, Choice, Reason, RoundTrace
from outrider.core.errors import ContractError
from outrider.estimate.acceptance import Acceptance, FadingMean, OpenPasses, seconds_of
from outrider.estimate.cost import ASSUMED, LEAST_WEIGHED, CostMeter, CostTable, Reading

_log = logging.getLogger(__name__)

# Seconds of a round by (packed rows, deepest draft, number of sequences that draft).
RoundSeconds = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Draft lengths in the order of the batch; expected tokens and seconds of the round."""

    depths: tuple[int, ...]
    num_tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds if self.seconds > 0 else float("inf")

    @property
    def is_plain(self) -> bool:
        return not any(self.depths)


def allocated(
    prefixes: Sequence[Sequence[float]], depths: Sequence[int], seconds: RoundSeconds
) -> Allocation:
    """The expected tokens and seconds of drafts of these `depths`; `prefixes` has P_1 to P_k a
    sequence.

    Position j of a request's draft is accepted with probability P_j, the product of the rates up to
    it, and never more likely than the position before. So of all ways to draft C tokens for the
    batch, at most D for each, the best is to take the C largest P of positions up to D, and these
    are beginnings of drafts. It remains to choose C and D, with b tokens a round that the target
    adds by itself:

        goodput(C, D) = (b + the sum of the C largest P) / T(C, D)
    """
    tokens = sum(1 + sum(row[:depth]) for row, depth in zip(prefixes, depths, strict=True))
    num_drafting = sum(depth > 0 for depth in depths)
    deepest = max(depths, default=0)
    took = seconds(len(depths) + sum(depths), deepest, num_drafting)
    return Allocation(tuple(depths), tokens, took)


def best_allocation(prefixes: Sequence[Sequence[float]], seconds: RoundSeconds) -> Allocation:
    """The allocation with the largest goodput(C, D) over the tried D; of equals the smallest C.

    C = 0 is plain decoding, with its own cost. TETRIS (Wu et al. 2025, arXiv 2502.15197) allocates
    the target's rows in this way. The bound D is there because the drafter's passes cost time as
    well; D is tried at powers of two and at the largest depth. All is decided before anything is
    drawn.
    """
    nodes = sorted(
        (-prob, depth, index)
        for index, row in enumerate(prefixes)
        for depth, prob in enumerate(row, start=1)
    )
    num_sequences = len(prefixes)
    best = allocated(prefixes, [0] * num_sequences, seconds)
    limit, most = 1, max(map(len, prefixes), default=0)
    while num_sequences > 1 and limit < most:
        best = _extended(best, [node for node in nodes if node[1] <= limit], seconds)
        limit *= 2
    return _extended(best, nodes, seconds)


def _extended(
    best: Allocation, nodes: Sequence[tuple[float, int, int]], seconds: RoundSeconds
) -> Allocation:
    """The best of `best` and all beginnings of `nodes`, (-P, depth, sequence) in order."""
    num_sequences = len(best.depths)
    tokens, deepest, num_drafting = float(num_sequences), 1, 0
    least, found = best.seconds / best.num_tokens, 0
    result = best
    for count, (lost, depth, _) in enumerate(nodes, start=1):
        if lost == 0:
            break
        tokens -= lost
        if depth == 1:
            num_drafting += 1
        elif depth > deepest:
            deepest = depth
        took = seconds(num_sequences + count, deepest, num_drafting)
        if took < least * tokens:
            least, found = took / tokens, count
            result = Allocation((), tokens, took)
        elif took >= least * (tokens - lost * (len(nodes) - count)):
            # The rest cannot help, even if every later node were as likely as this one, and free.
            break
    if not found:
        return best
    depths = [0] * num_sequences
    for _, _, index in nodes[:found]:
        depths[index] += 1
    return Allocation(tuple(depths), result.num_tokens, result.seconds)


# A depth is left out of the sweep if it promises less than this share of the best so far.
PROMISING = 0.6
# The sweep ends at once if, even with all drafts accepted, goodput stays below this share of plain
# decoding's. A single round, which may have been disturbed, decides that.
HOPELESS = 1 / 3
# The longest draft to try while none pays.
SHORT = 4
# Learning takes time itself, so passes are learnt from together: at least so many, until they took
# so many seconds or are so many; after the first `EARLY` ones, costs from the last of them only.
TOGETHER = 6
TOGETHER_SECONDS = 0.01
MOST_TOGETHER = 48
EARLY = 256
# Costs are updated after each of the first passes, then after so many.
FREQUENT = 32
REFRESH = 64
# While the value of drafts is unknown, one of so many requests drafts.
FEW = 8
# Rounds in a row with plain decoding as the best choice, after which drafting is off.
WITHOUT_GAIN = 64
_REASON = (
    f"{WITHOUT_GAIN} rounds without gain: plain decoding is faster than any tried draft; "
    "drafts are tried again from time to time, for one hundredth of the time"
)


def _of_few(depths: Sequence[int], first: int = 0) -> list[int]:
    """`depths` for one of every `FEW` requests, at least for one, and 0 for the others."""
    step = max(min(FEW, len(depths)), 1)
    return [depth * ((index + first) % step == 0) for index, depth in enumerate(depths)]


@dataclass(frozen=True, slots=True)
class GoodputStats:
    """Statistics of the controller. `probe_share` is the cost of looks as a share of the time since
    the first sweep. `off` is the reason for which nothing is drafted, or ""."""

    costs: CostTable
    is_sweeping: bool
    probe_share: float
    off: str = ""


class GoodputController:
    """Draft lengths from 0 to `k`. A pure function of the traces, and of earlier `costs`, which
    replace the first sweep. With `num_nodes` the longest drafts are trees of so many tokens,
    shorter ones of fewer in proportion.

    With trees, a position of the path costs as many rows as a tree has nodes for each, and P_j is
    the probability that some path is accepted up to position j. A tree gets the least gain of a
    node: the tokens that are written at the present rate in the time of one more node.

    Of passes with several drafters, it learns the drafts of the one called `by`, and looks cost
    half as much, since other exploration adds to it.
    """

    def __init__(
        self, *, k: int, num_nodes: int = 0, costs: CostTable | None = None, by: str = ""
    ) -> None:
        if k < 0:
            raise ContractError("k is at least 0")
        self._by = by
        self._k = k
        self._most = Budget(k, num_nodes=num_nodes)
        # Nodes of the newest trees, in all and per position.
        self._size = FadingMean(1 / 32)
        self._bushiness = FadingMean(1 / 32, max(num_nodes / max(k, 1), 1.0))
        # The value at the last update of costs: those in `_seconds` are of one tree's form.
        self._nodes_per_position = self._bushiness.value or 1.0
        self._acceptance = Acceptance(k)
        self._meter = CostMeter(costs)
        self._costs = costs or ASSUMED
        self._seconds: dict[tuple[int, int, int, int], float] = {}
        self._sweep = DepthSweep(sweep_depths(k) if costs is None else ())
        self._probes = Probes(SHARE / 2 if by else SHARE)
        self._open = OpenPasses()
        self._ended: list[tuple[Sequence[RoundTrace], int]] = []
        self._ended_seconds = 0.0
        self._chosen: dict[tuple[int, ...], list[Budget]] = {}
        self._reading = Reading(by)
        self._num_passes = 0
        self._without_gain = 0
        # Requests in flight when drafting was first turned off: only their budgets say so.
        self._informed: frozenset[int] | None = None

    def chosen(self, seq_ids: Sequence[int]) -> list[Budget]:
        """Return the budgets of a round of these, which is not counted."""
        key = tuple(seq_ids)
        # Others may have written tokens since the last update.
        state = (*key, sum([self._reading.is_due(seq_id) for seq_id in key]))
        found = self._chosen.get(state)
        if found is None:
            found = self._chosen[state] = self._choose(key)
        return found

    def repays(
        self, seq_ids: Sequence[int], depths: Mapping[int, int], *, looked: float, num_looked: int
    ) -> bool:
        """Return whether drafts of these `depths` by sequence pay for the time that all `seq_ids`
        wait, with `num_looked` draft tokens of others, of which `looked` will be accepted."""
        num, rows = len(seq_ids), len(seq_ids) + num_looked
        every = self._prefixes([*depths])
        gained = sum(sum(own[:d]) for own, d in zip(every, depths.values(), strict=True))
        most, more = max(depths.values()), sum(depths.values())
        without = self._costs.round_seconds(num, rows, 0, 0)
        took = self._costs.round_seconds(num, rows + more, most, len(depths))
        return (num + looked + gained) * without > (num + looked) * took

    def promise(self, seq_ids: Sequence[int]) -> float:
        """Return how many times as fast as plain decoding drafts of the best length are expected
        to be, the same for all: below 1 where none pays."""
        prefixes = self._prefixes(seq_ids)
        plain, *tried = [self._uniform(prefixes, depth) for depth in sweep_depths(self._k)]
        if not tried or plain.seconds <= 0:
            return 1.0
        return max(one.goodput for one in tried) / plain.goodput

    @property
    def costs(self) -> CostTable:
        return self._costs

    def look(self) -> None:
        """Begin a look at short drafts, if there is none."""
        if not self.is_trying:
            self._probes.begin(is_plain=True)
            self._chosen.clear()

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        key, found = tuple(seq_ids), self.chosen(seq_ids)
        self._count_gain(key, drafts=any(budget.depth for budget in found))
        informed = self._informed
        if not informed or informed.isdisjoint(key):
            return list(found)
        pairs = zip(key, found, strict=True)
        return [replace(one, why=_REASON) if seq_id in informed else one for seq_id, one in pairs]

    def observe(self, trace: RoundTrace) -> None:
        traces = self._open.add(trace)
        if traces is not None:
            self.learn(traces)

    def learn(self, traces: Sequence[RoundTrace], *, now: bool = False) -> bool:
        """Learn a pass of all its `traces`, together with a few more unless `now`. Returns whether
        something was learnt."""
        self._ended.append((traces, self._reading.ended(traces)))
        self._ended_seconds += seconds_of(traces[0])
        num_ended = len(self._ended)
        is_long = self._ended_seconds >= TOGETHER_SECONDS or num_ended == MOST_TOGETHER
        # The next drafts for a hard request would cost as much.
        is_refused = any(
            one.num_drafted and not one.num_accepted and self._acceptance.is_new(one.seq_id)
            for one in traces
        )
        now = now or self.is_trying or ((num_ended >= TOGETHER or is_refused) and is_long)
        if now:
            self._learn_all()
        return now

    def passed(self, traces: Sequence[RoundTrace]) -> None:
        """Count a pass that only others drafted for, whose tokens this drafter has not read: looks
        may cost a share of its time too."""
        self._probes.total += seconds_of(traces[0])
        self._reading.ended(traces)

    def stats(self) -> GoodputStats:
        probes = self._probes
        share = probes.spent / probes.total if probes.total else 0.0
        off = _REASON if self._without_gain >= WITHOUT_GAIN else ""
        sweeping = self._sweep.depth is not None
        return GoodputStats(self._costs, sweeping, share, off)

    def _count_gain(self, seq_ids: tuple[int, ...], *, drafts: bool) -> None:
        """Count a round of these. Rounds of looks do not count until the looks have ended."""
        if self.is_trying or not self._k:
            return
        self._without_gain = 0 if drafts else self._without_gain + 1
        if self._without_gain == WITHOUT_GAIN and self._informed is None:
            self._informed = frozenset(seq_ids)
            _log.warning("Drafting is off: %s.", _REASON)

    def _choose(self, seq_ids: tuple[int, ...]) -> list[Budget]:
        prefixes = self._prefixes(seq_ids)
        depths = self._depths(seq_ids, prefixes)
        most = self._expecting(prefixes, depths)
        return [most.cut(depth) for depth in depths]

    def _expecting(self, prefixes: Sequence[Sequence[float]], depths: Sequence[int]) -> Budget:
        """The largest budget, with the expected gain of such `depths`, if costs were measured."""
        reason: Reason = "gain"
        if self.is_trying:
            reason = "look" if self._sweep.depth is None else "trial"
        unknown = replace(self._most, choice=Choice(reason))
        if self._costs is ASSUMED:
            return unknown
        one = allocated(prefixes, depths, self._seconds_of(prefixes))
        plain = self._uniform(prefixes, 0)
        if one.seconds <= 0:
            return unknown
        gain = one.goodput * plain.seconds / plain.num_tokens
        choice = Choice(reason, one.num_tokens, one.seconds, gain)
        size, price = self._size.value, None
        if size and self._sweep.depth is None:
            num_drafting = sum(depth > 0 for depth in depths)
            price = one.goodput * self._costs.token_seconds(len(depths), num_drafting, size)
        return replace(self._most, choice=choice, price=price)

    @property
    def is_trying(self) -> bool:
        """True in the first sweep and in looks."""
        return self._sweep.depth is not None or self._probes.is_on

    def _learn_all(self) -> None:
        for index, (traces, num_unread) in enumerate(self._ended, start=1):
            self._learn(traces, num_unread, newest=index == len(self._ended))
        self._ended.clear()
        self._ended_seconds = 0.0
        self._chosen.clear()

    def _depths(self, seq_ids: Sequence[int], prefixes: Sequence[Sequence[float]]) -> Sequence[int]:
        if self._sweep.depth is not None:
            return _of_few([self._sweep.depth] * len(seq_ids))
        best = self._best(seq_ids, prefixes)
        return self._probing(best, prefixes) if self._probes.is_on else best.depths

    def _best(self, seq_ids: Sequence[int], prefixes: Sequence[Sequence[float]]) -> Allocation:
        """The best lengths. Drafters read a text only if that pays for itself."""
        best = best_allocation(prefixes, self._seconds_of(prefixes))
        drafting = zip(seq_ids, best.depths, strict=True)
        seconds = self._reading.seconds([seq_id for seq_id, depth in drafting if depth])
        if not seconds:
            return best
        known = [
            () if self._reading.is_due(seq_id) else row
            for seq_id, row in zip(seq_ids, prefixes, strict=True)
        ]
        without = best_allocation(known, self._seconds_of(known))
        num_tokens = self._reading.horizon * len(seq_ids)
        pays = num_tokens / best.goodput + seconds < num_tokens / without.goodput
        return best if pays else without

    def _probing(self, best: Allocation, prefixes: Sequence[Sequence[float]]) -> Sequence[int]:
        """Lengths for a look: other than the present ones."""
        if best.is_plain:
            tried = [self._uniform(prefixes, d) for d in sweep_depths(min(self._k, SHORT)) if d]
            depths = max(tried, key=lambda one: one.goodput).depths if tried else best.depths
            return _of_few(depths, self._probes.num_started)
        deeper = [min(depth + depth // 2 + 1, self._k) for depth in best.depths]
        if self._probes.looks_deeper and sum(deeper) > sum(best.depths):
            return deeper
        return [0] * len(best.depths)

    def _learn(self, traces: Sequence[RoundTrace], num_unread: int, *, newest: bool) -> None:
        rounds = [trace for trace in traces if trace.num_emitted]
        if not rounds:
            return
        own = [
            one for one in rounds if not one.num_drafted or one.drafter == (self._by or one.drafter)
        ]
        drafting = [trace for trace in own if trace.num_drafted]
        caught_up = not num_unread
        if newest or self._num_passes < EARLY:
            self._meter.observe(traces, caught_up=caught_up and len(own) == len(rounds))
        strangers = [trace for trace in own if not self._acceptance.knows(trace.seq_id)]
        for trace in own:
            self._acceptance.observe(trace.seq_id, trace.num_positions, trace.num_accepted)
        for trace in drafting if self._most.num_nodes else ():
            self._size.add(trace.num_drafted)
            self._bushiness.add(trace.num_drafted / trace.num_positions)
        if num_unread and drafting:
            depth = max(trace.num_drafted for trace in drafting)
            due = self._costs.draft_seconds(depth, len(drafting))
            self._reading.add(rounds[0].draft_seconds - due, num_unread)
        self._num_passes += 1
        if self._num_passes < FREQUENT or self._num_passes % REFRESH == 0:
            self._costs = self._meter.table() or self._costs
            self._nodes_per_position = self._bushiness.value or 1.0
            self._seconds.clear()
        telling = not any(trace.num_prompt_tokens for trace in traces)
        if self._sweep.depth is not None:
            self._sweep_on(rounds, telling=telling and caught_up)
        else:
            may_begin = newest and self._probes.is_due(urgent=bool(strangers))
            self._probe_on(rounds, telling=telling, may_begin=may_begin)

    def _sweep_on(self, rounds: Sequence[RoundTrace], *, telling: bool) -> None:
        """Go on to the next promising depth; end if none can pay."""
        sweep = self._sweep
        is_done = sweep.advance(telling=telling)
        if not is_done and not telling:
            return
        certain = [[1.0] * self._k for _ in rounds]
        most = max((self._uniform(certain, d).goodput for d in sweep.depths if d), default=0.0)
        if most < HOPELESS * self._uniform(certain, 0).goodput:
            sweep.end()
        if not is_done:
            return
        prefixes = self._prefixes([trace.seq_id for trace in rounds])
        least = PROMISING * best_allocation(prefixes, self._seconds_of(prefixes)).goodput
        while sweep.depth and self._uniform(prefixes, sweep.depth).goodput < least:
            sweep.skip()

    def _probe_on(self, rounds: Sequence[RoundTrace], *, telling: bool, may_begin: bool) -> None:
        probes = self._probes
        shared = rounds[0]
        seconds = seconds_of(shared)
        due = seconds
        if not probes.is_on and not may_begin:
            probes.book(seconds, due)
            probes.advance(is_plain=False)
            return
        seq_ids = [trace.seq_id for trace in rounds]
        best = self._best(seq_ids, self._prefixes(seq_ids))
        if telling:
            # Reading a prompt is no cost of a look.
            due = sum(trace.num_emitted for trace in rounds) / best.goodput
        probes.book(seconds, due)
        if probes.is_on or not (best.is_plain or probes.is_due(urgent=False)):
            probes.advance(is_plain=best.is_plain)
        else:
            probes.begin(is_plain=best.is_plain)

    def _uniform(self, prefixes: Sequence[Sequence[float]], depth: int) -> Allocation:
        return allocated(prefixes, [depth] * len(prefixes), self._seconds_of(prefixes))

    def _prefixes(self, seq_ids: Sequence[int]) -> list[list[float]]:
        return [
            [kept for kept in self._acceptance.prefixes(seq_id) if kept >= LEAST_WEIGHED]
            for seq_id in seq_ids
        ]

    def _seconds_of(self, prefixes: Sequence[Sequence[float]]) -> RoundSeconds:
        return partial(self._round_seconds, len(prefixes))

    def _round_seconds(
        self, num_sequences: int, num_rows: int, depth: int, num_drafting: int
    ) -> float:
        key = (num_sequences, num_rows, depth, num_drafting)
        seconds = self._seconds.get(key)
        if seconds is None:
            # Costs are by drafted tokens, of which a tree has more than positions.
            rows = num_sequences + self._num_nodes(num_rows - num_sequences)
            deepest = self._num_nodes(depth)
            seconds = self._costs.round_seconds(num_sequences, rows, deepest, num_drafting)
            self._seconds[key] = seconds
        return seconds

    def _num_nodes(self, num_positions: int) -> int:
        """Draft tokens for so many positions in all."""
        return round(num_positions * self._nodes_per_position)
