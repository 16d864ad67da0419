"""From samples to cells and comparisons; nothing here is measured.

A cell is an engine at a level: medians over repeats that did not fail, and counts added up over
them. A comparison is the ratio of two engines' rates within visits, as the median over repeats with
its bootstrap interval (bench/frame.py): below five repeats there is no interval. The best fixed
engine of a level is chosen after the fact, by its median; some of its lead is luck, so comparing
`auto` with it is a comparison at `auto`'s disadvantage.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.engines.plan import AUTO, FIXED, OFF
from outrider.bench.engines.samples import Sample
from outrider.bench.frame import Ratio, ratio_of_medians
from outrider.bench.load.tally import Numbers
from outrider.metrics.timeline import QUEUES, WAITING, Timeline

_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is None could not be told. Busy, overlap and window use are those of all lanes in
    metrics/timeline.py; `ahead_over_verify` is T_ahead / T_verify of a round. `queues` are mean
    depths of (prefill, draft, verify), `waiting` that of requests not yet
    admitted, `least_free_tokens` the least room that any job found in the arena. CPU percent is of
    one core, GPU percent as bench/machine.py has it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Throughput of `ours` over that of `theirs` at one level, and the same of ITL percentile 95,
    where below 1 is better. `role` says what the comparison is for."""

    role: str
    level: int
    ours: str
    theirs: str
    throughput: Ratio
    itl_p95: Ratio | None


def cells(samples: Sequence[Sample]) -> list[Cell]:
    """By level, and in a level in the order in which engines were measured."""
    groups: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.level, sample.engine), []).append(sample)
    ordered = sorted(groups, key=lambda key: key[0])
    return [_cell(groups[key]) for key in ordered]


def comparisons(samples: Sequence[Sample]) -> list[Comparison]:
    """For every level what the project promises or asks of its engines."""
    found: list[Comparison | None] = []
    for level in sorted({sample.level for sample in samples}):
        best = best_fixed(samples, level)
        if best is not None:
            found.append(_compare(samples, level, "auto over best fixed", AUTO, best))
        found += [
            _compare(samples, level, "auto over off", AUTO, OFF),
            _compare(samples, level, "pdv over pd", "pdv", "pd"),
            _compare(samples, level, "ssd over single", "ssd", "single"),
            *(_compare(samples, level, f"{name} over off", name, OFF) for name in FIXED),
        ]
    return [comparison for comparison in found if comparison is not None]


def best_fixed(samples: Sequence[Sample], level: int) -> str | None:
    """The fixed engine with the highest median throughput; None if all failed."""
    rates = {name: list(_rates(samples, level, name).values()) for name in FIXED}
    there = {name: statistics.median(found) for name, found in rates.items() if found}
    return max(there, key=lambda name: there[name]) if there else None


def _cell(samples: Sequence[Sample]) -> Cell:
    good = [s.numbers for s in samples if s.ok and s.numbers is not None]
    lanes = [s.lanes for s in samples if s.ok and s.lanes is not None]
    failures = Counter(s.reason for s in samples if s.reason is not None)
    hits, misses = sum(n.num_hits for n in good), sum(n.num_misses for n in good)
    return Cell(
        level=samples[0].level,
        engine=samples[0].engine,
        num_samples=len(samples),
        num_failures=sum(failures.values()),
        failures=dict(sorted(failures.items())),
        tokens_per_second=_median(good, lambda n: n.tokens_per_second),
        itl_p50_ms=_median(good, lambda n: n.itl_p50_ms),
        itl_p95_ms=_median(good, lambda n: n.itl_p95_ms),
        ttft_p50_ms=_median(good, lambda n: n.ttft_p50_ms),
        ttft_p95_ms=_median(good, lambda n: n.ttft_p95_ms),
        total_mean_ms=_median(good, lambda n: n.total_mean_ms),
        total_p95_ms=_median(good, lambda n: n.total_p95_ms),
        round_p50_ms=_median(good, lambda n: n.round_p50_ms),
        round_p95_ms=_median(good, lambda n: n.round_p95_ms),
        cumulative_p95_ms=_median(good, lambda n: n.cumulative_p95_ms),
        draft_ms=_median(good, lambda n: n.draft_ms),
        verify_ms=_median(good, lambda n: n.verify_ms),
        mean_batch=_median(good, lambda n: n.mean_batch),
        acceptance=_rate(sum(n.num_accepted for n in good), sum(n.num_drafted for n in good)),
        tokens_per_round=_rate(sum(n.num_tokens for n in good), sum(n.num_rounds for n in good)),
        p_hit=_rate(hits, hits + misses),
        hit_tokens_per_round=_rate(sum(n.hit_tokens for n in good), hits),
        miss_tokens_per_round=_rate(sum(n.miss_tokens for n in good), misses),
        busy=_median_lanes(lanes, lambda found: found.busy_fraction),
        overlap=_median_lanes(lanes, lambda found: found.overlap_fraction),
        window_use=_median_lanes(lanes, lambda f: f.window.use if f.window else None),
        ahead_over_verify=_median_lanes(lanes, lambda f: f.window.mean_ratio if f.window else None),
        queues=[
            round(statistics.fmean(found.queues[stage].mean for found in lanes), _DIGITS)
            for stage in QUEUES
        ]
        if lanes
        else None,
        waiting=_median_lanes(lanes, lambda f: f.queues[WAITING].mean),
        least_free_tokens=min(
            (f.least_free_tokens for f in lanes if f.least_free_tokens is not None), default=None
        ),
        cpu_percent=_median_usage(samples, "cpu_percent"),
        gpu_percent=_median_usage(samples, "gpu_percent"),
    )


def _compare(
    samples: Sequence[Sample], level: int, role: str, ours: str, theirs: str
) -> Comparison | None:
    """None unless both succeeded in some visit."""
    a, b = _rates(samples, level, ours), _rates(samples, level, theirs)
    both = sorted(a.keys() & b.keys())
    if not both:
        return None
    c, d = _latencies(samples, level, ours), _latencies(samples, level, theirs)
    timed = [repeat for repeat in both if repeat in c and repeat in d]
    return Comparison(
        role=role,
        level=level,
        ours=ours,
        theirs=theirs,
        throughput=ratio_of_medians([a[r] for r in both], [b[r] for r in both]),
        itl_p95=ratio_of_medians([c[r] for r in timed], [d[r] for r in timed]) if timed else None,
    )


def _rates(samples: Sequence[Sample], level: int, engine: str) -> dict[int, float]:
    """Tokens a second by repeat."""
    return {
        sample.repeat: numbers.tokens_per_second
        for sample, numbers in _good(samples, level, engine)
        if numbers.tokens_per_second > 0
    }


def _latencies(samples: Sequence[Sample], level: int, engine: str) -> dict[int, float]:
    return {
        sample.repeat: numbers.itl_p95_ms
        for sample, numbers in _good(samples, level, engine)
        if numbers.itl_p95_ms
    }


def _good(samples: Sequence[Sample], level: int, engine: str) -> list[tuple[Sample, Numbers]]:
    return [
        (sample, sample.numbers)
        for sample in samples
        if (sample.level, sample.engine) == (level, engine) and sample.ok and sample.numbers
    ]


def _median(good: Sequence[Numbers], value: Callable[[Numbers], float | None]) -> float | None:
    found = [number for numbers in good if (number := value(numbers)) is not None]
    return round(statistics.median(found), _DIGITS) if found else None


def _median_lanes(
    lanes: Sequence[Timeline], value: Callable[[Timeline], float | None]
) -> float | None:
    found = [number for one in lanes if (number := value(one)) is not None]
    return round(statistics.median(found), _DIGITS) if found else None


def _median_usage(samples: Sequence[Sample], name: str) -> float | None:
    found = [u for s in samples if s.ok and s.usage and (u := s.usage[name]) is not None]
    return round(statistics.median(found), _DIGITS) if found else None


def _rate(part: float, whole: float) -> float | None:
    return round(part / whole, _DIGITS) if whole else None
