"""`outrider bench load`: engines under arrivals that do not wait for them."""

from __future__ import annotations

from pathlib import Path

from outrider.bench.machine import new_run_id, provenance
from outrider.bench.pages import Page, write_page
from outrider.bench.requests import replay, texts_of
from outrider.bench.store import REQUESTS, RESULTS, write_json
from outrider.bench.studies.engines_plan import (
    SCENARIOS,
    Case,
    Prompts,
    closed_case,
    engines_named,
    levels_named,
    load_plan,
    poisson_case,
    replay_case,
    scenario,
)
from outrider.bench.studies.engines_record import load_record, request_rows, sample_record
from outrider.bench.studies.engines_report import load_sections
from outrider.cli import engine_setup
from outrider.cli.call import Call
from outrider.cli.engine_setup import subject
from outrider.cli.logs import start_logging
from outrider.cli.main import INTERRUPTED
from outrider.cli.options import LoadTestOptions
from outrider.cli.output import check_writable, json_line
from outrider.core.errors import ConfigError
from outrider.core.fields import known_words

NUM_REQUESTS = 10
SCHEMA = "outrider-bench-load/1"


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
            "schema": SCHEMA,
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
