"""`outrider plan`: whether speculation pays here, with which drafter and K, by how much."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider.bench.calibrate.session import (
    AUTO,
    COUNTED_TOKENS,
    Asked,
    Found,
    counted,
    measured,
    opened,
)
from outrider.bench.requests import texts_of
from outrider.bench.studies.drafters_lineup import known
from outrider.bench.workload import builtin_texts
from outrider.cache.capacity import free_bytes
from outrider.cli.call import Call
from outrider.cli.models import read_spec
from outrider.cli.output import check_writable, fitted, json_line, write_whole
from outrider.cli.paint import Meter
from outrider.cli.plan_page import Origin, elsewhere, is_sheet, page_of, record_of
from outrider.cli.run_options import PlanOptions
from outrider.cli.session import start_logging
from outrider.core.config import EngineConfig
from outrider.core.env import cache_folder
from outrider.core.errors import ConfigError
from outrider.core.fields import words_of
from outrider.core.settings import ProgramConfig
from outrider.estimate.calibration import Calibration, PassCosts
from outrider.estimate.cost import Curve
from outrider.models.loading import pick_device
from outrider.planner.advise import Question, advise, must_fit
from outrider.planner.candidates import PlannedJob

# Tokens of a prompt where none are read.
_SHEET_CONTEXT = 512
# Prompts of a domain, or of a file, that are written to count what is kept.
_MOST_PROMPTS = 8
# What is said of a stage where nobody watches a bar; any other stage is a shape of rounds.
_STAGES = {
    "loading": "loading the target and its drafters",
    "counting": "counting what is kept of drafts on the prompts",
}
_TIMING = "timing rounds (--seconds bounds it)"


def plan(call: Call[PlanOptions]) -> int:
    start_logging(call.resolved.program())
    options = call.options
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
            job=job,
            memory_limit=origin.memory,
            engines=origin.engines,
            energy=origin.energy,
        )
    else:
        _check_counted(options)
        memory = free_bytes(pick_device(engine.device))
        with _Meter() as meter:
            origin = _here(call, program, engine, memory, meter)
        question = Question(job=_job(options, origin.context), memory_limit=memory)
    calibration = origin.calibration
    made = advise(calibration, replace(question, trees=_with_trees(calibration)))
    record = record_of(made, program, engine, origin)
    if output is not None:
        write_whole(output, json_line(record) + "\n")
    print(json_line(record) if options.json else fitted(page_of(made, program, engine, origin)))
    return 1 if isinstance(origin, Found) and False in origin.same.values() else 0


def _job(options: PlanOptions, context: int) -> PlannedJob:
    """With `context` where none is asked for; 0 is one as well."""
    asked = context if options.context is None else options.context
    return PlannedJob(batch=options.batch, context=asked, new_tokens=options.max_tokens)


def _with_trees(calibration: Calibration) -> tuple[str, ...]:
    """The drafters that can draft trees."""
    names = (one.name for one in calibration.drafters)
    return tuple(name for name in names if known(name.partition("=")[0]).branches)


def _here(
    call: Call[PlanOptions],
    program: ProgramConfig,
    engine: EngineConfig,
    memory: int,
    meter: _Meter,
) -> Found:
    """Measure and count on this machine. Raises CapacityError before anything is loaded if the
    target does not fit."""
    options = call.options
    texts = _texts(options)
    spec = replace(read_spec(program.target, engine.dtype), quantise=engine.quantise)
    _check_fits(
        program.target, spec.weight_bytes, spec.kv_bytes_per_token, _job(options, 0), memory
    )
    params = call.resolved.repeatable_sampling()
    asked = Asked(
        target=program.target,
        draft=None if program.draft in (AUTO, "none") else program.draft,
        drafters=options.drafters,
        engine=engine,
        batch=options.batch,
        target_bytes=spec.weight_bytes,
        memory=memory,
        seconds=options.seconds,
        params=params,
    )
    limit = min(options.max_tokens, COUNTED_TOKENS)
    params = replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
    with opened(asked, meter.tell) as (stands, notes):
        whole = measured(stands, asked, cache=cache_folder(), fresh=options.fresh, tell=meter.tell)
        return counted(stands, whole, texts, params, notes=notes, tell=meter.tell)


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


def _texts(options: PlanOptions) -> Sequence[str]:
    if options.prompts is not None:
        return texts_of(options.prompts)[: 2 * _MOST_PROMPTS]
    names = words_of("--domains", options.domains, hint="--domains code,maths")
    return [text for name in names for text in builtin_texts(name)[:_MOST_PROMPTS]]


def _engine(call: Call[PlanOptions]) -> EngineConfig:
    engine = call.resolved.engine()
    here = call.options.device
    return engine if is_sheet(here) else replace(engine, device=here)


class _Meter(Meter):
    """What is being done; where nobody sees a bar, a line for each kind of work as it begins."""

    def __init__(self) -> None:
        super().__init__("", 1.0)
        self._said: set[str] = set()

    def tell(self, what: str, share: float) -> None:
        self.reach(share, title=f"{what:32}")
        sentence = _STAGES.get(what, _TIMING)
        if not self.drawn and sentence not in self._said:
            self._said.add(sentence)
            print(sentence, file=sys.stderr, flush=True)
