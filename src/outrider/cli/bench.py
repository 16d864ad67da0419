"""`outrider bench k`: the K sweep, measured, summed up in words and drawn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from rich.progress import Progress

from outrider.bench import figure_style
from outrider.bench.provenance import provenance
from outrider.bench.sweep import Lineup, run_visits
from outrider.bench.sweep_plan import SweepPair, circumstances, outstanding, visits
from outrider.bench.sweep_results import FILE_NAME, ResultsFolder
from outrider.bench.sweep_summary import cells, write_summary
from outrider.cli.call import Call
from outrider.cli.logs import start_logging
from outrider.cli.main import INTERRUPTED, report
from outrider.cli.options import KSweepOptions
from outrider.cli.output import json_line
from outrider.cli.sweep_setup import Setup, set_up
from outrider.cli.sweep_tables import pages, reference_table
from outrider.cli.visits_bar import visits_bar
from outrider.core.errors import ConfigError, OutriderError


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


def _measure_pair(setup: Setup, pair: SweepPair, folder: ResultsFolder, progress: Progress) -> None:
    terms = circumstances(setup.sweep, pair)
    folder.check(terms)
    everything = visits(setup.sweep, pair)
    fresh = setup.options.fresh
    todo = everything if fresh else outstanding(setup.sweep, pair, folder)
    if not todo:
        _say(f"note: {pair.name}: {folder.path} has all samples already; --fresh measures again")
        return
    with closing(Lineup(pair.target, setup.sweep.ways_of(pair))) as lineup:
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
