"""`outrider bench sweep`: grids of anything, measured cell by cell beside plain decoding.

What a flag leaves open is filled in by the experiment file, then by the preset, then by the user's
settings, then by a default that keeps a first run short. A flag that names a setting takes the
place of a preset's axis of that name.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.bench.machine import provenance
from outrider.bench.pages import Page, Section, write_page
from outrider.bench.studies.sweep import Lineup, run_visits
from outrider.bench.studies.sweep_axes import (
    CONCURRENCY,
    DOMAIN,
    FLAG,
    PAIR,
    SPECIAL,
    Axis,
    axes_of,
    named,
)
from outrider.bench.studies.sweep_figures import draw_all
from outrider.bench.studies.sweep_grid import Grid, PromptSource, Terms, grid_of
from outrider.bench.studies.sweep_plan import Group, Pair, missing
from outrider.bench.studies.sweep_recipes import RECIPES, Recipe, recipe
from outrider.bench.studies.sweep_record import FILE_NAME, SWEEP, ResultsFolder
from outrider.bench.studies.sweep_report import sections, tested_claims
from outrider.bench.studies.sweep_summary import points, write_summary
from outrider.bench.workload import MIXED, PromptDataset, check_domain
from outrider.cli import engine_setup as engine_setup
from outrider.cli.bench_options import DECIDED_BY_GRIDS, SweepOptions
from outrider.cli.call import Call
from outrider.cli.main import INTERRUPTED, report
from outrider.cli.output import json_line
from outrider.cli.paint import Meter
from outrider.cli.session import start_logging
from outrider.cli.sweep_setup import with_experiment
from outrider.core.errors import CheckpointError, ConfigError, MachineError, OutriderError
from outrider.core.settings import DEFAULT, SETTINGS, Chosen, Given, Resolved, typed
from outrider.models.loading import pick_device

NUM_PROMPTS = 10
MAX_TOKENS = 64
# A folder's name has so many pairs or axes before it only counts them.
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A sweep that is ready to be planned; `grids` are the axes of each."""

    grids: tuple[tuple[Axis, ...], ...]
    subjects: tuple[Pair, ...]
    terms: Terms
    folder: Path
    options: SweepOptions
    recipe: Recipe | None
    warmup: int
    plots: bool


def set_up(call: Call[SweepOptions]) -> Setup:
    """Raises ConfigError for words that cannot be meant."""
    options, resolved = with_experiment(call.options, call.resolved, decided=DECIDED_BY_GRIDS)
    found = recipe(options.preset) if options.preset else None
    if found is None and not options.over:
        raise ConfigError(
            "nothing to vary.", hint=f"outrider bench sweep {FLAG} k=2,4,8, or --presets"
        )
    resolved = _with_settings(options, resolved, found)
    own = axes_of(options.over)
    _check_flags(resolved, own)
    grids = _grids(own, found, options, resolved)
    subjects = _subjects(grids, options, resolved)
    saved = PromptDataset.load(Path(options.prompt_set)) if options.prompt_set else None
    terms = _terms(options, resolved, found, saved)
    for axis in (axis for grid in grids for axis in grid):
        _check_domains(axis, saved)
    return Setup(
        grids=grids,
        subjects=subjects,
        terms=terms,
        folder=Path(options.output_dir or _folder_name(options, subjects, grids[0])),
        options=options,
        recipe=found,
        warmup=_first(options.warmup, found and found.warmup, 1),
        plots=not options.no_plots and (found is None or found.plots),
    )


def _with_settings(options: SweepOptions, resolved: Resolved, found: Recipe | None) -> Resolved:
    """The recipe's settings, and defaults of a sweep, where nobody decided. Other models than the
    recipe's have a precision of their own."""
    given: dict[str, object] = {"max_tokens": MAX_TOKENS, "batch_size": 1}
    given |= dict(found.settings) if found else {}
    if _other_models(options, resolved):
        given.pop("dtype", None)
    chosen = dict(resolved.chosen)
    for name, value in given.items():
        if chosen[name].origin == DEFAULT:
            fixed = typed(SETTINGS[name], Given(value, f"the preset's {name}"))
            chosen[name] = Chosen(SETTINGS[name], fixed, "preset")
    return Resolved(chosen)


def _flagged(resolved: Resolved, name: str) -> bool:
    setting = name not in SPECIAL and resolved.chosen.get(name)
    return bool(setting) and setting.origin.startswith("--")


def _other_models(options: SweepOptions, resolved: Resolved) -> bool:
    return options.pair is not None or _flagged(resolved, "target")


def _check_flags(resolved: Resolved, own: Sequence[Axis]) -> None:
    for axis in own:
        if _flagged(resolved, axis.name):
            flag = SETTINGS[axis.name].flag
            raise ConfigError(
                f"{flag} and {FLAG} {axis.name} both say which.", hint="drop one of them"
            )


def _grids(
    own: Sequence[Axis], found: Recipe | None, options: SweepOptions, resolved: Resolved
) -> tuple[tuple[Axis, ...], ...]:
    """The user's axes take the place of the recipe's."""
    ours = {axis.name: axis for axis in own}
    models = _other_models(options, resolved)
    if models and PAIR in ours:
        raise ConfigError(
            f"{FLAG} pair and --{'pair' if options.pair else 'target'} both name models.",
            hint="drop one of them",
        )
    grids: list[tuple[Axis, ...]] = []
    for words in found.grids if found else ((),):
        theirs = {
            axis.name: axis
            for axis in axes_of(words)
            if not _flagged(resolved, axis.name) and not (models and axis.name == PAIR)
        }
        if CONCURRENCY in ours:
            theirs.pop("batch_size", None)
        grids.append(tuple((theirs | ours).values()))
    return tuple(dict.fromkeys(grids))


def _check_domains(axis: Axis, saved: PromptDataset | None) -> None:
    for value in axis.values if axis.name == DOMAIN else ():
        if saved is None:
            check_domain(str(value))
        else:
            saved.get_by_domain(str(value))


def _subjects(
    grids: Sequence[Sequence[Axis]], options: SweepOptions, resolved: Resolved
) -> tuple[Pair, ...]:
    """Known pairs, or the models that settings name."""
    axis = next((axis for grid in grids for axis in grid if axis.name == PAIR), None)
    names = options.pair or (",".join(map(str, axis.values)) if axis else None)
    if names is None:
        found = [engine_setup.subject(resolved, most_in_flight=1)]
    else:
        found = engine_setup.known_pairs(resolved, names, most_in_flight=1)
    return tuple(Pair(one.name, one.models.target, one.models.draft, one.engine) for one in found)


def _terms(
    options: SweepOptions, resolved: Resolved, found: Recipe | None, saved: PromptDataset | None
) -> Terms:
    params = resolved.sampling()
    params = replace(params, n=1, logprobs=False, top_logprobs=0)
    return Terms(
        params=params,
        prompts=PromptSource(_first(options.prompts, found and found.prompts, NUM_PROMPTS), saved),
        domain=MIXED if saved is None else saved.domains[0],
        iterations=_first(options.iterations, found and found.iterations, 1),
        num_requests=options.requests,
        at_once=options.at_once,
    )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _folder_name(options: SweepOptions, subjects: Sequence[Pair], axes: Sequence[Axis]) -> Path:
    today = datetime.date.today().isoformat()
    device = pick_device(subjects[0].engine.device).type
    names = [axis.name for axis in axes if axis.name != PAIR]
    what = options.preset or "-".join(["sweep", *_few(names, "axes")])
    pairs = "+".join(_few([one.name for one in subjects], "pairs"))
    return Path("results") / "-".join([today, device, pairs, what])


def _few(names: Sequence[str], noun: str) -> list[str]:
    return list(names) if len(names) <= _MOST_NAMED else [f"{len(names)}-{noun}"]


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
    with Meter("sweep", sum(len(one.visits()) for one in groups), unit="visits") as meter:
        for group in groups:
            everything = group.visits()
            todo = everything if setup.options.fresh else missing(everything, folder)
            meter.step(len(everything) - len(todo), title=group.pair)
            if not todo:
                continue
            lineup = _load(run, group)
            if lineup is None:
                continue
            with closing(lineup):
                for _ in _measure_group(run, group, lineup):
                    meter.step()


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
