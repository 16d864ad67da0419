"""`outrider bench k`: the K sweep, measured, summed up in words and drawn.

A sweep's results as text: a table for each pair and domain, and what it means in words.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from typing import Any

from rich.progress import Progress

from outrider.bench import figure_style
from outrider.bench.frame import MIN_PAIRS
from outrider.bench.machine import provenance, said_of
from outrider.bench.studies.sweep import Lineup, run_visits
from outrider.bench.studies.sweep_cells import Cell, cells
from outrider.bench.studies.sweep_plan import Pair, missing
from outrider.bench.studies.sweep_recipes import REFERENCES
from outrider.bench.studies.sweep_record import FILE_NAME, ResultsFolder
from outrider.bench.studies.sweep_report import spread_text
from outrider.bench.studies.sweep_summary import write_summary
from outrider.cli.call import Call
from outrider.cli.logs import start_logging
from outrider.cli.main import INTERRUPTED, report
from outrider.cli.options import KSweepOptions
from outrider.cli.output import json_line, screen_table
from outrider.cli.paint import visits_bar
from outrider.cli.sweep_setup import Setup, set_up
from outrider.core.config import EXACT_SAMPLERS
from outrider.core.errors import ConfigError, OutriderError

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


def k(call: Call[KSweepOptions]) -> int:
    start_logging(call.resolved.program())
    setup = set_up(call)
    for note in setup.notes:
        _say(f"note: {note}")
    folder = ResultsFolder.open(setup.folder)
    try:
        refused = _measure(setup, folder)
    except KeyboardInterrupt:
        _say(
            f"\ninterrupted: {len(folder.samples)} samples are safe in {folder.path}; "
            f"the same command with --output-dir {folder.path} goes on from there"
        )
        return INTERRUPTED
    if len(refused) < len(setup.pairs):
        return max(_show(setup, folder), *refused, 0)
    return max(refused)


def _measure(setup: Setup, folder: ResultsFolder) -> list[int]:
    """Run what is outstanding. The exit codes of pairs that cannot run; the others go on."""
    refused: list[int] = []
    with visits_bar() as progress:
        for pair in setup.pairs:
            try:
                _measure_pair(setup, pair, folder, progress)
            except OutriderError as error:
                if len(setup.pairs) == 1 or isinstance(error, ConfigError):
                    raise
                report(f"pair {pair.name}: {error}", error.hint)
                refused.append(error.exit_code)
    return refused


def _measure_pair(setup: Setup, pair: Pair, folder: ResultsFolder, progress: Progress) -> None:
    group = setup.sweep.group(pair)
    terms = group.circumstances()
    folder.check(terms)
    everything = group.visits()
    fresh = setup.options.fresh
    todo = everything if fresh else missing(everything, folder)
    if not todo:
        _say(f"note: {pair.name}: {folder.path} has all samples already; --fresh measures again")
        return
    with closing(Lineup(pair.target, group.ways)) as lineup:
        for note in lineup.notes:
            _say(f"note: {note}")
        run = folder.add_run(
            terms,
            {
                "target": pair.target,
                "draft": pair.draft,
                "provenance": provenance(),
                **lineup.facts(),
            },
        )
        done = len(everything) - len(todo)
        task = progress.add_task(pair.name, total=len(everything), completed=done)
        for _ in run_visits(lineup, todo, folder, run=run, warmup=setup.sweep.warmup):
            progress.advance(task)


def _show(setup: Setup, folder: ResultsFolder) -> int:
    """Write summary and figures, and print them; 1 if any sample failed."""
    record = write_summary(folder)
    drawn = _draw(setup, folder)
    if setup.options.json:
        print(json_line({"folder": str(folder.path), "figures": drawn, **record}))
    else:
        for page in pages(folder, record):
            print(page, end="\n\n")
        if setup.options.reference:
            print(reference_table(), end="\n\n")
        print(f"results: {folder.path} ({FILE_NAME}, summary.json, summary.csv)")
        if drawn:
            print(f"figures: {folder.path / 'figures'} ({len(drawn)} files)")
    return 1 if any(cell.num_failures for cell in cells(folder)) else 0


def _draw(setup: Setup, folder: ResultsFolder) -> Sequence[str]:
    if not setup.plots:
        return []
    reason = figure_style.why_not()
    if reason is not None:
        _say(f"note: {reason}")
        return []
    from outrider.bench.figures import draw_all

    return [str(path) for path in draw_all(folder)]


def _say(text: str) -> None:
    print(text, file=sys.stderr)
