"""`outrider bench sweep`: grids of anything, measured cell by cell beside plain decoding.

`outrider bench k`: the sweep over K alone, summed up in words and drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from outrider.cli.call import Call
from outrider.cli.main import INTERRUPTED, report
from outrider.cli.output import Meter, fitted, json_line, say
from outrider.cli.session import start_logging
from outrider.core.errors import CheckpointError, ConfigError, MachineError, OutriderError
from outrider.plugins.measure.turns import provenance
from outrider_lab.bench import figures
from outrider_lab.bench.studies.sweep import SweepLineup, run_visits
from outrider_lab.bench.studies.sweep_grid import SweepGrid, grid_of
from outrider_lab.bench.studies.sweep_plan import Group, PlannedVisit, SweptPair, missing, named
from outrider_lab.bench.studies.sweep_recipes import RECIPES, REFERENCES
from outrider_lab.bench.studies.sweep_record import FILE_NAME, ResultsFolder
from outrider_lab.bench.studies.sweep_report import draw_all, references, sections, tested_claims
from outrider_lab.bench.studies.sweep_summary import cells, write_summary
from outrider_lab.cli import engine_setup
from outrider_lab.cli.bench_options import KSweepOptions, SweepOptions
from outrider_lab.cli.sweep_setup import Setup, set_up, set_up_k
from outrider_lab.measure.store import Page


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
    if setup.recipe is not None and setup.recipe.remark:
        say(f"note: {setup.recipe.remark}")
    return _go(setup)


def k(call: Call[KSweepOptions]) -> int:
    start_logging(call.resolved.program())
    return _go(set_up_k(call))


def _go(setup: Setup) -> int:
    folder = ResultsFolder.open(setup.folder, setup.terms.schema)
    run = _Run(setup, folder)
    try:
        _measure(run, _planned(run))
    except KeyboardInterrupt:
        say(
            f"\ninterrupted: {len(folder.samples)} samples are safe in {folder.path}; "
            f"the same command with --output-dir {folder.path} goes on from there"
        )
        return INTERRUPTED
    if not folder.samples:
        return max(run.refused, default=1)
    _show(setup, folder)
    failed = any(cell.num_failures for cell in cells(folder))
    return max(int(failed), *run.refused, 0)


def _show(setup: Setup, folder: ResultsFolder) -> None:
    """Write summary, page and figures, and print them."""
    options, only_k = setup.options, folder.schema.one_setting
    record = write_summary(folder, None if only_k else tested_claims(folder))
    page = Page(f"Sweep, {folder.path.name}", list(sections(folder)))
    draw = figures.draw_all if only_k else draw_all
    drawn = engine_setup.draw(setup.plots, lambda: draw(folder))
    engine_setup.write_pages(folder.path, page, drawn)
    if options.json:
        names = [str(path) for path in drawn]
        print(json_line({"folder": str(folder.path), "figures": names, **record}))
        return
    if isinstance(options, KSweepOptions) and options.reference:
        page = replace(page, sections=[*page.sections, references(REFERENCES)])
    print(fitted(engine_setup.page_text(page)))
    print(fitted(f"results: {folder.path} ({FILE_NAME}, summary.json, summary.csv, report.html)"))
    if drawn:
        print(f"figures: {folder.path / 'figures'} ({len(drawn)} files)")


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
        print(fitted("\n    ".join([f"{name}: {one.text}", axes])))
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
            if not grid.num_cells:
                name = subject.name
                say(f"note: {name}: nothing is drafted, so only plain decoding runs")
            groups += grid.groups
            num_cells += grid.num_cells
    if groups:
        run.folder.prepare()
        num = sum(len(group.visits()) for group in groups)
        say(f"{num_cells} cells that draft, {num} visits; results: {run.folder.path}")
    return groups


def _report_pair(run: _Run, subject: SweptPair, error: OutriderError) -> None:
    hint = error.hint
    if isinstance(error, CheckpointError):
        models = [subject.target, *([subject.draft] if subject.draft else [])]
        fetch = " && ".join(f"hf download {name}" for name in models)
        hint = f"{fetch}, or another pair: --pair embedded"
    report(f"pair {subject.name}: {error}", hint)
    run.refused.append(error.exit_code)


def _report_ways(run: _Run, grid: SweepGrid) -> None:
    for name, reason in grid.refused.items():
        say(f"note: not measured: {name}: {reason}")
        run.refused.append(1)


def _measure(run: _Run, groups: Sequence[Group]) -> None:
    """Visits that the folder lacks, group by group."""
    everything = [group.visits() for group in groups]
    todo = [_outstanding(run, visits) for visits in everything]
    if groups and not any(todo):
        path = run.folder.path
        say(f"note: {path} has all samples already; --fresh measures again")
    with Meter("sweep", sum(map(len, everything)), unit="visits") as meter:
        for group, visits, left in zip(groups, everything, todo, strict=True):
            meter.step(len(visits) - len(left), title=group.pair)
            if not left:
                continue
            lineup = _load(run, group)
            if lineup is None:
                continue
            with closing(lineup):
                for _ in _measure_group(run, group, lineup):
                    meter.step()


def _outstanding(run: _Run, visits: Sequence[PlannedVisit]) -> Sequence[PlannedVisit]:
    return visits if run.setup.options.fresh else missing(visits, run.folder)


def _load(run: _Run, group: Group) -> SweepLineup | None:
    """A group that cannot be loaded is named, and the others go on."""
    try:
        return SweepLineup(group.target, group.ways, tolerant=True)
    except OutriderError as error:
        report(f"pair {group.pair}: {error}", error.hint)
        run.refused.append(error.exit_code)
    except Exception as error:  # noqa: BLE001 - memory that is full must not end hours of others
        report(f"pair {group.pair}: {type(error).__name__}: {error}", None)
        run.refused.append(MachineError.exit_code)
    return None


def _measure_group(run: _Run, group: Group, lineup: SweepLineup) -> Iterator[None]:
    """Take turns, visit by visit. Ways that could not be loaded are left out, and named."""
    setup, folder = run.setup, run.folder
    for note in lineup.notes:
        say(f"note: {note}")
    refused = {_way_name(way.drafter, way.k): why for way, why in lineup.refused.items()}
    for name, reason in refused.items():
        say(f"note: not measured: {name}: {reason}")
        run.refused.append(1)
    todo = _outstanding(run, replace(group, ways=tuple(lineup.ways)).visits())
    number = folder.add_run(
        group.circumstances(),
        {
            "target": group.target,
            "draft": next((way.draft for way in group.ways if way.draft), None),
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
