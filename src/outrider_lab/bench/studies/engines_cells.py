"""From the samples of engines to cells and comparisons, and what theory says of the same run.

A cell is an engine at a level: medians over repeats that did not fail, and counts added up over
them. A comparison is the ratio of two engines' rates within visits, as the median over repeats with
its bootstrap interval (measure/frame.py). The best fixed engine of a level is chosen after the
fact, by its median; some of its lead is luck, so comparing `auto` with it is at `auto`'s
disadvantage.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from outrider.core.draft import JobTrace
from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench.load import LoadNumbers, Served
from outrider_lab.bench.studies.engines_plan import AUTO, FIXED, OFF
from outrider_lab.measure.frame import (
    Sample,
    failures,
    good_numbers,
    grouped,
    mean,
    median,
    paired_ratio,
    share,
)
from outrider_lab.metrics.timeline import QUEUES, WAITING, Timeline
from outrider_lab.planner.overlap import AheadTimes

_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample(Sample[LoadNumbers]):
    """One engine at one level and repeat. `usage` sums up what the process used
    (measure/machine.py).
    `digest` is of the token ids, None if a request has none."""

    level: int
    engine: str
    lanes: Timeline | None = None
    usage: Mapping[str, float | None] | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """A sample, its requests, and what lanes did meanwhile."""

    sample: EngineSample
    served: tuple[Served, ...] = ()
    jobs: tuple[JobTrace, ...] = ()

    @property
    def tokens(self) -> dict[int, tuple[int, ...]]:
        """Those of each request that ended well, by its number."""
        return {one.number: one.result.token_ids for one in self.served if one.result is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCell:
    """What is None could not be told. Busy, overlap and window use are those of all lanes in
    metrics/timeline.py; `ahead_over_verify` is T_ahead / T_verify of a round. `queues` are mean
    depths of (prefill, draft, verify), `waiting` that of requests not yet
    admitted, `least_free_tokens` the fewest free tokens that any job found in the arena. CPU
    percent is of one core, GPU percent as measure/machine.py has it."""

    level: int
    engine: str
    num_samples: int
    num_failures: int
    failures: Mapping[str, int]
    tokens_per_second: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    total_mean_ms: float | None
    total_p95_ms: float | None
    round_p50_ms: float | None
    round_p95_ms: float | None
    cumulative_p95_ms: float | None
    draft_ms: float | None
    verify_ms: float | None
    mean_batch: float | None
    acceptance: float | None
    tokens_per_round: float | None
    p_hit: float | None
    hit_tokens_per_round: float | None
    miss_tokens_per_round: float | None
    busy: float | None
    overlap: float | None
    window_use: float | None
    ahead_over_verify: float | None
    queues: Sequence[float] | None
    waiting: float | None
    least_free_tokens: int | None
    cpu_percent: float | None
    gpu_percent: float | None

    @property
    def status(self) -> str:
        """Success, or the commonest reason for failure."""
        if not self.num_failures:
            return "success"
        reason = max(self.failures, key=lambda reason: self.failures[reason])
        return f"failure ({self.num_failures} of {self.num_samples}): {reason}"


# Of numbers, each the median over repeats.
_MEDIANS = (
    *("tokens_per_second", "itl_p50_ms", "itl_p95_ms", "ttft_p50_ms", "ttft_p95_ms"),
    *("total_mean_ms", "total_p95_ms", "round_p50_ms", "round_p95_ms", "cumulative_p95_ms"),
    *("draft_ms", "verify_ms", "mean_batch"),
)
# Of numbers, each added up over repeats.
_COUNTS = (
    *("num_tokens", "num_rounds", "num_drafted", "num_accepted"),
    *("num_hits", "num_misses", "hit_tokens", "miss_tokens"),
)
# Of what lanes did, each the median over repeats.
_LANES: Mapping[str, Callable[[Timeline], float | None]] = {
    "busy": lambda found: found.busy_fraction,
    "overlap": lambda found: found.overlap_fraction,
    "window_use": lambda found: found.window.use if found.window else None,
    "ahead_over_verify": lambda found: found.window.mean_ratio if found.window else None,
    "waiting": lambda found: found.queues[WAITING].mean,
}


def cells(samples: Sequence[EngineSample]) -> list[EngineCell]:
    """By level, and in a level in the order in which engines were measured."""
    groups = grouped(samples, key=lambda sample: (sample.level, sample.engine))
    return [_cell(*key, groups[key]) for key in sorted(groups, key=lambda key: key[0])]


def _cell(level: int, engine: str, samples: Sequence[EngineSample]) -> EngineCell:
    good = good_numbers(samples)
    lanes = [s.lanes for s in samples if s.ok and s.lanes is not None]
    usages = [s.usage for s in samples if s.ok and s.usage]
    reasons = failures(s.reason for s in samples)
    total = {name: sum(getattr(numbers, name) for numbers in good) for name in _COUNTS}
    hits, misses = total["num_hits"], total["num_misses"]
    return EngineCell(
        level=level,
        engine=engine,
        num_samples=len(samples),
        num_failures=sum(reasons.values()),
        failures=reasons,
        **{name: median(getattr(numbers, name) for numbers in good) for name in _MEDIANS},
        acceptance=share(total["num_accepted"], total["num_drafted"]),
        tokens_per_round=share(total["num_tokens"], total["num_rounds"]),
        p_hit=share(hits, hits + misses),
        hit_tokens_per_round=share(total["hit_tokens"], hits),
        miss_tokens_per_round=share(total["miss_tokens"], misses),
        **{name: median(map(value, lanes)) for name, value in _LANES.items()},
        queues=[mean(found.queues[stage].mean for found in lanes) or 0.0 for stage in QUEUES]
        if lanes
        else None,
        least_free_tokens=min(
            (f.least_free_tokens for f in lanes if f.least_free_tokens is not None), default=None
        ),
        cpu_percent=median(usage["cpu_percent"] for usage in usages),
        gpu_percent=median(usage["gpu_percent"] for usage in usages),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComparison:
    """Throughput of `ours` over that of `theirs` at one level, and the same of ITL percentile 95,
    where below 1 is better. `role` says what the comparison is for."""

    role: str
    level: int
    ours: str
    theirs: str
    throughput: Ratio
    itl_p95: Ratio | None


# What the project promises or asks of its engines, at every level.
_ROLES = (
    ("auto over off", AUTO, OFF),
    ("pdv over pd", "pdv", "pd"),
    ("ssd over single", "ssd", "single"),
    *((f"{name} over off", name, OFF) for name in FIXED),
)


def comparisons(samples: Sequence[EngineSample]) -> list[EngineComparison]:
    found: list[EngineComparison | None] = []
    for level in sorted({sample.level for sample in samples}):
        best = best_fixed(samples, level)
        roles = [("auto over best fixed", AUTO, best)] if best is not None else []
        found += [_compare(samples, level, *role) for role in (*roles, *_ROLES)]
    return [comparison for comparison in found if comparison is not None]


def best_fixed(samples: Sequence[EngineSample], level: int) -> str | None:
    """The fixed engine with the highest median throughput; None if all failed."""
    rates = {name: _rates(samples, level, name, "tokens_per_second") for name in FIXED}
    there = {name: statistics.median(found.values()) for name, found in rates.items() if found}
    return max(there, key=lambda name: there[name]) if there else None


def _compare(
    samples: Sequence[EngineSample], level: int, role: str, ours: str, theirs: str
) -> EngineComparison | None:
    """None unless both succeeded in some visit."""
    throughput, itl_p95 = (
        paired_ratio(*(_rates(samples, level, name, value) for name in (ours, theirs)))
        for value in ("tokens_per_second", "itl_p95_ms")
    )
    if throughput is None:
        return None
    return EngineComparison(
        role=role, level=level, ours=ours, theirs=theirs, throughput=throughput, itl_p95=itl_p95
    )


def _rates(
    samples: Sequence[EngineSample], level: int, engine: str, value: str
) -> dict[int, float]:
    """By repeat, where it is known and above 0."""
    own = [s for s in samples if (s.level, s.engine) == (level, engine) and s.good]
    return {s.repeat: rate for s in own if (rate := getattr(s.good, value))}


# What engines are compared in visit by visit, and whether more of it is better.
_METRICS = {
    "throughput": ("tokens_per_second", 1),
    "ITL p95": ("itl_p95_ms", -1),
    "TTFT p95": ("ttft_p95_ms", -1),
    "end-to-end": ("total_mean_ms", -1),
}


@dataclass(frozen=True, slots=True)
class HeadToHead:
    """Visits that `first` won, that `second` won, and that neither did. Counts say how steady a
    lead is and nothing of its size, which is what the ratios are for."""

    metric: str
    first: str
    second: str
    first_wins: int
    second_wins: int
    ties: int


def head_to_head(samples: Sequence[EngineSample]) -> list[HeadToHead]:
    """Every pair of engines in every metric, over the visits in which both served all requests."""
    engines = list(dict.fromkeys(sample.engine for sample in samples))
    rows: list[HeadToHead] = []
    for metric, (name, sign) in _METRICS.items():
        visits: dict[tuple[int, int], dict[str, float]] = {}
        for sample in samples:
            if sample.good and (value := getattr(sample.good, name)) is not None:
                place = sample.level, sample.repeat
                visits.setdefault(place, {})[sample.engine] = sign * value
        for first, second in combinations(engines, 2):
            pairs = [(v[first], v[second]) for v in visits.values() if {first, second} <= v.keys()]
            wins, losses = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
            ties = len(pairs) - wins - losses
            rows.append(HeadToHead(metric, first, second, wins, losses, ties))
    return rows


@dataclass(frozen=True, slots=True)
class SameTexts:
    """Visits in which several engines wrote tokens, and those of them in which all wrote the same.
    Lossy engines and sampled text have other tokens by right."""

    visits: int
    same_tokens: int


def agreement(samples: Sequence[EngineSample]) -> SameTexts:
    visits = grouped(samples, key=lambda sample: (sample.level, sample.repeat)).values()
    digests = [[one.digest for one in visit if one.digest is not None] for visit in visits]
    several = [found for found in digests if len(found) > 1]
    return SameTexts(len(several), sum(len(set(found)) == 1 for found in several))


@dataclass(frozen=True, slots=True)
class BareReads:
    """Seconds of one bare read of each model's weights; 0 without a draft model."""

    target_seconds: float
    draft_seconds: float


@dataclass(frozen=True, slots=True)
class LaneBound:
    """`gain` is what no other arrangement of the same passes can exceed.

    Lanes on one device share its bandwidth. A round must read the target once and the draft model
    once a drafted token, however that is arranged; so no arrangement of the same passes is faster
    than one that does nothing else, and

        gain <= 1 / eta,   eta = (passes x T_read(target) + draft steps x T_read(draft)) / seconds,

    where T_read is a bare read of the weights on this machine (plugins/doctor/ceilings.py) and all
    else is the synchronous run's. Keys and values are left out, so eta is a little low and the
    bound a little high.
    """

    level: int
    engine: str
    eta: float
    gain: float


def lane_bounds(
    samples: Sequence[EngineSample], reads: BareReads, *, engine: str = "single"
) -> list[LaneBound]:
    """By level, from the median repeat of `engine`, which does one thing after the other."""
    own = [s for s in samples if s.engine == engine and s.good and s.good.num_passes]
    found: list[LaneBound] = []
    for level, group in sorted(grouped(own, key=lambda sample: sample.level).items()):
        eta = statistics.median(_eta(numbers, reads) for numbers in good_numbers(group))
        found.append(LaneBound(level, engine, round(eta, _DIGITS), round(1 / eta, _DIGITS)))
    return found


def _eta(numbers: LoadNumbers, reads: BareReads) -> float:
    least = numbers.num_passes * reads.target_seconds
    return (least + numbers.num_draft_steps * reads.draft_seconds) / numbers.seconds


@dataclass(frozen=True, slots=True)
class AheadPrediction:
    """`ratio` is the predicted throughput of ssd over single, from `times`, where a round waits for
    its slowest row; `ratio_apart` where hits go ahead without the others of their batch.

    `AheadTimes` has S, the tokens in a time of T_verify; the synchronous engine has
    S_SD = E / (1 + T_SD). The prediction is S / S_SD: lanes with resources of their own. What the
    measurement lacks of it is what two lanes cost each other on one machine."""

    level: int
    times: AheadTimes
    sync_draft: float
    sync_tokens: float
    ratio: float
    ratio_apart: float


def ahead_predictions(found: Sequence[EngineCell]) -> list[AheadPrediction]:
    """For every level at which `single` and `ssd` told all that is needed."""
    by_engine = {
        name: {c.level: c for c in found if c.engine == name} for name in ("single", "ssd")
    }
    levels = sorted(by_engine["single"].keys() & by_engine["ssd"].keys())
    pairs = [(by_engine["single"][level], by_engine["ssd"][level]) for level in levels]
    predicted = [_predict(sync, ahead) for sync, ahead in pairs]
    return [prediction for prediction in predicted if prediction is not None]


def _predict(sync: EngineCell, ahead: EngineCell) -> AheadPrediction | None:
    """None if a time or a count is missing."""
    p, verify, draft = ahead.p_hit, sync.verify_ms, sync.draft_ms
    tokens, ratio_ahead = sync.tokens_per_round, ahead.ahead_over_verify
    if p is None or not verify or draft is None or tokens is None or ratio_ahead is None:
        return None
    sync_draft = draft / verify
    times = AheadTimes(
        p_hit=p,
        tokens_hit=ahead.hit_tokens_per_round or tokens,
        tokens_miss=ahead.miss_tokens_per_round or tokens,
        ahead=ratio_ahead,
        fallback=sync_draft,
        batch=max(ahead.mean_batch or 1.0, 1.0),
    )
    scale = (1 + sync_draft) / tokens
    return AheadPrediction(
        level=ahead.level,
        times=times,
        sync_draft=round(sync_draft, _DIGITS),
        sync_tokens=tokens,
        ratio=round(times.speed * scale, _DIGITS),
        ratio_apart=round(replace(times, batch=1.0).speed * scale, _DIGITS),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesEvidence:
    """All that a comparison of engines has found, as results.json has it; `lane_bound_refusal` says
    why there are no bounds."""

    cells: Sequence[EngineCell]
    comparisons: Sequence[EngineComparison] = ()
    lane_bounds: Sequence[LaneBound] = ()
    ahead_predictions: Sequence[AheadPrediction] = ()
    agreement: SameTexts = SameTexts(0, 0)
    lane_bound_refusal: str | None = None
    foreign_cpu_share: float | None = None
