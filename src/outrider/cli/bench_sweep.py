"""`outrider bench sweep`: grids of anything, measured cell by cell beside plain decoding."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.progress import Progress, TaskID

from outrider.bench.machine import provenance
from outrider.bench.pages import Page, Section, write_page
from outrider.bench.studies.sweep import Lineup, run_visits
from outrider.bench.studies.sweep_axes import named
from outrider.bench.studies.sweep_figures import draw_all
from outrider.bench.studies.sweep_grid import Grid, grid_of
from outrider.bench.studies.sweep_plan import Group, Pair, missing
from outrider.bench.studies.sweep_recipes import RECIPES
from outrider.bench.studies.sweep_record import FILE_NAME, SWEEP, ResultsFolder
from outrider.bench.studies.sweep_report import sections, tested_claims
from outrider.bench.studies.sweep_summary import points, write_summary
from outrider.cli import engine_setup
from outrider.cli.bench_options import SweepOptions
from outrider.cli.bench_sweep_setup import Setup, set_up
from outrider.cli.call import Call
from outrider.cli.logs import start_logging
from outrider.cli.main import INTERRUPTED, report
from outrider.cli.output import json_line
from outrider.cli.paint import visits_bar
from outrider.core.errors import CheckpointError, ConfigError, MachineError, OutriderError


@dataclass(slots=True)
class _Run:
    """A sweep under way. `refused` has the exit codes of pairs and ways that cannot run."""

    setup: Setup
    folder: ResultsFolder
    refused: list[int] = field(default_factory=list[int])


def sweep(call: Call[SweepOptions]) -> int:
    start_logging(call.resolved.program())
    if call.options.presets:
        return _list_presets(call.options)
    setup = set_up(call)
    folder = ResultsFolder.open(setup.folder, SWEEP)
    run = _Run(setup, folder)
    if setup.recipe is not None and setup.recipe.remark:
        engine_setup.say(f"note: {setup.recipe.remark}")
    try:
        _measure(run, _planned(run))
    except KeyboardInterrupt:
        engine_setup.say(
            f"\ninterrupted: {len(folder.samples)} samples are safe in {folder.path}; "
            f"the same command with --output-dir {folder.path} goes on from there"
        )
        return INTERRUPTED
    if not folder.samples:
        return max(run.refused, default=1)
    return max(_show(setup, folder), *run.refused, 0)


def _list_presets(options: SweepOptions) -> int:
    if options.json:
        listed = [
            {"name": name, "text": one.text, "over": [list(words) for words in one.grids]}
            for name, one in RECIPES.items()
        ]
        print(json_line(listed))
        return 0
    for name, one in RECIPES.items():
        axes = "; then ".join(" ".join(words) for words in one.grids)
        print("\n    ".join([f"{name}: {one.text}", axes]))
    return 0


def _planned(run: _Run) -> list[Group]:
    """Groups of all pairs and grids. A pair whose models are not here is named, with the command
    that fetches them, and the others go on."""
    groups: list[Group] = []
    num_cells = 0
    for subject in run.setup.subjects:
        try:
            grids = [grid_of(subject, axes, run.setup.terms) for axes in run.setup.grids]
            for group in (group for grid in grids for group in grid.groups):
                run.folder.check(group.circumstances())
        except ConfigError:
            raise
        except OutriderError as error:
            _report_pair(run, subject, error)
            continue
        for grid in grids:
            _report_ways(run, grid)
            groups += grid.groups
            num_cells += grid.num_cells
    if groups:
        run.folder.prepare()
        num = sum(len(group.visits()) for group in groups)
        engine_setup.say(f"{num_cells} cells that draft, {num} visits; results: {run.folder.path}")
    return groups


def _report_pair(run: _Run, subject: Pair, error: OutriderError) -> None:
    hint = error.hint
    if isinstance(error, CheckpointError):
        models = [subject.target, *([subject.draft] if subject.draft else [])]
        fetch = " && ".join(f"hf download {name}" for name in models)
        hint = f"{fetch}, or another pair: --pair embedded"
    report(f"pair {subject.name}: {error}", hint)
    run.refused.append(error.exit_code)


def _report_ways(run: _Run, grid: Grid) -> None:
    for name, reason in grid.refused.items():
        engine_setup.say(f"note: not measured: {name}: {reason}")
        run.refused.append(1)


def _measure(run: _Run, groups: Sequence[Group]) -> None:
    """Visits that the folder lacks, group by group."""
    setup, folder = run.setup, run.folder
    with _progress(sum(len(group.visits()) for group in groups)) as (progress, task):
        for group in groups:
            everything = group.visits()
            todo = everything if setup.options.fresh else missing(everything, folder)
            progress.advance(task, len(everything) - len(todo))
            if not todo:
                continue
            progress.update(task, description=group.pair)
            lineup = _load(run, group)
            if lineup is None:
                continue
            with closing(lineup):
                for _ in _measure_group(run, group, lineup):
                    progress.advance(task)


def _load(run: _Run, group: Group) -> Lineup | None:
    """A group that cannot be loaded is named, and the others go on."""
    try:
        return Lineup(group.target, group.ways, tolerant=True)
    except OutriderError as error:
        report(f"pair {group.pair}: {error}", error.hint)
        run.refused.append(error.exit_code)
    except Exception as error:  # noqa: BLE001 - memory that is full must not end hours of others
        report(f"pair {group.pair}: {type(error).__name__}: {error}", None)
        run.refused.append(MachineError.exit_code)
    return None


def _measure_group(run: _Run, group: Group, lineup: Lineup) -> Iterator[None]:
    """Take turns, visit by visit. Ways that could not be loaded are left out, and named."""
    setup, folder = run.setup, run.folder
    for note in lineup.notes:
        engine_setup.say(f"note: {note}")
    refused = {_way_name(way.drafter, way.k): why for way, why in lineup.refused.items()}
    for name, reason in refused.items():
        engine_setup.say(f"note: not measured: {name}: {reason}")
        run.refused.append(1)
    everything = replace(group, ways=tuple(lineup.ways)).visits()
    todo = everything if setup.options.fresh else missing(everything, folder)
    number = folder.add_run(
        group.circumstances(),
        {
            "target": group.target,
            "axes": {axis.name: list(axis.values) for grid in setup.grids for axis in grid},
            "preset": setup.options.preset,
            "refused": refused,
            "provenance": provenance(),
            **lineup.facts(),
        },
    )
    for _ in run_visits(lineup, todo, folder, run=number, warmup=setup.warmup):
        yield


def _way_name(drafter: str, k: int) -> str:
    return named({"drafter": drafter, "k": k})


@contextmanager
def _progress(total: int) -> Generator[tuple[Progress, TaskID]]:
    with visits_bar() as progress:
        yield progress, progress.add_task("sweep", total=total)


def _show(setup: Setup, folder: ResultsFolder) -> int:
    """Write summary, page and figures, and print them; 1 if any sample failed."""
    record = write_summary(folder, tested_claims(folder))
    page = Page(f"Sweep, {folder.path.name}", list(sections(folder)))
    drawn = engine_setup.draw(setup.plots, lambda: draw_all(folder))
    pictures = engine_setup.pictures(folder.path, drawn)
    figures = [Section(title="Figures", pictures=pictures)] if pictures else []
    write_page(folder.path, Page(page.title, [*page.sections, *figures]))
    if setup.options.json:
        names = [str(path) for path in drawn]
        print(json_line({"folder": str(folder.path), "figures": names, **record}))
    else:
        engine_setup.print_page(page)
        print(f"results: {folder.path} ({FILE_NAME}, summary.json, summary.csv, report.html)")
        if drawn:
            print(f"figures: {Path(folder.path, 'figures')} ({len(drawn)} files)")
    return 1 if any(point.cell.num_failures for point in points(folder)) else 0
