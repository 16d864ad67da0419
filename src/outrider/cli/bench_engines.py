"""`outrider bench engines`: every engine at every level in turns, with ratios and reasons.

`outrider bench load`: engines under arrivals that do not wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.machine import new_run_id, provenance
from outrider.bench.pages import Page, write_page
from outrider.bench.requests import replay, texts_of
from outrider.bench.store import REQUESTS, RESULTS, write_json
from outrider.bench.studies.engines_cells import Evidence, Taken
from outrider.bench.studies.engines_plan import (
    SCENARIOS,
    Case,
    EnginePlan,
    Levels,
    Prompts,
    closed_case,
    engines_named,
    levels_named,
    load_plan,
    poisson_case,
    replay_case,
    scenario,
)
from outrider.bench.studies.engines_record import (
    SCHEMA,
    evidence_record,
    load_record,
    request_rows,
    sample_record,
)
from outrider.bench.studies.engines_report import load_sections, sections
from outrider.bench.studies.engines_run import evidence_of
from outrider.cli import engine_setup
from outrider.cli.call import Call
from outrider.cli.engine_setup import Subject, known_pairs, subject
from outrider.cli.main import INTERRUPTED, report
from outrider.cli.options import EnginesOptions, LoadTestOptions
from outrider.cli.output import check_writable, json_line
from outrider.cli.session import start_logging
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.fields import known_words


@dataclass(frozen=True, slots=True)
class _Done:
    """A pair that was measured, until an interrupt if it is not `whole`."""

    name: str
    folder: Path
    record: dict[str, object]
    evidence: Evidence
    taken: Sequence[Taken]
    whole: bool

    @property
    def code(self) -> int:
        return 1 if any(not one.sample.ok for one in self.taken) else 0


def engines(call: Call[EnginesOptions]) -> int:
    start_logging(call.resolved.program())
    options = call.options
    if options.csv is not None:
        check_writable(Path(options.csv))
    names = engines_named(options.engines)
    levels = Levels(
        levels=levels_named("--levels", options.levels),
        num_requests=options.requests,
        gap_seconds=options.gap,
        num_warmup=options.warmup,
    )
    plan = levels.plan(
        Prompts(texts=texts_of(options.prompts), max_tokens=options.max_tokens),
        engine_setup.sampling(call.resolved, options.max_tokens),
        options.repeats,
    )
    subjects = (
        [subject(call.resolved, most_in_flight=plan.most_in_flight)]
        if options.pairs is None
        else known_pairs(call.resolved, options.pairs, most_in_flight=plan.most_in_flight)
    )
    folder = engine_setup.folder_of("engines", options.output_dir, subjects)
    several = len(subjects) > 1
    found: list[_Done] = []
    refused: list[int] = []
    for about in subjects:
        place = folder / about.name if several else folder
        try:
            done = _measure(call, plan, names, about, place)
        except OutriderError as error:
            if not several or isinstance(error, ConfigError):
                raise
            report(f"pair {about.name}: {error}", error.hint)
            refused.append(error.exit_code)
            continue
        if done.taken:
            found.append(done)
            _write(call, done)
        if not done.whole:
            break
    return _end(call, folder, found, refused)


def _measure(
    call: Call[EnginesOptions], plan: EnginePlan, names: Sequence[str], about: Subject, folder: Path
) -> _Done:
    with engine_setup.loaded_engines(names, about) as loaded:
        record: dict[str, object] = {
            "benchmark": "engines",
            "schema": SCHEMA,
            "run_id": new_run_id(),
            "provenance": provenance(),
            **engine_setup.origins(about, call.resolved),
            "plan": plan.record,
            "engines": [contestant.record for contestant in loaded.contestants],
        }
        taken, whole = engine_setup.measure(plan, loaded.contestants, title=about.name)
        samples = [one.sample for one in taken]
        evidence = evidence_of(samples, loaded)
    record |= {
        "complete": whole,
        **evidence_record(evidence),
        "samples": [sample_record(sample) for sample in samples],
    }
    return _Done(about.name, folder, record, evidence, taken, whole)


def _write(call: Call[EnginesOptions], done: _Done) -> None:
    """Results, rows, figures and pages; prints the tables unless JSON was asked for."""
    write_json(done.folder / RESULTS, done.record)
    engine_setup.write_rows(done.folder / REQUESTS, request_rows(done.taken))
    page = Page(f"Engines, {done.name}, run {done.record['run_id']}", list(sections(done.evidence)))
    words = f"{done.name}, run {done.record['run_id']}"

    def draw() -> Sequence[Path]:
        from outrider.bench.studies.engines_figures import draw_all, draw_timelines

        target = done.folder / "figures"
        drawn = draw_all(done.evidence.cells, words, target)
        return [*drawn, *draw_timelines(done.taken, words, target)]

    drawn = engine_setup.draw(not call.options.no_plots, draw)
    engine_setup.write_pages(done.folder, page, drawn)
    if not call.options.json:
        engine_setup.print_page(page)
        print(f"results: {done.folder} ({RESULTS}, {REQUESTS}, report.md, report.html)\n")


def _end(
    call: Call[EnginesOptions], folder: Path, found: Sequence[_Done], refused: Sequence[int]
) -> int:
    """What several pairs have together, and the exit code."""
    if len(found) > 1:
        _draw_pairs(call, folder, found)
    if call.options.csv is not None and found:
        rows = [{"pair": one.name, **row} for one in found for row in request_rows(one.taken)]
        engine_setup.write_rows(Path(call.options.csv), rows)
    if call.options.json and found:
        records = [{"folder": str(done.folder), **done.record} for done in found]
        several = len(found) + len(refused) > 1
        print(json_line({"folder": str(folder), "pairs": records} if several else records[0]))
    if not found or not found[-1].whole:
        if found:
            engine_setup.say(f"\ninterrupted: what was measured until then is in {folder}")
        return max(refused, default=INTERRUPTED)
    return max([*refused, *(done.code for done in found)])


def _draw_pairs(call: Call[EnginesOptions], folder: Path, found: Sequence[_Done]) -> None:
    """Figures with a line a pair, of the last engine that was named."""
    engine = engines_named(call.options.engines)[-1]

    def draw() -> Sequence[Path]:
        from outrider.bench.studies.engines_figures import draw_pairs

        cells = {done.name: done.evidence.cells for done in found}
        return draw_pairs(cells, engine, "pairs", folder / "figures")

    if engine_setup.draw(not call.options.no_plots, draw) and not call.options.json:
        print(f"figures of all pairs: {folder / 'figures'}")


NUM_REQUESTS = 10
LOAD_SCHEMA = "outrider-bench-load/1"


def load(call: Call[LoadTestOptions]) -> int:
    start_logging(call.resolved.program())
    options = call.options
    if options.csv is not None:
        check_writable(Path(options.csv))
    names = engines_named(options.engines)
    prompts = Prompts(
        texts=texts_of(options.prompts),
        max_tokens=options.max_tokens,
        seed=call.resolved.sampling().seed,
    )
    params = engine_setup.sampling(call.resolved, options.max_tokens)
    plan = load_plan(cases_of(options), prompts, params, options.repeats)
    about = subject(call.resolved, most_in_flight=plan.most_in_flight)
    folder = engine_setup.folder_of("load", options.output_dir, [about])
    with engine_setup.loaded_engines(names, about) as loaded:
        head: dict[str, object] = {
            "benchmark": "load",
            "schema": LOAD_SCHEMA,
            "run_id": new_run_id(),
            "provenance": provenance(),
            **engine_setup.origins(about, call.resolved),
            "engines": [contestant.record for contestant in loaded.contestants],
        }
        taken, whole = engine_setup.measure(plan, loaded.contestants, title=about.name)
    if not taken:
        return INTERRUPTED
    samples = [one.sample for one in taken]
    record = {
        **head,
        "complete": whole,
        **load_record(plan, samples),
        "samples": [sample_record(sample) for sample in samples],
    }
    write_json(folder / RESULTS, record)
    for path in (folder / REQUESTS, *([Path(options.csv)] if options.csv else [])):
        engine_setup.write_rows(path, request_rows(taken))
    page = Page(f"Load, run {record['run_id']}", list(load_sections(plan, samples)))
    write_page(folder, page)
    if options.json:
        print(json_line({"folder": str(folder), **record}))
    else:
        engine_setup.print_page(page)
        print(f"results: {folder} ({RESULTS}, {REQUESTS}, report.md, report.html)")
    if not whole:
        engine_setup.say(f"\ninterrupted: what was measured until then is in {folder}")
        return INTERRUPTED
    return 1 if any(not sample.ok for sample in samples) else 0


def cases_of(options: LoadTestOptions) -> list[Case]:
    """Raises ConfigError for words that say two things."""
    kinds = {
        "--rate": options.rate,
        "--concurrency": options.concurrency,
        "--replay": options.replay,
    }
    given = [flag for flag, value in kinds.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} each say what arrives.", hint="keep one of them")
    num = options.requests
    if num is None and options.duration is None:
        num = NUM_REQUESTS
    if options.rate is not None:
        most, duration = options.max_concurrent, options.duration
        return [poisson_case(0, "poisson", options.rate, most, num_requests=num, duration=duration)]
    if options.replay is not None:
        recorded = replay(Path(options.replay))[: options.requests]
        if options.duration is not None:
            recorded = [r for r in recorded if r.arrival_seconds < options.duration]
        return [replay_case(recorded, options.max_concurrent)]
    if options.concurrency is not None:
        levels = levels_named("--concurrency", options.concurrency, lowest=1)
        return [
            closed_case(place, n, num_requests=num, duration=options.duration)
            for place, n in enumerate(levels)
        ]
    if options.duration is not None:
        raise ConfigError(
            "--duration says nothing of a scenario.",
            hint="use it with --rate, --concurrency or --replay",
        )
    names = known_words("--scenarios", options.scenarios, SCENARIOS, kind="scenario")
    return [scenario(n, name, num or NUM_REQUESTS) for n, name in enumerate(names)]
