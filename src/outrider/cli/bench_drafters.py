"""`outrider bench drafters`: every drafter on the same prompts in turns, beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.bench.machine import new_run_id, provenance
from outrider.bench.pages import Page, Section, write_page
from outrider.bench.store import RESULTS, write_json
from outrider.bench.studies.drafters import Plan, Race, Sample, pieces_of
from outrider.bench.studies.drafters_lineup import Drafts, Lineup, contestants_named, line_up
from outrider.bench.studies.drafters_report import (
    SAMPLES,
    SCHEMA,
    Evidence,
    evidence_of,
    evidence_record,
    plan_record,
    runner_record,
    sample_rows,
    sections,
)
from outrider.bench.workload import ADVERSARIAL, builtin_texts
from outrider.cli import engine_setup
from outrider.cli.call import Call
from outrider.cli.engine_setup import Subject, subject
from outrider.cli.logs import start_logging
from outrider.cli.main import INTERRUPTED
from outrider.cli.model_options import DraftersOptions
from outrider.cli.output import check_writable, json_line
from outrider.cli.paint import taken
from outrider.core.fields import words_of
from outrider.core.settings import DEFAULT


@dataclass(frozen=True, slots=True)
class _Done:
    """What was measured, until an interrupt if it is not `whole`."""

    folder: Path
    record: dict[str, object]
    evidence: Evidence
    samples: Sequence[Sample]
    whole: bool

    @property
    def code(self) -> int:
        if not self.whole:
            return INTERRUPTED
        return 1 if any(not sample.ok for sample in self.samples) else 0


def drafters(call: Call[DraftersOptions]) -> int:
    start_logging(call.resolved.program())
    options = call.options
    if options.csv is not None:
        check_writable(Path(options.csv))
    contestants = contestants_named(options.drafters)
    # Without a batch size of the user's own, prompts run one by one.
    about = subject(call.resolved, most_in_flight=1)
    plan = _plan(call, at_once=about.engine.batch_size)
    folder = engine_setup.folder_of("drafters", options.output_dir, [about])
    drafts = Drafts.of(about.models.target, about.models.draft)
    engine_setup.say(f"loading {len(contestants)} contestants, each with a target of its own")
    with closing(line_up(contestants, about.models.target, drafts, about.engine)) as lineup:
        for note in lineup.notes:
            engine_setup.say(f"note: {note}")
        done = _measure(call, plan, lineup, about, folder)
    if not done.samples:
        return INTERRUPTED
    _write(call, done, about)
    if not done.whole:
        engine_setup.say(f"\ninterrupted: what was measured until then is in {folder}")
    return done.code


def _plan(call: Call[DraftersOptions], *, at_once: int) -> Plan:
    options = call.options
    names = words_of("--domains", options.domains, hint="--domains code,maths")
    texts = {name: builtin_texts(name)[: options.prompts] for name in names}
    params = engine_setup.sampling(call.resolved, options.max_tokens)
    own = call.resolved.chosen["temperature"].origin != DEFAULT
    # What no prompt can keep a small model from, sampling does: greedily it repeats itself.
    hard = {} if own else {ADVERSARIAL: replace(params, temperature=1.0, ignore_eos=True)}
    return Plan(
        pieces=pieces_of(texts, at_once=at_once),
        repeats=options.repeats,
        params=params,
        by_domain=hard,
        tied=call.resolved.engine().sampler in ("match", "coupled"),
    )


def _measure(
    call: Call[DraftersOptions], plan: Plan, lineup: Lineup, about: Subject, folder: Path
) -> _Done:
    record: dict[str, object] = {
        "benchmark": "drafters",
        "schema": SCHEMA,
        "run_id": new_run_id(),
        "provenance": provenance(),
        **engine_setup.origins(about, call.resolved),
        "plan": plan_record(plan),
        "drafters": [runner_record(runner) for runner in lineup.runners],
    }
    visits = Race(plan, lineup.present).run()
    samples, whole = taken(visits, title=about.name, total=len(plan.visits()))
    evidence = evidence_of(plan, lineup, samples)
    record |= {
        "complete": whole,
        **evidence_record(evidence),
        "samples": sample_rows(samples),
    }
    return _Done(folder, record, evidence, samples, whole)


def _write(call: Call[DraftersOptions], done: _Done, about: Subject) -> None:
    """Results, rows, figures and pages; prints the tables, or JSON if that was asked for."""
    write_json(done.folder / RESULTS, done.record)
    rows = sample_rows(done.samples)
    engine_setup.write_rows(done.folder / SAMPLES, rows)
    if call.options.csv is not None:
        engine_setup.write_rows(Path(call.options.csv), rows)
    words = f"{about.name}, run {done.record['run_id']}"
    page = Page(f"Drafters, {words}", list(sections(done.evidence)))

    def draw() -> Sequence[Path]:
        from outrider.bench.studies.drafters_figures import draw_all

        return draw_all(done.evidence.cells, words, done.folder / "figures")

    drawn = engine_setup.draw(not call.options.no_plots, draw)
    pictures = engine_setup.pictures(done.folder, drawn)
    figures = [Section(title="Figures", pictures=pictures)] if pictures else []
    write_page(done.folder, Page(page.title, [*page.sections, *figures]))
    if call.options.json:
        print(json_line({"folder": str(done.folder), **done.record}))
    else:
        engine_setup.print_page(page)
        print(f"results: {done.folder} ({RESULTS}, {SAMPLES}, report.md, report.html)")
