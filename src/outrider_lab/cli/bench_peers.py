"""`outrider bench peers`: other engines on the same weights and prompts, in turns with ours.

`outrider bench drafters`: every drafter on the same prompts in turns, beside plain decoding.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.api.callers import Prompt
from outrider.api.llm import LLM
from outrider.cli.call import Call
from outrider.cli.conversation import is_instruct
from outrider.cli.main import INTERRUPTED
from outrider.cli.output import Meter, check_writable, say, taken
from outrider.cli.session import start_logging
from outrider.core.env import cache_folder
from outrider.core.errors import ConfigError, MachineError
from outrider.core.fields import numbers_of, split, words_of
from outrider.core.files import FileKind, read_text
from outrider.core.settings import DEFAULT, Resolved
from outrider.models.loading import resolve
from outrider.pairs.catalog import draft_of
from outrider.plugins.measure.turns import provenance
from outrider_lab.bench.drawing import write_all
from outrider_lab.bench.peers.compare import (
    TIERS,
    Comparison,
    Watch,
    WeightsFolder,
    tier_folders,
    weights_of,
)
from outrider_lab.bench.peers.compare import Plan as PeersPlan
from outrider_lab.bench.peers.contestants import (
    DRAFTERS,
    FORMS,
    OURS,
    PEERS,
    PeerWeights,
    any_reads_gguf,
    parse_servers,
)
from outrider_lab.bench.peers.match import FILE_NAME, Journal
from outrider_lab.bench.peers.report import run_rows
from outrider_lab.bench.peers.report import sections as peers_sections
from outrider_lab.bench.studies.drafters import Race, RacePlan, pieces_of
from outrider_lab.bench.studies.drafters_lineup import Drafts, Lineup, contestants_named, line_up
from outrider_lab.bench.studies.drafters_report import (
    SAMPLES,
    SCHEMA,
    charts,
    evidence_of,
    evidence_record,
    plan_record,
    runner_record,
    sample_rows,
    sections,
)
from outrider_lab.bench.workload import (
    ADVERSARIAL,
    MESSAGES,
    MESSAGES_NOTE,
    RAW_HINT,
    builtin_texts,
)
from outrider_lab.cli import engine_setup
from outrider_lab.cli.bench_options import DraftersOptions, PeersOptions
from outrider_lab.cli.engine_setup import Results, Subject, chosen_words, subject
from outrider_lab.measure.store import RESULTS, Page, RecordError, entries, parse

QUICK_PROMPTS, QUICK_TOKENS = 1, 32
SAMPLES_FILE = "samples.csv"
# Of --peers, a word for servers, which --servers names.
HTTP = "http"


def peers(call: Call[PeersOptions]) -> int:
    start_logging(call.resolved.program())
    plan = _plan(call.options)
    journal = Journal.open(_folder(call))
    weights = _weights(call, plan)
    meter = Meter("taking turns", unit="prompts")
    comparison = Comparison(plan, weights, journal, _watch(meter))
    whole = True
    with meter:
        try:
            comparison.run()
        except KeyboardInterrupt:
            whole = False
    if not journal.found.runs:
        say("nothing was measured; see the reasons above and in the logs")
        return 1 if whole else INTERRUPTED
    results = _results(call, comparison, whole=whole)
    results.write(shown=not call.options.json)
    code = results.end(as_json=call.options.json)
    return code if not whole or _compared(comparison) else 1


def _compared(comparison: Comparison) -> bool:
    """Whether any other engine ran, if any was asked for. Those that did not are named."""
    plan, found = comparison.plan, comparison.journal.found
    asked = dict.fromkeys((*plan.names, *(server.peer for server in plan.servers)))
    ran = {who.peer for (who, _), runs in found.runs.items() if runs}
    absent = [name for name in asked if name not in ran]
    for name in absent:
        say(f"note: {name} was not measured: {_why_not(comparison, name)}")
    if absent and len(absent) == len(asked):
        say("nothing was compared: no engine but ours ran")
        return False
    return True


def _why_not(comparison: Comparison, name: str) -> str:
    if name in comparison.missing:
        return f"get it with: {comparison.missing[name]}"
    refused = comparison.journal.found.refused
    reasons = (why for what, why in refused.items() if what.split()[0] == name)
    return next(reasons, "its turn did not come")


def _plan(options: PeersOptions) -> PeersPlan:
    forms = chosen_words("--formats", options.formats, tuple(FORMS))
    drafters = chosen_words("--drafters", options.drafters, DRAFTERS)
    if not forms or not drafters:
        raise ConfigError("--formats and --drafters each need a word.", hint="--formats bf16")
    names = chosen_words("--peers", options.peers, (*PEERS, HTTP))
    taken = (OURS, *PEERS, HTTP)
    servers = parse_servers(options.servers, drafters=drafters, forms=forms, taken=taken)
    if HTTP in names and not servers:
        say("note: http is skipped: name a server with --servers NAME=URL")
    folder = options.peers_folder or str((cache_folder() or Path()) / "peers")
    return PeersPlan(
        names=[name for name in names if name != HTTP],
        servers=servers,
        forms=forms,
        drafters=drafters,
        temperatures=numbers_of(
            "--temperatures", options.temperatures, float, 0, 100, hint="--temperatures 0,0.8"
        ),
        num_prompts=QUICK_PROMPTS if options.quick else options.prompts,
        max_tokens=QUICK_TOKENS if options.quick else options.max_tokens,
        minutes=options.minutes,
        threads=options.threads or os.cpu_count() or 1,
        peers_folder=Path(folder).expanduser().resolve(),
        seldom=_seldom(options.seldom, [*names, *(server.peer for server in servers)]),
        trials=_trials(options.trials),
    )


def _seldom(text: str, names: Sequence[str]) -> dict[str, int]:
    pairs = [word.partition("=") for word in split(text)]
    for name, _, number in pairs:
        if name not in names or not number.isdecimal() or not int(number):
            raise ConfigError(
                f"--seldom must be PEER=N of one that takes part, got {text!r}.",
                hint="--seldom transformers=4",
            )
    return {name: int(number) for name, _, number in pairs}


def _trials(name: str | None) -> Mapping[str, Mapping[str, float]]:
    """Seconds a token by variant and temperature, as an earlier run wrote them."""
    if name is None:
        return {}
    try:
        record = parse(read_text(Path(name), FileKind.RESULTS))
        found = entries("its trials", record.get("trials_seconds_per_token"))
        return {
            who: {t: float(seconds) for t, seconds in entries(who, times).items()}
            for who, times in found.items()
        }
    except OSError as error:
        raise MachineError(f"{name} cannot be read: {error.strerror or error}.") from None
    except (RecordError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} has no trials of ours: {error}.", hint=f"name the {RESULTS} of a run"
        ) from None


def _own_models(resolved: Resolved) -> bool:
    """Whether the user named target or draft."""
    return any(resolved.chosen[name].origin != DEFAULT for name in ("target", "draft"))


def _weights(call: Call[PeersOptions], plan: PeersPlan) -> PeerWeights:
    options, program = call.options, call.resolved.program()
    store = WeightsFolder(plan.peers_folder / "weights", say)
    gguf = any_reads_gguf(plan.names, plan.peers_folder)
    if not _own_models(call.resolved):
        target, draft = tier_folders(options.tier or TIERS[0], store)
        return weights_of(target, draft, plan.forms, store, gguf=gguf)
    if options.tier:
        raise ConfigError("--tier and --target or --draft name models.", hint="drop one of them")
    named = draft_of(program.target) if program.draft == "auto" else program.draft
    draft = None if named in (None, "none") else resolve(named)
    return weights_of(resolve(program.target), draft, plan.forms, store, gguf=gguf)


def _folder(call: Call[PeersOptions]) -> Path:
    if call.options.output_dir is not None:
        return Path(call.options.output_dir)
    about = subject(call.resolved, most_in_flight=1)
    tier = "" if _own_models(call.resolved) else f"-{call.options.tier or TIERS[0]}"
    engine = replace(about.engine, device="cpu")
    named = replace(about, name=f"{about.name}{tier}", engine=engine)
    return engine_setup.folder_of("peers", None, [named])


def _watch(meter: Meter) -> Watch:
    """A bar for the race; the race also ends when its minutes are over."""
    return Watch(say, lambda total: meter.reach(0, total=total), meter.step)


def _results(call: Call[PeersOptions], comparison: Comparison, *, whole: bool) -> Results:
    plan, folder = comparison.plan, comparison.journal.folder
    tier = "own" if _own_models(call.resolved) else call.options.tier or TIERS[0]
    record: dict[str, Any] = {
        "benchmark": "peers",
        "provenance": provenance(),
        "complete": whole,
        "quick": call.options.quick,
        "tier": tier,
        "threads": plan.threads,
        "max_tokens": plan.max_tokens,
        **comparison.record(),
    }
    return Results(
        folder=folder,
        record=record,
        page=Page(f"Engines beside each other, tier {tier}", list(peers_sections(record))),
        rows={SAMPLES_FILE: run_rows(comparison.journal.found)},
        more=[FILE_NAME],
        resumable=True,
    )


def drafters(call: Call[DraftersOptions]) -> int:
    start_logging(call.resolved.program())
    options = call.options
    if options.csv is not None:
        check_writable(Path(options.csv))
    contestants = contestants_named(options.drafters, auto=True)
    # Without a batch size of the user's own, prompts run one by one.
    about = subject(call.resolved, most_in_flight=1)
    plan = _race_plan(call, at_once=about.engine.most_batch)
    folder = engine_setup.folder_of("drafters", options.output_dir, [about])
    drafts = Drafts.of(about.models.target, about.models.draft)
    say(f"loading {len(contestants)} contestants, each with a target of its own")
    with closing(line_up(contestants, about.models.target, drafts, about.engine)) as lineup:
        for note in lineup.notes:
            say(f"note: {note}")
        if not options.raw and is_instruct(lineup.llms[0], about.models.target):
            plan = _race_plan(call, at_once=about.engine.most_batch, reader=lineup.llms[0])
            say(f"note: {MESSAGES_NOTE}; {RAW_HINT}")
        results = _measure(call, plan, lineup, about, folder)
    rows = results.rows[SAMPLES]
    if not rows:
        return INTERRUPTED
    results.write(shown=not options.json, plots=not options.no_plots)
    if options.csv is not None:
        engine_setup.write_rows(Path(options.csv), rows)
    return results.end(as_json=options.json)


def _race_plan(call: Call[DraftersOptions], *, at_once: int, reader: LLM | None = None) -> RacePlan:
    """The plan; an instruct model is the `reader` of those prompts that are messages."""
    options = call.options
    names = words_of("--domains", options.domains, hint="--domains code,maths")

    def sent(name: str, text: str) -> Prompt:
        return text if reader is None or name not in MESSAGES else reader.encode_chat(text)

    shipped = {name: builtin_texts(name)[: options.prompts] for name in names}
    texts = {name: [sent(name, text) for text in found] for name, found in shipped.items()}
    params = engine_setup.sampling(call.resolved, options.max_tokens)
    own = call.resolved.chosen["temperature"].origin != DEFAULT
    # What no prompt can keep a small model from, sampling does: greedily it repeats itself.
    hard = {} if own else {ADVERSARIAL: replace(params, temperature=1.0, ignore_eos=True)}
    return RacePlan(
        pieces=pieces_of(texts, at_once=at_once),
        repeats=options.repeats,
        params=params,
        by_domain=hard,
        tied=call.resolved.engine().sampler in ("match", "coupled"),
        messages=tuple(name for name in names if reader is not None and name in MESSAGES),
    )


def _measure(
    call: Call[DraftersOptions], plan: RacePlan, lineup: Lineup, about: Subject, folder: Path
) -> Results:
    record: dict[str, object] = {
        **engine_setup.head("drafters", about, call.resolved, SCHEMA),
        "plan": plan_record(plan),
        "drafters": [runner_record(runner) for runner in lineup.runners],
    }
    visits = Race(plan, lineup.present).run()
    samples, whole = taken(visits, title=about.name, total=len(plan.visits()))
    evidence, rows = evidence_of(plan, lineup, samples), sample_rows(samples)
    record |= {"complete": whole, **evidence_record(evidence), "samples": rows}
    words = f"{about.name}, run {record['run_id']}"

    def draw() -> Sequence[Path]:
        return write_all(charts(evidence.cells, words), folder / "figures")

    return Results(
        folder=folder,
        record=record,
        page=Page(f"Drafters, {words}", list(sections(evidence))),
        rows={SAMPLES: rows},
        draw=draw,
        failed=any(not sample.ok for sample in samples),
    )
