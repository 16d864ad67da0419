"""`outrider bench engines`: every engine at every level in turns, with ratios and reasons.

`outrider bench load`: engines under arrivals that do not wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from outrider.cli.call import Call
from outrider.cli.main import INTERRUPTED, report
from outrider.cli.output import check_writable, json_line
from outrider.cli.session import start_logging
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.fields import known_words
from outrider_lab.bench.drawing import write_all
from outrider_lab.bench.requests import replay, texts_of
from outrider_lab.bench.studies.engines_cells import EnginesEvidence, Taken
from outrider_lab.bench.studies.engines_plan import (
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
from outrider_lab.bench.studies.engines_report import (
    SCHEMA,
    charts,
    evidence_record,
    load_record,
    load_sections,
    pair_charts,
    sections,
    timelines,
)
from outrider_lab.bench.studies.engines_run import evidence_of, request_rows, sample_record
from outrider_lab.cli import engine_setup
from outrider_lab.cli.bench_options import EnginesOptions, LoadTestOptions
from outrider_lab.cli.engine_setup import Results, Subject, known_pairs, subject
from outrider_lab.measure.store import REQUESTS, Page


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
    found: dict[str, _Engines] = {}
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
            found[about.name] = done
            done.results.write(shown=not options.json, plots=not options.no_plots)
        if not done.results.whole:
            break
    if len(found) > 1:
        _draw_pairs(call, folder, {name: done.evidence for name, done in found.items()})
    if options.csv is not None and found:
        rows = [{"pair": n, **row} for n, one in found.items() for row in request_rows(one.taken)]
        engine_setup.write_rows(Path(options.csv), rows)
    return _end(call, folder, [done.results for done in found.values()], refused)


class _Engines(NamedTuple):
    """A pair that was measured."""

    results: Results
    evidence: EnginesEvidence
    taken: Sequence[Taken]


def _measure(
    call: Call[EnginesOptions], plan: EnginePlan, names: Sequence[str], about: Subject, folder: Path
) -> _Engines:
    with engine_setup.loaded_engines(names, about) as loaded:
        record: dict[str, object] = {
            **engine_setup.head("engines", about, call.resolved, SCHEMA),
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
    words = f"{about.name}, run {record['run_id']}"

    def draw() -> Sequence[Path]:
        target = folder / "figures"
        return write_all(charts(evidence.cells, words) | timelines(taken, words), target)

    results = Results(
        folder=folder,
        record=record,
        page=Page(f"Engines, {words}", list(sections(evidence))),
        rows={REQUESTS: request_rows(taken)},
        draw=draw,
        failed=any(not sample.ok for sample in samples),
    )
    return _Engines(results, evidence, taken)


def _end(
    call: Call[EnginesOptions], folder: Path, found: Sequence[Results], refused: Sequence[int]
) -> int:
    """The exit code of all pairs together."""
    if not found:
        return max(refused, default=INTERRUPTED)
    if len(found) + len(refused) == 1:
        return found[0].end(as_json=call.options.json)
    if call.options.json:
        pairs = [results.printed for results in found]
        print(json_line({"folder": str(folder), "pairs": pairs}))
    return max(*refused, *(results.end(as_json=False) for results in found))


def _draw_pairs(
    call: Call[EnginesOptions], folder: Path, found: Mapping[str, EnginesEvidence]
) -> None:
    """Figures with a line a pair, of the last engine that was named."""
    engine = engines_named(call.options.engines)[-1]

    def draw() -> Sequence[Path]:
        cells = {name: evidence.cells for name, evidence in found.items()}
        return write_all(pair_charts(cells, engine, "pairs"), folder / "figures")

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
        seed=call.resolved.repeatable_sampling().rng_seed,
    )
    params = engine_setup.sampling(call.resolved, options.max_tokens)
    plan = load_plan(cases_of(options), prompts, params, options.repeats)
    about = subject(call.resolved, most_in_flight=plan.most_in_flight)
    folder = engine_setup.folder_of("load", options.output_dir, [about])
    with engine_setup.loaded_engines(names, about) as loaded:
        record = {
            **engine_setup.head("load", about, call.resolved, LOAD_SCHEMA),
            "engines": [contestant.record for contestant in loaded.contestants],
        }
        taken, whole = engine_setup.measure(plan, loaded.contestants, title=about.name)
    if not taken:
        return INTERRUPTED
    samples = [one.sample for one in taken]
    record |= {
        "complete": whole,
        **load_record(plan, samples),
        "samples": [sample_record(sample) for sample in samples],
    }
    rows = request_rows(taken)
    if options.csv is not None:
        engine_setup.write_rows(Path(options.csv), rows)
    results = Results(
        folder=folder,
        record=record,
        page=Page(f"Load, run {record['run_id']}", list(load_sections(plan, samples))),
        rows={REQUESTS: rows},
        failed=any(not sample.ok for sample in samples),
    )
    results.write(shown=not options.json)
    return results.end(as_json=options.json)


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
