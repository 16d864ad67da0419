"""What `bench engines` and `bench load` say: records, tables, figures, and what to read with care.

A ratio is called a gain or a loss only if its interval leaves out 1, and a bar is said to be met or
missed only where there is an interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from outrider.plugins.measure.turns import MIN_PAIRS, Ratio, said_of
from outrider_lab.bench.charts import Axis, Chart, Color, Line, Lines
from outrider_lab.bench.lanes import LanePicture, lane_chart
from outrider_lab.bench.reference import engine_table
from outrider_lab.bench.studies.engines_cells import (
    AheadPrediction,
    EngineCell,
    EngineComparison,
    EngineSample,
    EnginesEvidence,
    Taken,
    cells,
    comparisons,
    head_to_head,
)
from outrider_lab.bench.studies.engines_plan import OFF, EnginePlan
from outrider_lab.measure.frame import spoken
from outrider_lab.measure.store import Section, number, percent

SCHEMA = "outrider-bench-engines/1"
# What `auto` is asked to reach against every other way at every level.
MEDIAN_BAR, LOW_BAR = 0.97, 0.95


def meets_bar(ratio: Ratio) -> bool | None:
    """None without an interval."""
    return None if ratio.low is None else ratio.value >= MEDIAN_BAR and ratio.low >= LOW_BAR


def findings(found: EnginesEvidence) -> list[str]:
    """Whether tokens agreed, failures, and why all of this should be read with care; ratios, bars
    and bounds stand in tables."""
    visits, same = found.agreement.visits, found.agreement.same_tokens
    said = [f"All engines wrote the same tokens in {same} of {visits} visits."] if visits else []
    said += [f"Level {one.level}, {failure}" for one in found.cells for failure in failed(one)]
    if found.comparisons and all(c.throughput.low is None for c in found.comparisons):
        said.append(f"An interval and a verdict need {MIN_PAIRS} repeats (--repeats {MIN_PAIRS}).")
    if found.lane_bound_refusal is not None:
        said.append(f"No bound on what lanes can gain: {found.lane_bound_refusal}.")
    if busy := said_of(found.foreign_cpu_share):
        said.append(busy)
    return said


def failed(cell: EngineCell) -> list[str]:
    """A sentence for every reason for which samples of a cell failed."""
    return [
        f"{cell.engine}: {num} of {cell.num_samples} failed: {reason}"
        for reason, num in cell.failures.items()
    ]


def evidence_record(found: EnginesEvidence) -> dict[str, object]:
    return {
        **asdict(found),
        "cells": [{**asdict(cell), "status": cell.status} for cell in found.cells],
        "findings": findings(found),
        "reference": {
            "label": engine_table().label,
            "rows": [asdict(row) for row in engine_table().rows],
        },
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


def _queues(cell: EngineCell) -> str:
    return "-" if cell.queues is None else "/".join(f"{depth:.1f}" for depth in cell.queues)


_COLUMNS: Mapping[str, Callable[[EngineCell], str]] = {
    "level": lambda cell: str(cell.level),
    "engine": lambda cell: cell.engine,
    "tok/s": lambda cell: number(cell.tokens_per_second, 1),
    "TTFT p50 ms": lambda cell: number(cell.ttft_p50_ms, 1),
    "TTFT p95 ms": lambda cell: number(cell.ttft_p95_ms, 1),
    "ITL p50 ms": lambda cell: number(cell.itl_p50_ms, 2),
    "ITL p95 ms": lambda cell: number(cell.itl_p95_ms, 2),
    "end-to-end ms": lambda cell: number(cell.total_mean_ms, 1),
    "end-to-end p95 ms": lambda cell: number(cell.total_p95_ms, 1),
    "round p50 ms": lambda cell: number(cell.round_p50_ms, 2),
    "accepted %": lambda cell: percent(cell.acceptance),
    "tok/round": lambda cell: number(cell.tokens_per_round, 2),
    "p_hit %": lambda cell: percent(cell.p_hit),
    "waiting": lambda cell: number(cell.waiting, 1),
    "busy %": lambda cell: percent(cell.busy),
    "overlap %": lambda cell: percent(cell.overlap),
    "CPU %": lambda cell: number(cell.cpu_percent, 0),
    "GPU %": lambda cell: number(cell.gpu_percent, 0),
    "queues p/d/v": _queues,
    "free tokens": lambda cell: number(cell.least_free_tokens, 0),
    "cumulative token time p95 ms": lambda cell: number(cell.cumulative_p95_ms, 1),
    "status": lambda cell: cell.status,
}
ENGINE_COLUMNS = (
    *("level", "engine", "tok/s", "ITL p50 ms", "ITL p95 ms", "TTFT p50 ms", "end-to-end ms"),
    *("round p50 ms", "accepted %", "tok/round", "p_hit %", "busy %", "overlap %", "CPU %"),
    *("GPU %", "queues p/d/v", "free tokens", "cumulative token time p95 ms", "status"),
)
# What a load run says of a cell, wherever it is shown.
LOAD_COLUMNS = (
    *("tok/s", "TTFT p50 ms", "TTFT p95 ms", "ITL p50 ms", "ITL p95 ms", "end-to-end ms"),
    *("end-to-end p95 ms", "accepted %", "waiting", "busy %"),
)
LOAD_NOTE = (
    "Medians over repeats. Times count from a request's arrival, also while it waits for its turn."
)
_MACHINE = ("CPU %", "GPU %", "status")
_CELL_NOTE = (
    "Medians over repeats. ITL is the inter-token latency, every token's share of its round. "
    "Cumulative token time runs from a request's arrival to each of its tokens; it is what the "
    "source calls Token P95, and no latency of a token. Busy is the share of the run's time in "
    "which some lane ran, overlap the part of that in which at least two did; CPU is of one core. "
    "Free tokens are the least room that a job found in the arena."
)


def columns(cell: EngineCell, names: Iterable[str]) -> tuple[str, ...]:
    """The figures of a cell under these headings."""
    return tuple(_COLUMNS[name](cell) for name in names)


def sections(found: EnginesEvidence) -> Iterator[Section]:
    """Without those that have nothing to say."""
    yield Section(
        title="Engines by level",
        text=[_CELL_NOTE],
        header=ENGINE_COLUMNS,
        rows=[columns(cell, ENGINE_COLUMNS) for cell in found.cells],
    )
    if found.comparisons:
        yield _comparisons(found.comparisons)
    yield Section(title="What this run shows", points=findings(found))
    if found.lane_bounds:
        yield Section(
            title="What lanes can gain on one device",
            text=["gain <= 1 / eta; eta is the bare read of the weights over the time spent."],
            header=("level", "engine", "eta", "gain at most"),
            rows=[
                (str(b.level), b.engine, f"{b.eta:.3f}", f"{b.gain:.2f}×")
                for b in found.lane_bounds
            ],
        )
    if found.ahead_predictions:
        yield _predictions(found.ahead_predictions, found.comparisons)
    yield _reference(found.cells)


def _comparisons(found: Sequence[EngineComparison]) -> Section:
    bars = {True: "met", False: "MISSED", None: "-"}
    return Section(
        title="Ratios within visits",
        text=["Medians over repeats and 95 % bootstrap intervals; ITL below 1 is better."],
        header=("level", "what", "against", "throughput", "ITL p95", "repeats", "verdict", "bar"),
        rows=[
            (
                str(one.level),
                one.role,
                one.theirs,
                spoken(one.throughput),
                "-" if one.itl_p95 is None else spoken(one.itl_p95),
                str(one.throughput.num_pairs),
                one.throughput.verdict,
                bars[meets_bar(one.throughput)] if one.role.startswith("auto") else "",
            )
            for one in found
        ],
    )


def _predictions(
    predictions: Sequence[AheadPrediction], found: Sequence[EngineComparison]
) -> Section:
    measured = {c.level: spoken(c.throughput) for c in found if c.role == "ssd over single"}
    return Section(
        title="Drafting ahead against drafting in turn",
        text=[
            "Theorem 7, from this run's own times in units of a verification, for lanes that cost "
            "each other nothing."
        ],
        header=(
            *("level", "p_hit %", "tokens after a hit", "after a miss", "T_draft", "T_ahead"),
            *("batch", "predicted, rows wait", "rows apart", "measured"),
        ),
        rows=[
            (
                str(one.level),
                percent(one.times.p_hit),
                f"{one.times.tokens_hit:.2f}",
                f"{one.times.tokens_miss:.2f}",
                f"{one.sync_draft:.2f}",
                f"{one.times.ahead:.2f}",
                f"{one.times.batch:.1f}",
                f"{one.ratio:.3f}×",
                f"{one.ratio_apart:.3f}×",
                measured.get(one.level, "-"),
            )
            for one in predictions
        ],
    )


def _reference(found: Sequence[EngineCell]) -> Section:
    table = engine_table()
    ours = {(cell.level, cell.engine): cell for cell in found}
    rows: list[tuple[str, ...]] = []
    for theirs in table.rows:
        cell = ours.get((theirs.level, theirs.engine))
        rows.append(
            (
                str(theirs.level),
                f"{table.names[theirs.engine]} ({theirs.engine})",
                f"{theirs.tokens_per_second:.2f}",
                f"{theirs.cumulative_p95_ms:.1f}",
                percent(theirs.acceptance),
                number(cell and cell.tokens_per_second, 1),
                number(cell and cell.cumulative_p95_ms, 1),
                percent(cell and cell.acceptance),
            )
        )
    return Section(
        title="The source's table beside ours",
        text=[f"{table.label}. Nothing follows from the difference."],
        header=(
            *("level", "engine", "source tok/s", "source Token P95 ms", "source accepted %"),
            *("our tok/s", "our cumulative token time p95 ms", "our accepted %"),
        ),
        rows=rows,
    )


def load_sections(plan: EnginePlan, samples: Sequence[EngineSample]) -> Iterator[Section]:
    """Of `bench load`."""
    found, names = cells(samples), [case.name for case in plan.cases]
    yield Section(
        title="Load",
        text=[LOAD_NOTE, *(f"{case.name}: {case.text}." for case in plan.cases)],
        header=("case", "engine", "requests", "rejected", *LOAD_COLUMNS, *_MACHINE),
        rows=[
            (
                names[cell.level],
                cell.engine,
                *_requests(cell, samples),
                *columns(cell, (*LOAD_COLUMNS, *_MACHINE)),
            )
            for cell in found
        ],
    )
    wins = head_to_head(samples)
    if wins:
        yield Section(
            title="Head to head",
            text=["In how many visits each did better; ties apart."],
            header=("metric", "pair", "first", "second", "ties"),
            rows=[
                (
                    row.metric,
                    f"{row.first} : {row.second}",
                    *map(str, (row.first_wins, row.second_wins, row.ties)),
                )
                for row in wins
            ],
        )
    failures = load_failures(found, names)
    if failures:
        yield Section(title="Failures", points=failures)


def load_failures(found: Iterable[EngineCell], cases: Sequence[str]) -> list[str]:
    """With the names of cases, by level."""
    return [f"{cases[cell.level]}, {failure}" for cell in found for failure in failed(cell)]


def _requests(cell: EngineCell, samples: Sequence[EngineSample]) -> tuple[str, str]:
    """How many ended well and how many were rejected, failed samples included."""
    place = cell.level, cell.engine
    own = [s.numbers for s in samples if (s.level, s.engine) == place and s.numbers]
    num_ok, num = sum(n.num_ok for n in own), sum(n.num_requests for n in own)
    return f"{num_ok} of {num}", str(sum(n.num_rejected for n in own))


# File name: title, label of the axis, value of a cell.
FIGURES: Mapping[str, tuple[str, str, Callable[[EngineCell], float | None]]] = {
    "itl_p95_vs_concurrency": (
        "Inter-token latency, percentile 95, by requests in flight",
        "milliseconds",
        lambda cell: cell.itl_p95_ms,
    ),
    "latency_vs_concurrency": (
        "Mean time of a request, by requests in flight",
        "milliseconds",
        lambda cell: cell.total_mean_ms,
    ),
    "throughput_vs_concurrency": (
        "Throughput by requests in flight",
        "tokens a second",
        lambda cell: cell.tokens_per_second,
    ),
    "acceptance_vs_concurrency": (
        "Acceptance by requests in flight",
        "accepted, % of drafted",
        lambda cell: None if cell.acceptance is None else 100 * cell.acceptance,
    ),
}
LEVELS = "requests in flight (0 = one at a time, with gaps)"


def pair_charts(
    pairs: Mapping[str, Sequence[EngineCell]], engine: str, words: str
) -> dict[str, Chart]:
    """The same figures with a line a pair instead, all of them run by `engine`."""
    found = [
        replace(cell, engine=pair)
        for pair, own in pairs.items()
        for cell in own
        if cell.engine == engine
    ]
    own = charts(found, f"{words}, {engine}")
    return {f"pairs_{name}": chart for name, chart in own.items()}


def timelines(taken: Sequence[Taken], words: str) -> dict[str, Chart]:
    """What the lanes of every engine did at the highest level, at the last repeat."""
    highest = max((one.sample.level for one in taken if one.jobs), default=0)
    last = {t.sample.engine: t for t in taken if t.jobs and t.sample.level == highest}
    return {
        f"lanes_{engine}": lane_chart(
            LanePicture(
                jobs=one.jobs,
                rounds=[r for served in one.served if served.result for r in served.result.rounds],
                title=f"What the lanes of {engine} did, {highest} requests in flight",
                small_print=words,
            )
        )
        for engine, one in last.items()
    }


def charts(found: Sequence[EngineCell], words: str) -> dict[str, Chart]:
    """By the name of their files: a line an engine over levels at equal distances."""
    levels = sorted({cell.level for cell in found})
    return {
        name: Chart(
            title=title,
            panels=[
                [
                    Lines(
                        lines=list(lines(found, value, levels.index)),
                        x=Axis(label=LEVELS, ticks=[*map(str, levels)]),
                        y=Axis(label=label, low=0),
                    )
                ]
            ],
            foot=words,
        )
        for name, (title, label, value) in FIGURES.items()
    }


def lines(
    found: Sequence[EngineCell],
    value: Callable[[EngineCell], float | None],
    place: Callable[[int], float],
) -> Iterator[Line]:
    """Plain decoding is grey, the others have a hue each."""
    engines = list(dict.fromkeys(cell.engine for cell in found))
    drafting = [engine for engine in engines if engine != OFF]
    for place_of, engine in enumerate(engines):
        color: Color = "muted" if engine == OFF else drafting.index(engine)
        own = [(place(cell.level), value(cell)) for cell in found if cell.engine == engine]
        yield Line(
            name=engine,
            points=[(x, height) for x, height in own if height is not None],
            color=color,
            mark=place_of,
        )
