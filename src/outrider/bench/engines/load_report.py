"""A load run's tables as sections of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from outrider.bench.engines.cases import Case, LoadPlan
from outrider.bench.engines.cells import Cell, cells, comparisons
from outrider.bench.engines.columns import LOAD_COLUMNS, LOAD_NOTE, columns, load_failures
from outrider.bench.engines.samples import Sample
from outrider.bench.engines.wins import HeadToHead, head_to_head
from outrider.bench.pages import Section

_MACHINE = ("CPU %", "GPU %", "status")
HEADER = ("case", "engine", "requests", "rejected", *LOAD_COLUMNS, *_MACHINE)


def sections(
    cases: Sequence[Case], samples: Sequence[Sample], found: Sequence[Cell]
) -> Iterator[Section]:
    yield Section(
        title="Load",
        text=[LOAD_NOTE, *(f"{case.name}: {case.text}." for case in cases)],
        header=HEADER,
        rows=[_row(cell, cases, samples) for cell in found],
    )
    wins = head_to_head(samples)
    if wins:
        yield Section(
            title="Head to head",
            text=["In how many visits each did better; ties apart."],
            header=("metric", "pair", "first", "second", "ties"),
            rows=[_wins_row(row) for row in wins],
        )
    failures = load_failures(found, [case.name for case in cases])
    if failures:
        yield Section(title="Failures", points=failures)


def load_record(plan: LoadPlan, samples: Sequence[Sample]) -> dict[str, object]:
    """Cases with their cells, and wins; ready for JSON."""
    return {
        "cases": [
            {"name": case.name, "text": case.text, **asdict(case.loop)} for case in plan.cases
        ],
        "repeats": plan.repeats,
        "max_tokens": plan.prompts.max_tokens,
        "seed": plan.prompts.seed,
        "num_prompts": len(plan.prompts.texts),
        "params": asdict(plan.params),
        "cells": [
            {**asdict(cell), "case": plan.cases[cell.level].name, "status": cell.status}
            for cell in cells(samples)
        ],
        "comparisons": [asdict(one) for one in comparisons(samples)],
        "head_to_head": [asdict(row) for row in head_to_head(samples)],
    }


def _row(cell: Cell, cases: Sequence[Case], samples: Sequence[Sample]) -> tuple[str, ...]:
    counts = _counts(cell, samples)
    return (
        cases[cell.level].name,
        cell.engine,
        f"{counts['ok']} of {counts['all']}",
        str(counts["rejected"]),
        *columns(cell, (*LOAD_COLUMNS, *_MACHINE)),
    )


def _counts(cell: Cell, samples: Sequence[Sample]) -> Mapping[str, int]:
    """Requests of a cell, failed samples included."""
    numbers = [
        sample.numbers
        for sample in samples
        if (sample.level, sample.engine) == (cell.level, cell.engine) and sample.numbers
    ]
    return {
        "all": sum(n.num_requests for n in numbers),
        "ok": sum(n.num_ok for n in numbers),
        "rejected": sum(n.num_rejected for n in numbers),
    }


def _wins_row(row: HeadToHead) -> tuple[str, ...]:
    return (
        row.metric,
        f"{row.first} : {row.second}",
        str(row.first_wins),
        str(row.second_wins),
        str(row.ties),
    )
