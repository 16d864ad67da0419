"""`outrider bench engines`: every engine at every level in turns, with ratios and reasons."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.api.llm import LLM
from outrider.bench.engines.bandwidth import bare_reads
from outrider.bench.engines.cells import cells, comparisons
from outrider.bench.engines.findings import Evidence
from outrider.bench.engines.models import ahead_predictions, lane_bounds
from outrider.bench.engines.plan import Plan, engines_named, levels_named
from outrider.bench.engines.record import (
    RESULTS,
    SCHEMA,
    contestant_record,
    evidence_record,
    new_run_id,
    plan_record,
    request_rows,
    sample_record,
    write_page,
)
from outrider.bench.engines.report import sections
from outrider.bench.engines.samples import Sample, Taken, agreement
from outrider.bench.load.requests import texts_of
from outrider.bench.pages import Page, Section
from outrider.bench.provenance import provenance, write_json
from outrider.cli import engine_setup
from outrider.cli.call import Call
from outrider.cli.logs import start_logging
from outrider.cli.main import INTERRUPTED
from outrider.cli.options import EnginesOptions
from outrider.cli.output import json_line


def engines(call: Call[EnginesOptions]) -> int:
    start_logging(call.resolved.program())
    options = call.options
    names = engines_named(options.engines)
    levels = levels_named("--levels", options.levels)
    plan = Plan(
        levels=levels,
        repeats=options.repeats,
        num_requests=options.requests,
        max_tokens=options.max_tokens,
        gap_seconds=options.gap,
        texts=texts_of(options.prompts),
        params=engine_setup.sampling(call.resolved, options.max_tokens),
    )
    folder = engine_setup.folder_of("engines", options.output_dir, call.resolved)
    base = engine_setup.engine_settings(call.resolved, most_in_flight=max(1, *levels))
    found, llms = engine_setup.contestants(names, call.resolved, base)
    head: dict[str, object] = {
        "benchmark": "engines",
        "schema": SCHEMA,
        "run_id": new_run_id(),
        "provenance": provenance(),
        **engine_setup.origins(call.resolved),
        "plan": plan_record(plan),
        "engines": [contestant_record(contestant) for contestant in found],
    }
    taken, whole = engine_setup.measure(plan, found)
    if not taken:
        return INTERRUPTED
    samples = [one.sample for one in taken]
    evidence = _evidence(samples, llms)
    record = {
        **head,
        "complete": whole,
        **evidence_record(evidence),
        "samples": [sample_record(sample) for sample in samples],
    }
    _show(call, folder, record, Shown(evidence, taken))
    engine_setup.write_requests(folder, options.csv, request_rows(taken))
    if not whole:
        engine_setup.say(f"\ninterrupted: what was measured until then is in {folder}")
        return INTERRUPTED
    return 1 if any(not sample.ok for sample in samples) else 0


def _evidence(samples: Sequence[Sample], llms: dict[str, LLM]) -> Evidence:
    """What theory says is compared with the engine that does one thing after the other."""
    found = cells(samples)
    reads = bare_reads(llms["single"]) if "single" in llms else "single was not measured"
    shares = [s.foreign_cpu_share for s in samples if s.foreign_cpu_share is not None]
    return Evidence(
        cells=found,
        comparisons=comparisons(samples),
        bounds=[] if isinstance(reads, str) else lane_bounds(samples, reads),
        predictions=ahead_predictions(found),
        agreement=agreement(samples),
        bound_refusal=reads if isinstance(reads, str) else None,
        foreign_cpu_share=round(statistics.fmean(shares), 4) if shares else None,
    )


@dataclass(frozen=True, slots=True)
class Shown:
    """What tables and figures are made of."""

    evidence: Evidence
    taken: Sequence[Taken]


def _show(
    call: Call[EnginesOptions], folder: Path, record: dict[str, object], shown: Shown
) -> None:
    """Write everything; print the tables, or the record."""
    write_json(folder / RESULTS, record)
    page = Page(f"Engines, run {record['run_id']}", list(sections(shown.evidence)))
    words = f"{call.resolved.program().target}, run {record['run_id']}"

    def draw() -> Sequence[Path]:
        from outrider.bench.engines.figures import draw_all, draw_timelines

        target = folder / "figures"
        drawn = draw_all(shown.evidence.cells, words, target)
        return [*drawn, *draw_timelines(shown.taken, words, target)]

    drawn = engine_setup.draw(not call.options.no_plots, draw)
    pictures = engine_setup.pictures(folder, drawn)
    figures = [Section(title="Figures", pictures=pictures)] if pictures else []
    write_page(folder, Page(page.title, [*page.sections, *figures]))
    if call.options.json:
        print(json_line({"folder": str(folder), **record}))
        return
    engine_setup.print_page(page)
    print(f"results: {folder} ({RESULTS}, requests.csv, report.md, report.html)")
