"""A sweep's results as text: a table for each pair and domain, and what it means in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from outrider.bench.interval import MIN_PAIRS
from outrider.bench.presets import REFERENCES
from outrider.bench.quiet import said_of
from outrider.bench.sweep_results import ResultsFolder
from outrider.bench.sweep_summary import Cell, cells
from outrider.bench.sweeps.report import spread_text
from outrider.cli.output import screen_table
from outrider.core.config import EXACT_SAMPLERS

HEADER = (
    "K",
    "samples",
    "failed",
    "ok %",
    "latency ms",
    "tok/s",
    "speed-up (95 %)",
    "accepted %",
    "drafted",
    "accepted",
    "tok/round",
)


def pages(folder: ResultsFolder, record: Mapping[str, Any]) -> Iterator[str]:
    """The tables, then the sentences that go with them."""
    found = cells(folder)
    for (pair, domain), group in groupby(found, key=lambda cell: (cell.pair, cell.domain)):
        title = f"{pair}, {domain}: {_how(folder, pair)}"
        yield f"{title}\n{screen_table([_row(cell) for cell in group], header=HEADER)}"
    yield "\n".join(_sentences(found, record))


def reference_table() -> str:
    """Published figures. They are of other engines, machines and counters."""
    rows = [
        (
            item.pair,
            item.device,
            item.setting,
            "-" if item.tokens_per_second is None else f"{item.tokens_per_second:g}",
            "-" if item.acceptance is None else f"{100 * item.acceptance:.1f}",
            item.note,
        )
        for item in REFERENCES
    ]
    header = ("pair", "device", "setting", "tok/s", "accepted %", "note")
    return f"Published elsewhere, by other engines:\n{screen_table(rows, header=header)}"


def _how(folder: ResultsFolder, pair: str) -> str:
    run = next(run for run in reversed(folder.runs) if run["pair"] == pair)
    settings: Mapping[str, Any] = run["settings"]
    heat = settings["temperature"]
    parts = [
        "greedy" if heat == 0 else f"temperature {heat:g}",
        f"{settings['max_tokens']} tokens",
        f"batch {settings['batch_size']}",
        f"drafter {settings.get('drafter', 'none')}",
    ]
    if settings["sampler"] not in EXACT_SAMPLERS:
        parts.append(f"LOSSY sampler {settings['sampler']}")
    return ", ".join(parts)


def _row(cell: Cell) -> tuple[str, ...]:
    ratio = cell.speedup
    speedup = "1" if cell.k == 0 else "-"
    if ratio is not None:
        interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
        speedup = f"{ratio.value:.2f}{interval}"
    return (
        str(cell.k),
        str(cell.num_samples),
        str(cell.num_failures),
        f"{100 * cell.success_rate:.0f}",
        spread_text(cell.latency_ms, 1),
        spread_text(cell.tokens_per_second, 1),
        speedup,
        spread_text(cell.acceptance, 1, scale=100),
        spread_text(cell.num_drafted, 1) if cell.k else "-",
        spread_text(cell.num_accepted, 1) if cell.k else "-",
        "-" if cell.tokens_per_round is None else f"{cell.tokens_per_round:.2f}",
    )


def _sentences(found: list[Cell], record: Mapping[str, Any]) -> Iterator[str]:
    same = record["greedy_identical"]
    if same is not None:
        verb = "are" if same else "are NOT"
        yield f"Greedy tokens at every K {verb} those of plain decoding, in this same run."
    yield from record["verdicts"]
    if any(cell.speedup and cell.speedup.low is None for cell in found):
        num = MIN_PAIRS * max(run["settings"]["batch_size"] for run in record["runs"])
        yield f"An interval and a verdict need {MIN_PAIRS} pieces (--prompts {num})."
    reasons: Counter[str] = Counter()
    for cell in found:
        reasons.update(cell.failures)
    for reason, num in reasons.most_common(5):
        yield f"{num} failed: {reason}"
    if said := said_of(record["foreign_cpu_share"]):
        yield said
