"""What a run showed, in sentences that are made from its numbers and from nothing else.

A ratio is called a gain or a loss only if its interval leaves out 1, and a bar is said to be met or
missed only where there is an interval. Sentences name the reasons that the same run measured:
overlap, queues, hits, and the bounds of models.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.bench.engines.cells import Cell, Comparison
from outrider.bench.engines.models import AheadPrediction, LaneBound
from outrider.bench.engines.reference import published_gain
from outrider.bench.frame import MIN_PAIRS, Ratio, spoken
from outrider.bench.machine import said_of

# What `auto` is asked to reach against every other way at every level.
MEDIAN_BAR, LOW_BAR = 0.97, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that sentences may draw on. `agreement` counts visits with several engines, and those of
    them in which all wrote the same tokens; `bound_refusal` says why there are no bounds. Up to
    `hybrid_threshold` requests pdv does what pd does."""

    cells: Sequence[Cell]
    comparisons: Sequence[Comparison]
    bounds: Sequence[LaneBound]
    predictions: Sequence[AheadPrediction]
    agreement: tuple[int, int] = (0, 0)
    hybrid_threshold: int = 0
    bound_refusal: str | None = None
    foreign_cpu_share: float | None = None


def findings(found: Evidence) -> list[str]:
    return [
        *_agreement(found.agreement),
        *_bars(found.comparisons),
        *_joined(found),
        *_lanes(found),
        *_ahead(found),
        *_pairs_acceptance(found.cells),
        *_failures(found.cells),
        *_caveats(found),
    ]


def meets_bar(ratio: Ratio) -> bool | None:
    """None without an interval."""
    return None if ratio.low is None else ratio.value >= MEDIAN_BAR and ratio.low >= LOW_BAR


def _agreement(counts: tuple[int, int]) -> Iterator[str]:
    num_visits, num_same = counts
    if num_visits:
        yield f"All engines wrote the same tokens in {num_same} of {num_visits} visits."


def _bars(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for role in ("auto over best fixed", "auto over off"):
        rows = [c for c in comparisons if c.role == role]
        judged = [(c, met) for c in rows if (met := meets_bar(c.throughput)) is not None]
        if not judged:
            continue
        missed = [c for c, met in judged if not met]
        kept = len(judged) - len(missed)
        yield (
            f"{role}: at {kept} of {len(judged)} levels the median ratio is at least "
            f"{MEDIAN_BAR} and its lower bound at least {LOW_BAR}."
        )
        for one in missed:
            yield (
                f"Missed at level {one.level}: auto has {spoken(one.throughput)} the throughput "
                f"of {one.theirs}."
            )


def _joined(found: Evidence) -> Iterator[str]:
    """Few requests cost pdv nothing, or they do."""
    few = [
        one.throughput
        for one in found.comparisons
        if one.role == "pdv over pd" and one.level <= found.hybrid_threshold
    ]
    if few and found.hybrid_threshold:
        losses = sum(ratio.verdict == "loss" for ratio in few)
        judged = sum(ratio.low is not None for ratio in few)
        yield (
            f"Up to {found.hybrid_threshold} requests pdv joins its lanes and runs the jobs of pd: "
            f"its ratios there are {min(r.value for r in few):.3f}× to "
            f"{max(r.value for r in few):.3f}×, a loss at {losses} of {judged} judged levels."
        )


def _lanes(found: Evidence) -> Iterator[str]:
    bounds = {bound.level: bound for bound in found.bounds}
    cells = {(cell.level, cell.engine): cell for cell in found.cells}
    for one in found.comparisons:
        if one.role != "pdv over pd":
            continue
        parts = [f"Level {one.level}: pdv has {spoken(one.throughput)} the throughput of pd"]
        parts.append(f"({one.throughput.verdict})")
        if one.itl_p95 is not None:
            parts.append(f"and {spoken(one.itl_p95)} its ITL p95")
        bound = bounds.get(one.level)
        if bound is not None:
            parts.append(f"; a synchronous round leaves at most {bound.gain:.2f}× to gain here")
        cell = cells.get((one.level, "pdv"))
        if cell is not None and cell.overlap is not None and cell.busy is not None:
            parts.append(
                f"; pdv's lanes were busy {100 * cell.busy:.0f} % of the time and "
                f"overlapped for {100 * cell.overlap:.0f} % of that"
            )
        source = published_gain(one.level)
        if source is not None:
            parts.append(f"; the source's own table has {source:.3f}×")
        yield " ".join(parts).replace(" ;", ";") + "."


def _ahead(found: Evidence) -> Iterator[str]:
    predicted = {p.level: p for p in found.predictions}
    cells = {(cell.level, cell.engine): cell for cell in found.cells}
    for one in found.comparisons:
        if one.role != "ssd over single":
            continue
        text = (
            f"Level {one.level}: ssd has {spoken(one.throughput)} the throughput of single "
            f"({one.throughput.verdict})"
        )
        cell = cells.get((one.level, "ssd"))
        if cell is not None and cell.p_hit is not None:
            text += f"; {100 * cell.p_hit:.0f} % of drafts were ready"
        if cell is not None and cell.window_use is not None:
            text += f", drafting ahead took {100 * cell.window_use:.0f} % of the verifying time"
        prediction = predicted.get(one.level)
        if prediction is not None:
            text += (
                f"; with lanes that cost each other nothing, its own times predict "
                f"{prediction.ratio:.3f}× where rows wait for each other and "
                f"{prediction.ratio_apart:.3f}× where they do not"
            )
        yield text + "."


def _pairs_acceptance(cells: Sequence[Cell]) -> Iterator[str]:
    """Acceptance is the pair's, not the engine's: fixed engines of one K must agree."""
    fixed = [c for c in cells if c.acceptance is not None and c.engine != "auto"]
    if not fixed:
        return
    rates = [100 * c.acceptance for c in fixed if c.acceptance is not None]
    yield (
        f"Acceptance is {min(rates):.1f} to {max(rates):.1f} % over all fixed engines and levels."
    )


def _failures(cells: Sequence[Cell]) -> Iterator[str]:
    for cell in cells:
        for reason, num in cell.failures.items():
            yield f"Level {cell.level}, {cell.engine}: {num} of {cell.num_samples} failed: {reason}"


def _caveats(found: Evidence) -> Iterator[str]:
    if found.comparisons and all(c.throughput.low is None for c in found.comparisons):
        yield f"An interval and a verdict need {MIN_PAIRS} repeats (--repeats {MIN_PAIRS})."
    if found.bound_refusal is not None:
        yield f"No bound on what lanes can gain: {found.bound_refusal}."
    if said := said_of(found.foreign_cpu_share):
        yield said
