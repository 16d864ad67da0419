"""What a run leaves behind: `results.json` with everything, `samples.csv` with a row a sample."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from outrider.bench.drafters.cells import Cell, agreement, cells
from outrider.bench.drafters.lineup import Lineup, Runner
from outrider.bench.drafters.report import Evidence, findings
from outrider.bench.drafters.samples import Plan, Sample

SCHEMA = "outrider-bench-drafters/1"
SAMPLES = "samples.csv"


def evidence_of(plan: Plan, lineup: Lineup, samples: Sequence[Sample]) -> Evidence:
    compared = {piece.domain for piece in plan.pieces if plan.comparable(piece)}
    shares = [s.foreign_cpu_share for s in samples if s.foreign_cpu_share is not None]
    return Evidence(
        cells=cells(samples),
        skipped=lineup.skipped,
        agreement=agreement([s for s in samples if s.domain in compared]),
        foreign_cpu_share=round(statistics.fmean(shares), 4) if shares else None,
    )


def plan_record(plan: Plan) -> dict[str, object]:
    counts: dict[str, int] = {}
    for piece in plan.pieces:
        counts[piece.domain] = counts.get(piece.domain, 0) + len(piece.prompts)
    return {
        "prompts": counts,
        "num_pieces": len(plan.pieces),
        "repeats": plan.repeats,
        "params": asdict(plan.params),
        "params_by_domain": {name: asdict(params) for name, params in plan.by_domain.items()},
    }


def runner_record(runner: Runner) -> dict[str, object]:
    return {"name": runner.name, "reason": runner.reason, "exact": runner.exact, **runner.facts}


def evidence_record(found: Evidence) -> dict[str, object]:
    return {
        "cells": [_cell_record(cell) for cell in found.cells],
        "skipped": dict(found.skipped),
        "agreement": {"runs": found.agreement[0], "same_tokens": found.agreement[1]},
        "findings": findings(found),
        "foreign_cpu_share": found.foreign_cpu_share,
    }


def sample_rows(samples: Sequence[Sample]) -> list[Mapping[str, object]]:
    """A row a sample, of plain values; those of a failed one may be empty."""
    return [_row(sample) for sample in samples]


def _cell_record(cell: Cell) -> dict[str, object]:
    return {**asdict(cell), "verdict": cell.verdict, "status": cell.status}


def _row(sample: Sample) -> Mapping[str, object]:
    numbers = sample.numbers
    stats = numbers.stats if numbers else None
    return {
        "domain": sample.domain,
        "piece": sample.piece,
        "repeat": sample.repeat,
        "drafter": sample.contestant,
        "status": sample.reason or "success",
        "seconds": stats and round(stats.seconds["total"], 6),
        "draft_seconds": stats and round(stats.seconds["draft"], 6),
        "verify_seconds": stats and round(stats.seconds["verify"], 6),
        "tokens": stats and stats.num_emitted,
        "rounds": stats and stats.num_rounds,
        "drafted": stats and stats.num_drafted,
        "accepted": stats and stats.num_accepted,
        "by_position": numbers and " ".join(f"{a}/{d}" for d, a in numbers.positions),
        "most_nodes": numbers and numbers.most_nodes,
        "foreign_cpu_share": sample.foreign_cpu_share,
    }
