"""A run's tables as sections of a page, for terminal, Markdown and HTML alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.bench.engines.cells import Cell, Comparison
from outrider.bench.engines.columns import columns
from outrider.bench.engines.findings import Evidence, findings, meets_bar, spoken
from outrider.bench.engines.models import AheadPrediction
from outrider.bench.engines.reference import LABEL, NAMES, PUBLISHED, published
from outrider.bench.pages import Section, number, percent

HEADER = (
    "level",
    "engine",
    "tok/s",
    "ITL p50 ms",
    "ITL p95 ms",
    "TTFT p50 ms",
    "end-to-end ms",
    "round p50 ms",
    "accepted %",
    "tok/round",
    "p_hit %",
    "busy %",
    "overlap %",
    "CPU %",
    "GPU %",
    "queues p/d/v",
    "free tokens",
    "cumulative token time p95 ms",
    "status",
)
_CELL_NOTE = (
    "Medians over repeats. ITL is the inter-token latency, every token's share of its round. "
    "Cumulative token time runs from a request's arrival to each of its tokens; it is what the "
    "source calls Token P95, and no latency of a token. Busy is the share of the run's time in "
    "which some lane ran, overlap the part of that in which at least two did; CPU is of one core. "
    "Free tokens are the least room that a job found in the arena."
)


def sections(found: Evidence) -> Iterator[Section]:
    """Without those that have nothing to say."""
    yield Section(
        title="Engines by level",
        text=[_CELL_NOTE],
        header=HEADER,
        rows=[columns(cell, HEADER) for cell in found.cells],
    )
    if found.comparisons:
        yield _comparisons(found.comparisons)
    yield Section(title="What this run shows", points=findings(found))
    if found.bounds:
        yield Section(
            title="What lanes can gain on one device",
            text=["gain <= 1 / eta; eta is the bare read of the weights over the time spent."],
            header=("level", "engine", "eta", "gain at most"),
            rows=[(str(b.level), b.engine, f"{b.eta:.3f}", f"{b.gain:.2f}×") for b in found.bounds],
        )
    if found.predictions:
        yield _predictions(found.predictions, found.comparisons)
    yield _reference(found.cells)


def _comparisons(found: Sequence[Comparison]) -> Section:
    rows = [
        (
            str(one.level),
            one.role,
            one.theirs,
            spoken(one.throughput),
            "-" if one.itl_p95 is None else spoken(one.itl_p95),
            str(one.throughput.num_pairs),
            one.throughput.verdict,
            _bar(one),
        )
        for one in found
    ]
    return Section(
        title="Ratios within visits",
        text=["Medians over repeats and 95 % bootstrap intervals; ITL below 1 is better."],
        header=("level", "what", "against", "throughput", "ITL p95", "repeats", "verdict", "bar"),
        rows=rows,
    )


def _bar(one: Comparison) -> str:
    if not one.role.startswith("auto"):
        return ""
    met = meets_bar(one.throughput)
    return "-" if met is None else "met" if met else "MISSED"


def _predictions(
    predictions: Sequence[AheadPrediction], comparisons: Sequence[Comparison]
) -> Section:
    measured = {c.level: c.throughput for c in comparisons if c.role == "ssd over single"}
    rows = [
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
            spoken(measured[one.level]) if one.level in measured else "-",
        )
        for one in predictions
    ]
    return Section(
        title="Drafting ahead against drafting in turn",
        text=[
            "Theorem 7, from this run's own times in units of a verification, for lanes that cost "
            "each other nothing."
        ],
        header=(
            "level",
            "p_hit %",
            "tokens after a hit",
            "after a miss",
            "T_draft",
            "T_ahead",
            "batch",
            "predicted, rows wait",
            "rows apart",
            "measured",
        ),
        rows=rows,
    )


def _reference(cells: Sequence[Cell]) -> Section:
    ours = {(cell.level, cell.engine): cell for cell in cells}
    rows: list[tuple[str, ...]] = []
    for level, engine in dict.fromkeys((p.level, p.engine) for p in PUBLISHED):
        theirs, cell = published(level, engine), ours.get((level, engine))
        if theirs is None:
            continue
        rows.append(
            (
                str(level),
                f"{NAMES[engine]} ({engine})",
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
        text=[f"{LABEL}. Nothing follows from the difference."],
        header=(
            "level",
            "engine",
            "source tok/s",
            "source Token P95 ms",
            "source accepted %",
            "our tok/s",
            "our cumulative token time p95 ms",
            "our accepted %",
        ),
        rows=rows,
    )
