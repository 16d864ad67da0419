"""What `bench engines` and `bench load` leave behind: records, a row a request, and statements.

A ratio is called a gain or a loss only if its interval leaves out 1, and a bar is said to be met or
missed only where there is an interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

from outrider.bench.frame import MIN_PAIRS, Ratio, spoken
from outrider.bench.load import Served
from outrider.bench.machine import said_of
from outrider.bench.reference import engine_table
from outrider.bench.studies.engines_cells import (
    Cell,
    Comparison,
    EngineSample,
    Evidence,
    Taken,
    cells,
    comparisons,
)
from outrider.bench.studies.engines_plan import EnginePlan
from outrider.metrics.summary import inter_token_latencies, percentile

SCHEMA = "outrider-bench-engines/1"
# What `auto` is asked to reach against every other way at every level.
MEDIAN_BAR, LOW_BAR = 0.97, 0.95


def meets_bar(ratio: Ratio) -> bool | None:
    """None without an interval."""
    return None if ratio.low is None else ratio.value >= MEDIAN_BAR and ratio.low >= LOW_BAR


def findings(found: Evidence) -> list[str]:
    """Whether tokens agreed, bars that were met or missed, ratios with what bounds them, failures,
    and why all of this should be read with care."""
    num_visits, num_same = found.agreement
    same = f"All engines wrote the same tokens in {num_same} of {num_visits} visits."
    return [
        *([same] if num_visits else []),
        *_bars(found.comparisons),
        *_lanes(found),
        *(f"Level {one.level}, {failure}" for one in found.cells for failure in failed(one)),
        *_caveats(found),
    ]


def _bars(found: Sequence[Comparison]) -> Iterator[str]:
    for role in ("auto over best fixed", "auto over off"):
        judged = [c for c in found if c.role == role and meets_bar(c.throughput) is not None]
        missed = [c for c in judged if not meets_bar(c.throughput)]
        if judged:
            yield (
                f"{role}: at {len(judged) - len(missed)} of {len(judged)} levels the median ratio "
                f"is at least {MEDIAN_BAR} and its lower bound at least {LOW_BAR}."
            )
        for one in missed:
            yield (
                f"Missed at level {one.level}: auto has {spoken(one.throughput)} the throughput "
                f"of {one.theirs}."
            )


def _lanes(found: Evidence) -> Iterator[str]:
    """What lanes and drafting ahead brought, and what this run's own times leave to gain."""
    bounds = {b.level: f"at most {b.gain:.2f}× by its bare reads" for b in found.bounds}
    predicted = {p.level: f"{p.ratio:.3f}× predicted by its times" for p in found.predictions}
    for role, reasons in (("pdv over pd", bounds), ("ssd over single", predicted)):
        for one in (c for c in found.comparisons if c.role == role):
            reason = f", {reasons[one.level]}" if one.level in reasons else ""
            yield (
                f"Level {one.level}: {one.ours} has {spoken(one.throughput)} the throughput of "
                f"{one.theirs} ({one.throughput.verdict}{reason})."
            )


def failed(cell: Cell) -> list[str]:
    """A sentence for every reason for which samples of a cell failed."""
    return [
        f"{cell.engine}: {num} of {cell.num_samples} failed: {reason}"
        for reason, num in cell.failures.items()
    ]


def _caveats(found: Evidence) -> Iterator[str]:
    if found.comparisons and all(c.throughput.low is None for c in found.comparisons):
        yield f"An interval and a verdict need {MIN_PAIRS} repeats (--repeats {MIN_PAIRS})."
    if found.bound_refusal is not None:
        yield f"No bound on what lanes can gain: {found.bound_refusal}."
    if said := said_of(found.foreign_cpu_share):
        yield said


# What engines are compared in, and whether more of it is better.
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


def evidence_record(found: Evidence) -> dict[str, object]:
    table = engine_table()
    return {
        "cells": [{**asdict(cell), "status": cell.status} for cell in found.cells],
        "comparisons": [asdict(one) for one in found.comparisons],
        "lane_bounds": [asdict(one) for one in found.bounds],
        "lane_bound_refusal": found.bound_refusal,
        "ahead_predictions": [asdict(one) for one in found.predictions],
        "agreement": {"visits": found.agreement[0], "same_tokens": found.agreement[1]},
        "findings": findings(found),
        "foreign_cpu_share": found.foreign_cpu_share,
        "reference": {"label": table.label, "rows": [asdict(row) for row in table.rows]},
    }


def load_record(plan: EnginePlan, samples: Sequence[EngineSample]) -> dict[str, object]:
    """Cases with their cells, and wins; ready for JSON."""
    return {
        **plan.record,
        "cells": [
            {**asdict(cell), "case": plan.cases[cell.level].name, "status": cell.status}
            for cell in cells(samples)
        ],
        "comparisons": [asdict(one) for one in comparisons(samples)],
        "head_to_head": [asdict(row) for row in head_to_head(samples)],
    }


def sample_record(sample: EngineSample) -> dict[str, object]:
    numbers = sample.numbers
    counted = numbers and {
        **asdict(numbers),
        "tokens_per_second": round(numbers.tokens_per_second, 3),
        "acceptance": numbers.acceptance,
        "p_hit": numbers.p_hit,
    }
    plain = ("level", "engine", "repeat", "reason", "digest", "foreign_cpu_share", "usage")
    return {
        **{name: getattr(sample, name) for name in plain},
        "numbers": counted,
        "lanes": None if sample.lanes is None else sample.lanes.to_dict(),
    }


def request_rows(taken: Sequence[Taken]) -> list[dict[str, object]]:
    """A row a request, for CSV."""
    return [
        {
            "level": one.sample.level,
            "engine": one.sample.engine,
            "repeat": one.sample.repeat,
            **row_of(served),
        }
        for one in taken
        for served in one.served
    ]


def row_of(served: Served) -> dict[str, object]:
    """One request as a row of plain values, for CSV."""
    result, times = served.result, served.token_seconds
    gaps = inter_token_latencies(times) if times else ()
    return {
        "number": served.number,
        "request": served.request.name,
        "arrived_s": round(served.arrived, 6),
        "waited_ms": _ms(served.submitted - served.arrived),
        "status": "rejected" if served.rejected else "failure" if served.reason else "success",
        "reason": served.reason or "",
        "finish_reason": result.finish_reason if result else "",
        "tokens": result.num_tokens if result else 0,
        "ttft_ms": _ms(times[0]) if times else "",
        "itl_p50_ms": _ms(percentile(gaps, 50)) if gaps else "",
        "itl_p95_ms": _ms(percentile(gaps, 95)) if gaps else "",
        "total_ms": _ms(times[-1]) if times else "",
        "rounds": result.stats.num_rounds if result else "",
        "drafted": result.stats.num_drafted if result else "",
        "accepted": result.stats.num_accepted if result else "",
        "notes": "; ".join(result.notes) if result else "",
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)
