"""From samples to cells: what a K did for a domain, beside plain decoding of the same moments.

Means and standard deviations are over successful samples, the speed-up is a ratio of paired medians
with its interval (interval.py), and acceptance is accepted over drafted, a value a sample. Nothing
here is measured; the same samples give the same summary.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

from outrider.bench.frame import Ratio, csv_text, ratio_of_medians
from outrider.bench.store import write_json, write_text
from outrider.bench.sweep_results import ResultsFolder
from outrider.bench.sweep_samples import Numbers, Sample

STAGES = ("draft", "target", "accept", "other")


@dataclass(frozen=True, slots=True)
class Spread:
    """`std` is the sample standard deviation, None for a single value."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        std = round(statistics.stdev(values), 6) if len(values) > 1 else None
        return cls(round(statistics.fmean(values), 6), std)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pair, domain and K. What is None could not be told: nothing was drafted, or no sample
    succeeded. `identical` says whether all greedy ids were those of plain decoding; `num_slower`
    counts the pieces that took longer than it. `stage_ms` is milliseconds a token."""

    pair: str
    domain: str
    k: int
    label: str
    num_samples: int
    num_failures: int
    failures: Mapping[str, int]
    latency_ms: Spread | None
    first_token_ms: Spread | None
    tokens_per_second: Spread | None
    speedup: Ratio | None
    num_slower: int
    acceptance: Spread | None
    num_drafted: Spread | None
    num_accepted: Spread | None
    tokens_per_round: float | None
    drafted_per_round: float | None
    accepted_histogram: Sequence[int]
    stage_ms: Mapping[str, float]
    verify_ms: Spread | None
    identical: bool | None

    @property
    def success_rate(self) -> float:
        return 1 - self.num_failures / self.num_samples


def cells(folder: ResultsFolder) -> list[Cell]:
    """By pair and domain in the order in which they were first measured, then by K."""
    samples = list(folder.current().values())
    plain = plain_by_place(folder)
    groups: dict[tuple[str, str], dict[int, list[Sample]]] = {}
    for sample in samples:
        config = sample.config
        by_k = groups.setdefault((config.model_pair_name, config.prompt_domain), {})
        by_k.setdefault(config.k, []).append(sample)
    return [cell_of(by_k[k], plain) for by_k in groups.values() for k in sorted(by_k)]


def summary(folder: ResultsFolder) -> dict[str, object]:
    """Everything, ready for JSON."""
    found = cells(folder)
    shares = [s.foreign_cpu_share for s in folder.samples if s.foreign_cpu_share is not None]
    checked = [cell.identical for cell in found if cell.identical is not None and cell.k]
    return {
        "benchmark": "k",
        "schema": folder.schema.name,
        "greedy_identical": all(checked) if checked else None,
        "num_samples": sum(cell.num_samples for cell in found),
        "num_failures": sum(cell.num_failures for cell in found),
        "foreign_cpu_share": round(statistics.fmean(shares), 4) if shares else None,
        "verdicts": verdicts(found),
        "cells": [cell_dict(cell) for cell in found],
        "runs": folder.runs,
    }


def write_summary(folder: ResultsFolder) -> dict[str, object]:
    """Write summary.json and summary.csv into the folder; what the former holds."""
    record = summary(folder)
    write_json(folder.path / "summary.json", record)
    write_text(folder.path / "summary.csv", csv_text(flat_rows(cells(folder))))
    return record


def cell_dict(cell: Cell) -> dict[str, object]:
    return {**asdict(cell), "success_rate": round(cell.success_rate, 4)}


def flat_rows(found: Sequence[Cell]) -> list[dict[str, object]]:
    """Cells as rows of a table of plain values, for CSV."""
    return [flat_row(cell) for cell in found]


def verdicts(found: Sequence[Cell]) -> list[str]:
    """A sentence for each cell where speculation lost, or may have, and one if it never did. Cells
    without an interval are not judged."""
    speculative = [cell for cell in found if cell.k]
    judged = [cell for cell in speculative if cell.speedup and cell.speedup.low is not None]
    named = [(cell, f"{cell.pair}, {cell.domain}, K={cell.k}") for cell in judged]
    lost = [words for cell, name in named if (words := loss(cell, name))]
    if judged and not lost:
        which = "of this sweep" if len(judged) == len(speculative) else "that has an interval"
        return [f"Speculation lost in no cell {which}."]
    return lost


def loss(cell: Cell, name: str) -> str | None:
    """A sentence if speculation lost, or may have."""
    ratio = cell.speedup
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low > 1:
        return None
    verb = "loses" if ratio.high < 1 else "does not measurably win"
    acceptance = f", {100 * cell.acceptance.mean:.0f} % accepted" if cell.acceptance else ""
    return (
        f"{name}: speculation {verb}: "
        f"{ratio.value:.2f}× ({ratio.low:.2f} to {ratio.high:.2f}){acceptance}, "
        f"slower on {cell.num_slower} of {ratio.num_pairs} pieces."
    )


Place = tuple[object, ...]


def plain_by_place(folder: ResultsFolder) -> dict[Place, Sample]:
    """Plain decoding of every visit, for `cell_of`."""
    return {_place(s): s for s in folder.samples if s.config.k == 0}


def _place(sample: Sample) -> Place:
    """Where a sample and its plain decoding meet."""
    config = sample.config
    return (
        sample.visit,
        config.model_pair_name,
        config.prompt_domain,
        sample.piece,
        sample.iteration,
    )


def cell_of(samples: Sequence[Sample], plain: Mapping[Place, Sample]) -> Cell:
    """What samples of one configuration came to, beside plain decoding of the same visits."""
    config = samples[0].config
    good = [s.numbers for s in samples if s.ok and s.numbers is not None]
    failures = Counter(s.reason for s in samples if s.reason is not None)
    pairs = _pairs(samples, plain) if config.k else []
    identical = [s.numbers.identical for s in samples if s.numbers is not None]
    acceptance = [rate for n in good if (rate := n.acceptance_rate) is not None]
    num_rounds = sum(n.num_rounds for n in good)
    return Cell(
        pair=config.model_pair_name,
        domain=config.prompt_domain,
        k=config.k,
        label=config.label,
        num_samples=len(samples),
        num_failures=sum(failures.values()),
        failures=dict(sorted(failures.items())),
        latency_ms=_spread(good, lambda n: 1000 * n.seconds),
        first_token_ms=_spread(good, lambda n: 1000 * n.first_token_seconds),
        tokens_per_second=_spread(good, lambda n: n.tokens_per_second),
        speedup=ratio_of_medians([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None,
        num_slower=sum(b > a for a, b in pairs),
        acceptance=Spread.of(acceptance),
        num_drafted=_spread(good, lambda n: n.num_drafted),
        num_accepted=_spread(good, lambda n: n.num_accepted),
        tokens_per_round=_rate(sum(n.num_tokens for n in good), num_rounds),
        drafted_per_round=_rate(sum(n.num_drafted for n in good), num_rounds),
        accepted_histogram=_histogram(good),
        stage_ms=_stage_ms(good),
        verify_ms=Spread.of([n.verify_ms for n in good if n.verify_ms is not None]),
        identical=None if None in identical or not identical else all(identical),
    )


def _pairs(samples: Sequence[Sample], plain: Mapping[Place, Sample]) -> list[tuple[float, float]]:
    """Seconds a token of plain decoding and of K, a pair a piece: medians of its repetitions."""
    by_piece: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        beside = plain.get(_place(sample))
        if beside is None or beside.numbers is None or sample.numbers is None:
            continue
        if beside.ok and sample.ok:
            both = (beside.numbers.seconds_per_token, sample.numbers.seconds_per_token)
            by_piece.setdefault(sample.piece, []).append(both)
    return [
        (statistics.median(a for a, _ in found), statistics.median(b for _, b in found))
        for found in by_piece.values()
    ]


def _spread(good: Sequence[Numbers], value: Callable[[Numbers], float]) -> Spread | None:
    return Spread.of([value(numbers) for numbers in good])


def _stage_ms(good: Sequence[Numbers]) -> dict[str, float]:
    """Where the time of a token goes; `target` is reading the prompt and verifying."""
    num_tokens = sum(n.num_tokens for n in good)
    if not num_tokens:
        return {}
    seconds = {
        "draft": sum(n.draft_seconds for n in good),
        "target": sum(n.prefill_seconds + n.verify_seconds for n in good),
        "accept": sum(n.accept_seconds for n in good),
        "other": sum(n.other_seconds for n in good),
    }
    return {name: round(1000 * seconds[name] / num_tokens, 6) for name in STAGES}


def _histogram(good: Sequence[Numbers]) -> list[int]:
    """Empty if no round drafted, which is so where a drafter found nothing to propose."""
    histograms = [n.accepted_histogram for n in good]
    counts = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
    return counts if any(counts) else []


def _rate(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def flat_row(cell: Cell) -> dict[str, object]:
    row: dict[str, object] = {
        "pair": cell.pair,
        "domain": cell.domain,
        "k": cell.k,
        "label": cell.label,
        "samples": cell.num_samples,
        "failures": cell.num_failures,
        "success_percent": round(100 * cell.success_rate, 2),
    }
    spreads = {
        "latency_ms": cell.latency_ms,
        "first_token_ms": cell.first_token_ms,
        "tokens_per_second": cell.tokens_per_second,
        "acceptance": cell.acceptance,
        "drafted": cell.num_drafted,
        "accepted": cell.num_accepted,
        "verify_ms": cell.verify_ms,
    }
    for name, spread in spreads.items():
        row[f"{name}_mean"] = spread and spread.mean
        row[f"{name}_std"] = spread and spread.std
    ratio = cell.speedup
    row["speedup"] = ratio and round(ratio.value, 4)
    row["speedup_low"] = ratio and ratio.low and round(ratio.low, 4)
    row["speedup_high"] = ratio and ratio.high and round(ratio.high, 4)
    row["tokens_per_round"] = cell.tokens_per_round
    row["identical"] = cell.identical
    return row
