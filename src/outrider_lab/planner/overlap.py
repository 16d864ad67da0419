"""Forecasts of other arrangements: the best draft tree, drafting ahead, parallel lanes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from outrider.core.tree import ROW_TILE, Chances, best_shape, with_siblings
from outrider.plugins.lanes.ahead.fan_out import Misses, expected_hit_rate, optimal
from outrider_lab.planner.calibration import PLAIN, Calibration, DrafterCosts, RoundStats
from outrider_lab.planner.rounds import DecodeLoad, Rates, RoundForecast, forecast, round_times

# Nodes of the largest tree that is tried.
MOST_NODES = 63


def chances_of(drafter: DrafterCosts, rates: Rates, depth: int) -> Chances:
    """Return acceptance probabilities [position][rank], counted or guessed, down to `depth`."""
    if drafter.chances:
        return drafter.chances[:depth]
    return with_siblings([rates.kept_at(position) for position in range(1, depth + 1)])


def tree_stats(chances: Chances, num_nodes: int) -> RoundStats:
    """Return the statistics of rounds that draft the best tree of at most `num_nodes`."""
    shape = best_shape(chances, num_nodes)
    if not len(shape):
        return RoundStats((), 0.0, 0.0)
    kept = [0.0] * (max(shape.depths) + 1)
    for depth, worth in zip(shape.depths, shape.worths, strict=True):
        kept[depth] += worth
    return RoundStats(tuple(min(1.0, one) for one in kept), 1.0, float(len(shape)))


def sizes_to_try(batch: int, *, least: int, most: int = MOST_NODES) -> list[int]:
    """Return tree sizes from `least` to `most` that fill row tiles with `batch` sequences."""
    edges: set[int] = set()
    rows = ROW_TILE
    while rows // batch - 1 <= most:
        edges.add(rows // batch - 1)
        rows += ROW_TILE
    return sorted(size for size in {*edges, most} if least <= size <= most)


@dataclass(frozen=True, slots=True)
class BestTree:
    """The best tree of a drafter: at most `num_nodes` nodes, at most `depth` deep. `speed_up` is
    that of long texts, with `tokens` a round; `is_guess` means siblings' gain was never counted."""

    drafter: str
    num_nodes: int
    depth: int
    tokens: float
    speed_up: float
    is_guess: bool


def best_tree(
    calibration: Calibration, drafter: DrafterCosts, load: DecodeLoad, rates: Rates, *, depth: int
) -> BestTree | None:
    """Return the tree with the largest speed-up, of more nodes than a chain of `depth`. Choosing
    its nodes is assumed to cost no more than drafting the chain.

    The best tree of N nodes has the N worthiest (core/tree.py), so position j is accepted with the
    sum of the worths of its nodes at depth j. Rows cost by whole tiles, so only sizes that end at
    the edge of a tile are tried: with b sequences the largest N for which b (N + 1) rows still fit.
    If only first candidates were counted, the gain of their siblings is guessed.
    """
    chances = chances_of(drafter, rates, depth)
    found: list[BestTree] = []
    for size in sizes_to_try(load.batch, least=len(chances) + 1):
        stats = tree_stats(chances, size)
        speed_up = forecast(calibration, drafter, load, stats, depth=len(stats.kept)).speed_up
        guess = not drafter.chances
        found.append(BestTree(drafter.name, size, len(stats.kept), stats.tokens, speed_up, guess))
    return max(found, key=lambda one: one.speed_up, default=None)


@dataclass(frozen=True, slots=True)
class AheadTimes:
    """Times of drafting ahead in units of T_verify; `batch` sequences verify together.

    While the target verifies a round, a drafter with resources of its own prepares for the verdicts
    that it predicts. In units of T_verify, with E tokens a round after a hit or a miss, T_p the
    time of drafting ahead, T_b that of drafting after a miss and s of handing over,

        S = (p E_hit + (1 - p) E_miss) / (p max(1, T_p) + (1 - p)(1 + T_b) + s)

    tokens in a time of T_verify. In a batch of b that verifies together a round waits for its
    slowest row: the denominator has p^b instead of p, the numerator still p. (Kumar, Dao, May,
    "Speculative speculative decoding", Theorem 7, which has s = 0.)

    If drafter and target share one memory, each slows the other down: of the time in which they run
    together a share `contention` is lost. It is 0 with a device each, and 1 if running at once
    gains nothing.
    """

    p_hit: float
    tokens_hit: float
    tokens_miss: float
    ahead: float
    fallback: float
    batch: float = 1.0
    sync: float = 0.0
    contention: float = 0.0

    @property
    def tokens(self) -> float:
        """Tokens of a round of one sequence."""
        return self.p_hit * self.tokens_hit + (1 - self.p_hit) * self.tokens_miss

    @property
    def round_time(self) -> float:
        """Duration of a round of a batch that verifies together."""
        all_hit = self.p_hit**self.batch
        lost = self.contention * min(1.0, self.ahead)
        taken = all_hit * max(1.0, self.ahead) + (1 - all_hit) * (1 + self.fallback)
        return taken + lost + self.sync

    @property
    def speed(self) -> float:
        """Tokens of one sequence in a time of T_verify."""
        return self.tokens / self.round_time


def steady_hits(after_hit: float, after_miss: float) -> float:
    """The share of rounds that are hits in the long run; 1 if neither ever changes.

    Hits come in runs: after a hit the draft was a full one, and the next verdict is more likely to
    be predicted. With p_hh the share of hits after a hit and p_mh after a miss, in the long run

        p = p_mh / (1 - p_hh + p_mh)
    """
    leaving = 1 - after_hit + after_miss
    return after_miss / leaving if leaving else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadWays:
    """Parameters of drafting ahead. `contention` is what lanes lose to each other
    (`AheadTimes`), `sync` the seconds of a hand-over; a given `p_hit` replaces `misses`."""

    fan_out: int = 16
    misses: Misses = field(default_factory=Misses)
    contention: float = 1.0
    sync: float = 0.0
    p_hit: float | None = None


@dataclass(frozen=True, slots=True)
class AheadForecast:
    """A forecast of drafting ahead. `hides` says whether the work ahead fits into a verification,
    `most_hidden` the largest K for which it does (None: any). `jit_below` is the batch b* below
    which fallback jit is better, None for work that is not hidden or lanes on one device."""

    fallback: str
    times: AheadTimes
    speed_up: float
    hides: bool
    most_hidden: int | None
    jit_below: float | None


def outcome_chances(stats: RoundStats) -> list[float]:
    """Return P(n) for n = 0..K accepted tokens."""
    kept = [1.0, *stats.kept, 0.0]
    return [max(0.0, kept[n] - kept[n + 1]) for n in range(len(stats.kept) + 1)]


def predicted_share(stats: RoundStats, ways: AheadWays) -> float:
    """Return the share of verdicts that are among the best `ways.fan_out` to prepare for."""
    if ways.p_hit is not None:
        return ways.p_hit
    chances = outcome_chances(stats)
    return expected_hit_rate(optimal(ways.fan_out, chances, ways.misses), chances, ways.misses)


def ahead(
    drafter: DrafterCosts, load: DecodeLoad, found: RoundForecast, ways: AheadWays
) -> AheadForecast:
    """Return the forecast with the better fallback; `found` is that of rounds in turns.

    Drafting ahead (`AheadTimes`) takes from a calibration, in units of T_verify,

        T_p   one step over the draft that is being verified, and K steps of F branches a sequence
        T_b   a draft after a miss: that of a round in turns (fallback jit), or nothing (none)
        p     the share of predicted verdicts: F branches shared out in the best way

    With fallback jit a draft after a miss is like any other. With none it is empty: the next
    verdict is one token, all F branches go to it, and hits come in runs.
    """
    depth = len(found.stats.kept)
    verify = found.times.verify + found.times.host
    context = load.batch * load.context
    branches = drafter.seconds(depth, load.batch * ways.fan_out, ways.fan_out * context)
    trunk = drafter.seconds(1, load.batch, context)
    ahead_share = (trunk + branches) / verify
    hit = predicted_share(found.stats, ways)
    jit = AheadTimes(
        p_hit=hit,
        tokens_hit=found.stats.tokens,
        tokens_miss=found.stats.tokens,
        ahead=ahead_share,
        fallback=found.times.draft / verify,
        batch=load.batch,
        sync=ways.sync / verify,
        contention=ways.contention,
    )
    hits = steady_hits(hit, predicted_share(PLAIN, ways))
    none = replace(jit, p_hit=hits, tokens_miss=1.0, fallback=0.0)
    name, times = max((("jit", jit), ("none", none)), key=lambda one: one[1].speed)
    apart = ahead_share <= 1 and not ways.contention and not ways.sync
    turn = crossover_batch(hit, jit.tokens, none.tokens, jit.fallback)
    return AheadForecast(
        fallback=name,
        times=times,
        speed_up=times.speed * found.plain.total / verify,
        hides=ahead_share <= 1,
        most_hidden=hide_limit(max(0.0, verify - trunk), branches / depth),
        jit_below=turn if apart and math.isfinite(turn) else None,
    )


def lanes(
    calibration: Calibration,
    drafter: DrafterCosts,
    load: DecodeLoad,
    stats: RoundStats,
    *,
    contention: float,
) -> float:
    """Return the seconds in which each sequence of the batch has a round, with one lane that drafts
    and one that verifies. Both halves must draft, so with one sequence it is a round in turns.

    Lanes (pdv) draft for one half of a batch while the other is verified: a cycle of both halves
    takes twice the slower lane, and `contention` times twice the faster one if they share a memory.
    On one device nothing is gained that is not lost in the other lane.
    """
    depth = len(stats.kept)
    if load.batch < 2:
        return round_times(calibration, drafter, load, stats, depth=depth).total
    cycle = 0.0
    for half in (load.batch // 2, load.batch - load.batch // 2):
        times = round_times(
            calibration, drafter, DecodeLoad(half, load.context), stats, depth=depth
        )
        verify = times.verify + times.host
        cycle += max(times.draft, verify) + contention * min(times.draft, verify)
    return cycle


def hide_limit(verify_seconds: float, step_seconds: float) -> int | None:
    """Return the largest K whose steps fit into a verification; None if a step takes no time.

    Drafting ahead gains only what it hides, so one draft must fit into one verification: K + 1
    steps of all branches, which bounds K by T_verify over the time of a step.
    """
    return math.floor(verify_seconds / step_seconds) if step_seconds > 0 else None


def crossover_batch(hit: float, jit_tokens: float, none_tokens: float, fallback: float) -> float:
    """Return b*, below which drafting after a miss (`fallback`, in T_verify) is better than going
    on without a draft; infinite if it always is, 0 if it never is.

    Which fallback is better changes at a batch b*, since with jit a round waits for one miss of b:

        b* = ln(1 - (G_jit / G_none - 1) / T_b) / ln p,     G = p E_hit + (1 - p) E_miss
    """
    left = 1 - (jit_tokens / none_tokens - 1) / fallback if fallback else 0.0
    if jit_tokens <= none_tokens:
        return 0.0
    if left <= 0 or hit >= 1:
        return math.inf
    return math.log(left) / math.log(hit) if hit > 0 else 0.0
