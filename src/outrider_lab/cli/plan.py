"""`outrider plan`: whether speculation pays here, with which drafter and K, by how much."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from outrider.cache.pages import free_bytes
from outrider.cli.call import Call
from outrider.cli.models import read_spec
from outrider.cli.output import check_writable, fitted, json_line, write_whole
from outrider.cli.session import start_logging
from outrider.core.config import EngineConfig
from outrider.core.env import cache_folder
from outrider.core.errors import ConfigError
from outrider.core.settings import ProgramConfig
from outrider.estimate.cost import Curve
from outrider.kernels.operators import pick_device
from outrider_lab.bench.calibrate.answer import COUNTED_TOKENS, answer
from outrider_lab.bench.calibrate.found import Found
from outrider_lab.bench.studies.drafters_lineup import Drafts
from outrider_lab.cli.advice import (
    AUTO,
    ProgressMeter,
    Wish,
    contestants_of,
    message_texts,
    prompt_texts,
    with_trees,
)
from outrider_lab.cli.plan_page import (
    Origin,
    deciding_command,
    elsewhere,
    is_sheet,
    page_parts,
    record_of,
    replicas_part,
    with_carrier,
)
from outrider_lab.cli.verb_options import PlanOptions
from outrider_lab.planner.advise import Question, ReplicaPlan, advise, must_fit, replica_plans
from outrider_lab.planner.calibration import Calibration, PassCosts
from outrider_lab.planner.candidates import PlannedJob

# Tokens of a prompt where none are read.
_SHEET_CONTEXT = 512
# Of the seconds, what timing rounds may take at most; the rest loads, and counts what is accepted.
_TIMING_SHARE = 0.5


def plan(call: Call[PlanOptions]) -> int:
    start_logging(call.resolved.program())
    options = call.options
    if options.replicas > options.batch:
        raise ConfigError(
            f"{options.replicas} replicas have {options.batch} texts to write.",
            hint=f"--batch {options.replicas}, or fewer --replicas",
        )
    output = None if options.save is None else Path(options.save)
    if output is not None:
        check_writable(output, flag="--save")
    program = call.resolved.program()
    engine = _engine(call)
    origin: Origin
    if is_sheet(options.device):
        job = _job(options, _SHEET_CONTEXT)
        origin = elsewhere(options, program, engine, job)
        question = Question(
            job=job, memory_limit=origin.memory, engines=origin.engines, energy=origin.energy
        )
        question = replace(question, trees=with_trees(origin.calibration))
    else:
        _check_counted(options)
        memory = free_bytes(pick_device(engine.device))
        origin = _here(call, program, engine, memory)
        question = _question(options, origin, memory)
    made = with_carrier(advise(origin.calibration, question), origin)
    fleet = _fleet(options, origin, question)
    decides = "" if made.known else deciding_command(call)
    record = record_of(made, program, engine, origin, decides) | {
        "replicas": [one.as_record() for one in fleet]
    }
    if output is not None:
        write_whole(output, json_line(record) + "\n")
    parts = page_parts(made, program, engine, origin, decides)
    page = "\n\n".join([*parts, *replicas_part(fleet)])
    print(json_line(record) if options.json else fitted(page))
    return 1 if isinstance(origin, Found) and False in origin.same.values() else 0


def _fleet(options: PlanOptions, origin: Origin, question: Question) -> tuple[ReplicaPlan, ...]:
    """Empty where nothing is asked of more than one device, or of what it costs."""
    if options.replicas == 1 and options.price is None:
        return ()
    return replica_plans(
        origin.calibration,
        question,
        texts=options.batch,
        most=options.replicas,
        price=options.price,
    )


def _question(options: PlanOptions, found: Found, memory: int) -> Question:
    return Question(
        job=_job(options, found.context),
        memory_limit=memory,
        trees=with_trees(found.calibration),
        estimated=found.origins.estimated,
        others=found.others if found.is_disturbed else None,
    )


def _job(options: PlanOptions, context: int) -> PlannedJob:
    """With `context` where none is asked for; 0 is one as well."""
    asked = context if options.context is None else options.context
    return PlannedJob(batch=_batch(options), context=asked, new_tokens=options.max_tokens)


def _batch(options: PlanOptions) -> int:
    """Of one replica."""
    return math.ceil(options.batch / options.replicas)


def _here(
    call: Call[PlanOptions], program: ProgramConfig, engine: EngineConfig, memory: int
) -> Found:
    """Measure and count on this machine. Raises CapacityError before anything is loaded if the
    target does not fit."""
    options = call.options
    texts = prompt_texts(options.prompts, options.domains)
    on_cpu = pick_device(engine.device).type == "cpu"
    spec = read_spec(program.target, engine.dtype, on_cpu=on_cpu)
    spec = replace(spec, quantise=engine.quantise)
    _check_fits(
        program.target, spec.weight_bytes, spec.kv_bytes_per_token, _job(options, 0), memory
    )
    params = call.resolved.repeatable_sampling()
    limit = min(options.max_tokens, COUNTED_TOKENS)
    draft = None if program.draft in (AUTO, "none") else program.draft
    drafts = Drafts.of(program.target, draft)
    wish = Wish(
        target=program.target,
        spec=spec,
        engine=engine,
        contestants=contestants_of(options.drafters, drafts),
        drafts=drafts,
        batch=_batch(options),
        texts=texts,
        messages=message_texts(options),
        params=replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit)),
        timing=_TIMING_SHARE * options.seconds,
    )
    with ProgressMeter() as meter:
        found = answer(
            wish.asked(options.seconds, call.began),
            cache=cache_folder(),
            fresh=options.fresh,
            watch=meter.watch(
                lambda found: advise(found.calibration, _question(options, found, memory)).verdict
            ),
        )
    found = replace(found, raw=options.raw, notes=(*wish.notes, *found.notes))
    # Shipped prompts interest nobody one by one.
    return found if options.prompts else replace(found, texts=())


def _check_counted(options: PlanOptions) -> None:
    """Raises ConfigError for what would be told and then not used."""
    if options.alpha is not None:
        raise ConfigError(
            "--alpha supposes what is accepted on a device that is not here; here it is counted.",
            hint="leave --alpha out, or name a sheet: --device h100",
        )
    if options.draft_device is not None:
        raise ConfigError(
            "--draft-device is for plans of data sheets; here what the draft takes is measured.",
            hint="leave it out, or name both: --device h100 --draft-device rtx4090 --alpha 0.8",
        )


def _check_fits(target: str, weights: int, kept: int, job: PlannedJob, memory: int) -> None:
    """Raises CapacityError, with sizes and what to try."""
    unknown = PassCosts(Curve(((1.0, 1.0),)))
    sizes = Calibration(
        machine="",
        target_name=target,
        target=unknown,
        drafters=(),
        memory_bytes=weights,
        kv_bytes_per_token=kept,
    )
    must_fit(sizes, job, memory)


def _engine(call: Call[PlanOptions]) -> EngineConfig:
    engine = call.resolved.engine()
    here = call.options.device
    return engine if is_sheet(here) else replace(engine, device=here)
