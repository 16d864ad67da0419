"""Candidates of a plan: expected speed-up and interval of a drafter, K, tree and engine.

The speed-up is that of a whole job: `batch` texts of `new_tokens` each, from the first round to the
last, at the mean context. Its interval has two parts: uncertain acceptance (draws of
rounds.py), and scattered times, normal on a log scale with 1.4826 times their median deviation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from outrider.core.errors import ConfigError, ContractError, did_you_mean
from outrider.core.plugins import KINDS
from outrider.estimate.forecast import TO_DEVIATION
from outrider_lab.planner.calibration import Calibration, DrafterCosts, RoundStats
from outrider_lab.planner.overlap import AheadWays, BestTree, ahead, chances_of, lanes, tree_stats
from outrider_lab.planner.rounds import (
    Belief,
    DecodeLoad,
    Rates,
    binomial,
    forecast,
    plain_times,
    round_stats,
    round_times,
    texts_differ,
)

# The end of a text for which rounds are computed one by one, in tokens and in full rounds.
_COUNTED_TOKENS = 64
_COUNTED_ROUNDS = 6
# The normal distribution is sampled up to so many deviations, at so many points.
_FAR = 5
_MOST_LOOKS = 64
# Numbers of running texts up to here are enumerated; of larger ones, the values at these points of
# a normal distribution stand for a seventh each.
_COUNTED_BATCH = 48
_NODES = (-1.4652, -0.7916, -0.3661, 0.0, 0.3661, 0.7916, 1.4652)
_SURE = 1e-9


def seconds_in_step(num_tokens: int, stats: RoundStats, seconds: Callable[[int], float]) -> float:
    """Return the expected seconds until a text of `num_tokens` is done; `seconds` gives those of a
    round by its draft depth. A batch whose texts always have equal lengths takes as long.

    The last rounds of a text draft no more tokens than may still be written, and emit less than E.
    With r tokens to go a round drafts c = min(K, r - 1), so the expected seconds are

        V(r) = T(b, c) + sum over n of P(n kept of c) V(r - n - 1),    V(0) = 0
    """
    most = len(stats.kept)
    ahead = [1.0, *stats.kept, 0.0]
    counted = min(num_tokens, max(_COUNTED_TOKENS, _COUNTED_ROUNDS * (most + 1)))
    taken = [seconds(depth) for depth in range(min(most, counted - 1) + 1)]
    times = [0.0]
    for left in range(1, counted + 1):
        depth = min(most, left - 1)
        after = math.fsum(
            (ahead[kept] - ahead[kept + 1]) * times[left - kept - 1] for kept in range(depth)
        )
        times.append(taken[depth] + after + ahead[depth] * times[left - depth - 1])
    return times[-1] + (num_tokens - counted) / stats.tokens * taken[-1]


def desync(
    num_tokens: int,
    batch: int,
    stats: RoundStats,
    seconds: Callable[[int], float],
    *,
    texts_differ: float = 0.0,
) -> float:
    """Return how much longer a batch takes than one whose texts always have equal lengths, as a
    factor from 1 up. `seconds` gives those of a round by the number of running texts.
    `texts_differ` is the relative deviation of tokens a round between texts.

    Plain decoding gives every text one token a round, so all end together. With drafts some texts
    end earlier, and rounds go on with the remaining ones, which is less efficient. The number of
    rounds R of a text of n tokens is nearly normal, of mean (n + E[X^2] / 2E[X] - 1/2) / E[X] and
    variance n Var[X] / E[X]^3, X being the tokens of a round (renewal theory; Feller 1971, XI.6 and
    XI.5), and wider where texts differ in acceptance. In round r a binomial (b, P(R >= r)) number
    of texts is running, and the batch takes the sum of the mean T over all r. The excess over the
    same rounds in full batches is how much longer a job takes than V(n) of a batch in step.
    """
    variance, mean = stats.variance, stats.tokens
    spread = num_tokens * variance / mean**3 + (texts_differ * num_tokens / mean) ** 2
    if batch == 1 or spread <= 0:
        return 1.0
    expected = (num_tokens + (variance + mean**2) / (2 * mean) - 0.5) / mean
    deviation = math.sqrt(spread)
    cost = cache(seconds)
    first = max(0, math.floor(expected - _FAR * deviation))
    last = math.ceil(expected + _FAR * deviation)
    step = max(1.0, (last - first) / _MOST_LOOKS)
    total = equal = first * cost(batch)
    at = first + step / 2
    while at < last:
        alive = 0.5 * math.erfc((at - expected) / (deviation * math.sqrt(2)))
        total += step * math.fsum(p * cost(live) for live, p in _live(batch, alive))
        equal += step * alive * cost(batch)
        at += step
    return max(1.0, total / equal) if equal else 1.0


def _live(batch: int, alive: float) -> list[tuple[int, float]]:
    """Return numbers of running texts with their probabilities, but for 0, which takes no time."""
    if batch <= _COUNTED_BATCH:
        chances = enumerate(binomial(batch, alive))
        return [(live, chance) for live, chance in chances if live and chance > _SURE]
    deviation = math.sqrt(batch * alive * (1 - alive))
    near = (round(batch * alive + z * deviation) for z in _NODES)
    return [(min(live, batch), 1 / len(_NODES)) for live in near if live > 0]


ENGINES = ("single", "pd", "pdv", "ssd")
_OUTSIDE = 0.025
# Draws of times alone, for rates that are assumed rather than counted.
_SUPPOSED_DRAWS = 400


@dataclass(frozen=True, slots=True)
class DraftOption:
    """A drafter with drafts of up to `k` tokens, or trees so deep of more, `num_nodes`."""

    drafter: str
    k: int
    num_nodes: int = 0

    def __post_init__(self) -> None:
        if self.k < 1 or self.num_nodes < 0:
            raise ConfigError(
                f"a candidate drafts {self.k} tokens deep, {self.num_nodes} nodes.",
                hint="give a K from 1 up; plain decoding is always compared",
            )

    @property
    def words(self) -> str:
        tree = f", trees of {self.num_nodes} nodes" if self.num_nodes > self.k else ""
        return f"{self.drafter} with K = {self.k}{tree}"


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job of `batch` texts at once, with prompts of `context` tokens and `new_tokens` written for
    each. `texts_differ` is the relative deviation between texts of their tokens a round; None takes
    it from the drafter's counts."""

    batch: int = 1
    context: int = 0
    new_tokens: int = 128
    texts_differ: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1 or self.context < 0 or self.new_tokens < 1:
            raise ConfigError(
                f"no plan for a batch of {self.batch} with {self.context} tokens of context and "
                f"{self.new_tokens} new ones.",
                hint="give a batch and new tokens from 1 up",
            )

    @property
    def load(self) -> DecodeLoad:
        """The load at the mean context: costs are linear in it."""
        return DecodeLoad(self.batch, self.context + self.new_tokens / 2)

    @property
    def most_tokens(self) -> int:
        """Tokens of all texts at their end."""
        return self.batch * (self.context + self.new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A candidate with its forecast on one engine. Seconds are those of a round of the whole batch.
    `draft_over_plain` and `draft_over_verify` are both meanings of T_SD, `by_formula` is E / (1 +
    T_SD), `steady` the speed-up of long texts. `low` and `high` bound 95 %. `memory_bytes` is None
    if unknown, and `joules` (a token) without an energy or if drafts are made ahead. `fallback`,
    `p_hit`, `most_hidden` and `jit_below` belong to drafting ahead (`AheadForecast`)."""

    drafter: str
    k: int
    num_nodes: int
    engine: str
    tokens: float
    plain_seconds: float
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    draft_over_plain: float
    draft_over_verify: float
    by_formula: float
    steady: float
    speed_up: float
    low: float
    high: float
    tokens_per_second: float
    memory_bytes: int | None = None
    joules: float | None = None
    fallback: str | None = None
    p_hit: float | None = None
    most_hidden: int | None = None
    jit_below: float | None = None

    @property
    def candidate(self) -> DraftOption:
        return DraftOption(self.drafter, self.k, self.num_nodes)

    @property
    def words(self) -> str:
        return self.candidate.words


def expected_stats(drafter: DrafterCosts, belief: Belief, candidate: DraftOption) -> RoundStats:
    """Return the expected rounds: as replayed, if they were; otherwise by position."""
    if candidate.num_nodes <= candidate.k <= len(drafter.laws):
        return drafter.laws[candidate.k - 1]
    return stats_of(drafter, belief.mean, candidate)


def stats_of(drafter: DrafterCosts, rates: Rates, candidate: DraftOption) -> RoundStats:
    """Return the expected rounds by position."""
    if candidate.num_nodes > candidate.k:
        return tree_stats(chances_of(drafter, rates, candidate.k), candidate.num_nodes)
    return round_stats(rates, candidate.k)


def plain_job_seconds(calibration: Calibration, job: PlannedJob) -> float:
    """Return the seconds of plain decoding, in which all texts end together."""
    return job.new_tokens * plain_times(calibration, job.load).total


def job_seconds(
    calibration: Calibration, drafter: DrafterCosts, job: PlannedJob, stats: RoundStats
) -> float:
    """Return the seconds of a job from the first round to the last, in turns."""
    depth = len(stats.kept)

    def shallower(most: int) -> float:
        cut = stats.cut(most)
        return round_times(calibration, drafter, job.load, cut, depth=most).total

    def fewer(live: int) -> float:
        load = DecodeLoad(live, job.load.context)
        return round_times(calibration, drafter, load, stats, depth=depth).total

    seconds = seconds_in_step(job.new_tokens, stats, shallower)
    if job.batch == 1:
        return seconds
    differ = job.texts_differ
    if differ is None:
        differ = texts_differ(drafter.requests, depth)
    return seconds * desync(job.new_tokens, job.batch, stats, fewer, texts_differ=differ)


def gain(
    calibration: Calibration, drafter: DrafterCosts, job: PlannedJob, stats: RoundStats
) -> float:
    """Return the speed-up of a job over plain decoding of it."""
    return plain_job_seconds(calibration, job) / job_seconds(calibration, drafter, job, stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Engines to consider, and what is known of lanes. `ahead` names the drafters that can draft
    ahead of a verdict."""

    names: tuple[str, ...] = ENGINES
    ways: AheadWays = field(default_factory=AheadWays)
    ahead: tuple[str, ...] = field(
        default_factory=lambda: tuple(k.name for k in KINDS.values() if k.drafts_ahead)
    )

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in ENGINES:
                raise ConfigError(
                    f"no engine is called {name!r}.", hint=did_you_mean(name, ENGINES)
                )


def options(
    calibration: Calibration,
    drafter: DrafterCosts,
    belief: Belief,
    candidate: DraftOption,
    job: PlannedJob,
    *,
    engines: Engines,
) -> list[Option]:
    """Return an option for each of `engines` that can run the candidate."""
    stats = expected_stats(drafter, belief, candidate)
    cost = forecast(calibration, drafter, job.load, stats, depth=len(stats.kept))
    speed_up = gain(calibration, drafter, job, stats)
    low, high = _interval(drafter, belief, candidate, calibration.scatter)
    base = Option(
        drafter=candidate.drafter,
        k=candidate.k,
        num_nodes=candidate.num_nodes,
        engine="single",
        tokens=stats.tokens,
        plain_seconds=cost.plain.total,
        draft_seconds=cost.times.draft,
        verify_seconds=cost.times.verify,
        host_seconds=cost.times.host,
        draft_over_plain=cost.draft_over_plain,
        draft_over_verify=cost.draft_over_verify,
        by_formula=cost.speed_up_if_free,
        steady=cost.speed_up,
        speed_up=speed_up,
        low=speed_up * low,
        high=speed_up * high,
        tokens_per_second=speed_up * job.batch / cost.plain.total,
        memory_bytes=memory_bytes(calibration, drafter, job),
    )
    made: list[Option] = []
    for name in engines.names:
        if name in ("single", "pd"):
            # No prompts arrive while a job decodes, so a lane for them changes nothing.
            made.append(replace(base, engine=name))
        elif name == "pdv":
            cycle = lanes(calibration, drafter, job.load, stats, contention=engines.ways.contention)
            made.append(_scaled(base, cost.times.total / cycle, engine=name))
        elif candidate.drafter in engines.ahead:
            best = ahead(drafter, job.load, cost, engines.ways)
            option = _scaled(base, best.speed_up / cost.speed_up, engine=name)
            made.append(
                replace(
                    option,
                    fallback=best.fallback,
                    p_hit=best.times.p_hit,
                    most_hidden=best.most_hidden,
                    jit_below=best.jit_below,
                )
            )
    return made


def memory_bytes(
    calibration: Calibration, drafter: DrafterCosts | None, job: PlannedJob
) -> int | None:
    """Return the bytes of weights and of all final keys and values; None if unknown."""
    if not calibration.memory_bytes:
        return None
    needed = calibration.memory_bytes + job.most_tokens * calibration.kv_bytes_per_token
    if drafter is not None:
        needed += drafter.memory_bytes + job.most_tokens * drafter.kv_bytes_per_token
    return needed


def _scaled(base: Option, factor: float, *, engine: str) -> Option:
    return replace(
        base,
        engine=engine,
        steady=base.steady * factor,
        speed_up=base.speed_up * factor,
        low=base.low * factor,
        high=base.high * factor,
        tokens_per_second=base.tokens_per_second * factor,
    )


def _interval(
    drafter: DrafterCosts, belief: Belief, candidate: DraftOption, scatter: float
) -> tuple[float, float]:
    """Return the factors of the speed-up between which 95 % of draws lie."""
    tokens = stats_of(drafter, belief.mean, candidate).tokens
    draws = [stats_of(drafter, rates, candidate).tokens / tokens for rates in belief.draws]
    deviation = TO_DEVIATION * scatter
    if not draws and not deviation:
        return 1.0, 1.0
    chance = random.Random(len(draws))
    noisy = sorted(
        draw * math.exp(deviation * chance.gauss(0, 1)) for draw in draws or [1.0] * _SUPPOSED_DRAWS
    )
    last = len(noisy) - 1
    return noisy[round(_OUTSIDE * last)], noisy[round((1 - _OUTSIDE) * last)]


@dataclass(frozen=True, slots=True)
class Ends:
    """The smallest batch and context at which the best option, run in turns, no longer pays; None
    if it pays throughout the searched range. Passes of more than `most_rows` were not measured.
    `in_turns` is its speed-up for the requested job."""

    batch: int | None
    context: int | None
    most_batch: int
    most_context: int
    most_rows: int
    in_turns: float = 0.0


def explain(
    found: Sequence[Option],
    engines: Sequence[Option],
    ends: Ends,
    *,
    verdict: bool | str,
    job: PlannedJob,
    tree: BestTree | None,
) -> tuple[str, tuple[str, ...]]:
    """Return the verdict in words, and the reasons. `found` has measured options and `engines` the
    best of each engine, both with the best first. A `verdict` in words says why it is unknown."""
    about = [_tokens(found[0]), _time(found[0])] if found else []
    if isinstance(verdict, str):
        return f"Whether to speculate is not known: {verdict}.", tuple(about)
    if not found:
        return "Do not speculate, because no drafter is known for this target.", ()
    best = found[0]
    if not verdict:
        return f"Do not speculate, because {_why_not(best)}.", tuple(about)
    about += [*_range(ends, job, best), *_engines(engines)]
    about += [_ahead(one) for one in engines if one.engine == "ssd"]
    if tree is not None:
        about.append(_tree(tree, best))
    return f"Speculate: {best.words}, engine {best.engine}, {_gain(best)}.", tuple(about)


def doubt_of(found: Sequence[Option], sure: Sequence[Option], others: float | None) -> str | None:
    """Return why it is not known that drafting does not pay: a figure is an estimate, or others had
    the share `others` of the CPU and the gain may lie on either side of 1. None if known."""
    measured = {one.drafter for one in sure}
    estimated = [one for one in found if one.drafter not in measured]
    if estimated:
        best, names = estimated[0], list(dict.fromkeys(one.drafter for one in estimated))
        text = f"figures of {', '.join(names)} are estimates, by which {best.words} would be "
        return f"{text}{best.speed_up:.2f} times as fast ({best.low:.2f} to {best.high:.2f}, 95 %)"
    if others is None or not sure or sure[0].high <= 1:
        return None
    best = sure[0]
    return (
        f"the best, {best.words}, is expected to be {best.speed_up:.2f} times as fast "
        f"({best.low:.2f} to {best.high:.2f}, 95 %), while others used {100 * others:.0f} % of the "
        "CPU"
    )


def _gain(option: Option) -> str:
    return (
        f"{option.speed_up:.2f} times as fast as plain decoding "
        f"({option.low:.2f} to {option.high:.2f}, 95 %)"
    )


def _why_not(best: Option) -> str:
    if best.speed_up <= 1:
        return (
            f"nothing tried pays: the best, {best.words}, would be {best.speed_up:.2f} times as "
            f"fast as plain decoding ({best.low:.2f} to {best.high:.2f}, 95 %)"
        )
    return (
        f"it may cost time: the best, {best.words}, is expected to be {best.speed_up:.2f} times as "
        f"fast, but its interval reaches down to {best.low:.2f}"
    )


def _tokens(best: Option) -> str:
    own = f"{best.tokens - 1:.2f} of its draft"
    return f"A round emits {best.tokens:.2f} tokens: {own} and one of the target."


def _time(best: Option) -> str:
    plain = best.plain_seconds
    total = best.draft_seconds + best.verify_seconds + best.host_seconds
    return (
        f"It takes {total * 1e3:.3g} ms, {total / plain:.2f} plain rounds of {plain * 1e3:.3g} ms: "
        f"{best.draft_seconds / plain:.2f} for drafting, {best.verify_seconds / plain:.2f} for the "
        f"pass that verifies and {best.host_seconds / plain:.2f} for the rest."
    )


def _range(ends: Ends, job: PlannedJob, best: Option) -> list[str]:
    """Return where rounds in turns stop paying; nothing if only lanes pay."""
    lanes = best.engine in ("pdv", "ssd")
    if lanes and ends.in_turns <= 1:
        return []
    batch = (
        f"it pays at any batch up to {ends.most_batch}"
        if ends.batch is None
        else f"it stops paying at a batch of {ends.batch}"
    )
    context = (
        f"it pays with any context up to {ends.most_context} tokens"
        if ends.context is None
        else f"it stops paying at {ends.context} tokens of context"
    )
    text = f"{'In turns, with' if lanes else 'With'} {job.context} tokens of context {batch}; "
    text += f"at a batch of {job.batch} {context}."
    rows = (ends.batch or ends.most_batch) * (1 + max(best.k, best.num_nodes))
    if rows <= ends.most_rows:
        return [text]
    return [f"{text} No pass of more than {ends.most_rows} rows was measured: beyond, a line."]


def _engines(engines: Sequence[Option]) -> list[str]:
    """Return the best of each engine."""
    if len(engines) < 2:
        return []
    parts = (f"{one.engine} {one.speed_up:.2f} ({one.words})" for one in engines)
    return [f"By engine: {'; '.join(parts)}."]


def _ahead(option: Option) -> str:
    """Return what decides whether drafting ahead pays."""
    if option.p_hit is None:
        raise ContractError("there is no p hit")
    after = "with a new draft" if option.fallback == "jit" else "without a draft"
    text = f"Drafting ahead predicts {100 * option.p_hit:.0f} % of verdicts and goes on {after}"
    text += " after the others; "
    most = 0 if option.jit_below is None else math.ceil(option.jit_below) - 1
    if most > 0:
        text += f"a new draft is better up to a batch of {most}; "
    if option.most_hidden is None:
        return f"{text}drafts of any length fit into a verification."
    if not option.most_hidden:
        return f"{text}not even a draft of one token fits into a verification."
    return f"{text}drafts of up to K = {option.most_hidden} fit into a verification."


def _tree(tree: BestTree, best: Option) -> str:
    guess = " The gain of its siblings is guessed, not counted." if tree.is_guess else ""
    return (
        f"In long texts trees of {tree.num_nodes} nodes, {tree.depth} deep, would be "
        f"{tree.speed_up:.2f} times as fast ({tree.tokens:.2f} tokens a round), {best.words} "
        f"{best.steady:.2f}: add --tree-nodes {tree.num_nodes}.{guess}"
    )
