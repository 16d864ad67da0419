"""A plan as it is printed: a verdict and the command to run, the best row of each drafter, reasons.

Plans for a device that is not here have costs from its sheet and the sizes of the models
(planner/roofline.py), and supposed acceptance; nothing is loaded. Lookups take no time worth
counting there. A draft model may have a device of its own; tokens are handed over for nothing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from shlex import quote
from typing import Any, TypeAlias

from outrider.cli.call import Call
from outrider.cli.models import read_spec
from outrider.cli.options import setting_flags
from outrider.cli.output import line_width, prose, screen_table
from outrider.core.config import DEVICES, EngineConfig
from outrider.core.errors import CapacityError, ConfigError, did_you_mean
from outrider.core.fields import numbers_of, size, split
from outrider.core.plugins import MODEL
from outrider.core.settings import SETTINGS, ProgramConfig, Setting
from outrider.core.spec import ModelSpec
from outrider.estimate.cost import Curve
from outrider.estimate.forecast import DeviceSheet, PassWork
from outrider.pairs.catalog import draft_of
from outrider_lab.bench.calibrate.found import Found
from outrider_lab.cli.advice import bounds_sentence, disturbed_sentences
from outrider_lab.cli.verb_options import DECIDED_BY_PLANS, PlanOptions
from outrider_lab.planner.advise import AdvisedPlan, ReplicaPlan
from outrider_lab.planner.calibration import Calibration, DrafterCosts, PlaceCount
from outrider_lab.planner.candidates import Engines, Option, PlannedJob, gain
from outrider_lab.planner.overlap import AheadWays
from outrider_lab.planner.roofline import DeviceLimits, Energy, calibrate, device_sheet, limits_of
from outrider_lab.planner.suppose import ESTIMATED, MEASURED
from outrider_lab.planner.suppose import Origin as OriginOfFigure

# A device here is a setting.
_DECIDED = frozenset(DECIDED_BY_PLANS) - {"device"}
# Options of a plan that a longer one has anew or not at all.
_ANEW = ("seconds", "save", "fresh", "json")
# How much longer it takes, and at the least and the most.
_MORE_SECONDS, _LEAST_SECONDS, _MOST_SECONDS = 4, 120, 600


def command_of(
    plan: AdvisedPlan, program: ProgramConfig, engine: EngineConfig, found: Found | None
) -> str:
    """What runs as planned, with the settings of `engine`, for which it was planned; with the
    drafter that is taken by default where nobody knows."""
    words = ["outrider", "generate", '"..."', "--target", quote(program.target)]
    words += ["--raw"] if found is not None and found.raw else []
    best = plan.best
    if not plan.known:
        return " ".join([*words, *_settings(engine)])
    if best is None or not plan.speculate:
        return " ".join([*words, "--drafter", "none", *_settings(engine)])
    drafter, _, named = best.drafter.partition("=")
    draft = named or _draft_of(best, program, found)
    if draft is not None:
        words += ["--draft", quote(draft)]
    words += ["--drafter", drafter, "--k", str(best.k)]
    if best.num_nodes:
        words += ["--tree-nodes", str(best.num_nodes)]
    if best.engine != "single":
        words += ["--schedule", best.engine]
    if best.fallback is not None:
        engine = replace(engine, fallback=best.fallback)
    return " ".join([*words, "--batch-size", str(plan.job.batch), *_settings(engine)])


def deciding_command(call: Call[PlanOptions]) -> str:
    """The same plan, with more time."""
    options, verb = call.options, PlanOptions.verb
    words = ["outrider", "plan", quote(call.resolved.program().target)]
    for item in verb.own_options():
        value = getattr(options, item.name)
        if item.name not in _ANEW and value != item.default:
            words.append(_flag(item, value))
    decided = call.resolved.decided()
    words += [
        _flag(item, decided[item.name])
        for item in verb.offered_settings()
        if item.name in decided and item.name != "target"
    ]
    seconds = min(max(_MORE_SECONDS * options.seconds, _LEAST_SECONDS), _MOST_SECONDS)
    return " ".join([*words, f"--seconds {seconds:g}"])


def _settings(engine: EngineConfig) -> Iterator[str]:
    """Flags of what is not as usual, without what a plan decides."""
    for item in SETTINGS.values():
        if item.group != "engine" or item.name in _DECIDED:
            continue
        value = getattr(engine, item.name)
        if value != item.default:
            yield _flag(item, value)


def _flag(item: Setting, value: object) -> str:
    if item.kind is bool:
        return setting_flags(item)[0 if value else 1]
    return f"{item.flag} {quote(str(value))}"


def _draft_of(best: Option, program: ProgramConfig, found: Found | None) -> str | None:
    if found is not None:
        return found.drafts.get(best.drafter)
    if best.drafter != MODEL:
        return None
    return draft_of(program.target) if program.draft in ("auto", "none") else program.draft


# Counts that leave no doubt of a rate that is supposed.
_SURE = 1_000_000
AUTO = "auto"
_FREE = ("ngram", "suffix", "lookup", "recycling")


def is_sheet(device: str) -> bool:
    return device not in DEVICES


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What is supposed of devices that are not here. `memory` is that of the target's device in
    bytes; `energy` is None where a sheet has no power."""

    calibration: Calibration
    memory: int
    engines: Engines
    energy: Energy | None
    limits: DeviceLimits


def elsewhere(
    options: PlanOptions, program: ProgramConfig, engine: EngineConfig, job: PlannedJob
) -> Elsewhere:
    """Raises ConfigError for an unknown sheet, and without an acceptance to suppose; CapacityError
    for a draft model that its own device has no room for."""
    sheet = device_sheet(options.device)
    rates = _rates(options.alpha)
    target = read_spec(program.target, engine.dtype, on_cpu=sheet.is_cpu)
    target = replace(target, quantise=engine.quantise)
    names = split(options.drafters)
    _check_known(names)
    named = program.draft if program.draft not in ("auto", "none") else draft_of(program.target)
    wanted = bool({AUTO, MODEL} & set(names))
    draft = None
    if named is not None and wanted:
        device = sheet if options.draft_device is None else device_sheet(options.draft_device)
        draft = read_spec(named, engine.dtype, on_cpu=device.is_cpu)
    apart = _draft_device(options, draft, job)
    calibration = calibrate(target, draft, sheet, draft_sheet=apart)
    models = [
        one if apart is None else replace(one, memory_bytes=0, kv_bytes_per_token=0)
        for one in calibration.drafters
    ]
    drafters = tuple(replace(one, places=_places(rates)) for one in (*models, *_free(names)))
    if not drafters:
        raise ConfigError(
            f"nothing that a sheet knows of drafts for {program.target}.",
            hint="name a draft model with --draft, or --drafters ngram",
        )
    return Elsewhere(
        calibration=replace(calibration, drafters=drafters),
        memory=sheet.memory_bytes,
        # Lanes lose nothing to each other where each has a device.
        engines=Engines(ways=AheadWays(contention=1.0 if apart is None else 0.0)),
        energy=_energy(target, draft, sheet, apart),
        limits=limits_of(target, sheet, job.batch),
    )


def _draft_device(
    options: PlanOptions, draft: ModelSpec | None, job: PlannedJob
) -> DeviceSheet | None:
    """That of --draft-device."""
    if options.draft_device is None:
        return None
    sheet = device_sheet(options.draft_device)
    if draft is None:
        raise ConfigError(
            f"no draft model would run on {sheet.name}.",
            hint="name one with --draft, and leave model in --drafters; or drop --draft-device",
        )
    needed = draft.weight_bytes + job.most_tokens * draft.kv_bytes_per_token
    if needed > sheet.memory_bytes:
        raise CapacityError(
            f"the draft {draft.name} needs {size(needed)} with its keys and values, and "
            f"{sheet.name} has {size(sheet.memory_bytes)}.",
            hint="lower --batch or --context, or name a smaller draft with --draft",
        )
    return sheet


def _energy(
    target: ModelSpec, draft: ModelSpec | None, sheet: DeviceSheet, apart: DeviceSheet | None
) -> Energy | None:
    if sheet.power is None or (apart is not None and apart.power is None):
        return None
    return Energy(
        sheet.power,
        PassWork(target),
        None if draft is None else PassWork(draft),
        None if apart is None else apart.power,
    )


def _free(names: Sequence[str]) -> list[DrafterCosts]:
    """Lookups."""
    return [
        DrafterCosts(name=name, draft=((1, Curve(((1.0, 0.0),))),))
        for name in names
        if name in _FREE
    ]


def _check_known(names: Sequence[str]) -> None:
    """Raises ConfigError for a drafter of which a sheet says nothing."""
    known = (AUTO, MODEL, *_FREE)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"a sheet says nothing of the drafter {name!r}.", hint=did_you_mean(name, known)
            )


def _rates(words: str | None) -> Sequence[float]:
    if words is None:
        raise ConfigError(
            "what is accepted cannot be counted on a device that is not here.",
            hint="suppose it: --alpha 0.8, or count it here first: `outrider plan` says it",
        )
    return numbers_of("--alpha", words, float, 0, 1, hint="--alpha 0.8,0.7,0.6")


def _places(rates: Sequence[float]) -> tuple[PlaceCount, ...]:
    return tuple(PlaceCount(drafted=_SURE, accepted=round(rate * _SURE)) for rate in rates)


_PIPED_WIDTH = 80
_HEADER = (
    *("drafter", "K", "speed-up", "95 %", "tok/round"),
    *("draft", "verify", "rest", "tok/s", ""),
)
# Letters that are shown of a prompt.
_SHOWN_LETTERS = 32
# What the others gain at the least where no single prompt carries the result, and how many times as
# much one gains that does.
_LEAST_GAIN, _OWN_GAIN = 1.1, 1.25

# Where costs come from: this machine, or data sheets.
Origin: TypeAlias = Found | Elsewhere


def record_of(
    plan: AdvisedPlan, program: ProgramConfig, engine: EngineConfig, origin: Origin, decides: str
) -> dict[str, Any]:
    """For programs to read."""
    found = origin if isinstance(origin, Found) else None
    kept = None if found is None else found.calibrated
    return {
        "target": program.target,
        "basis": _basis(origin),
        "plan": plan.as_record(),
        "command": command_of(plan, program, engine, found),
        "decides": decides or None,
        "calibration": json.loads(origin.calibration.to_json()),
        "limits": None if isinstance(origin, Found) else asdict(origin.limits),
        "stored": None if kept is None else str(kept.path),
        "measured_before": None if kept is None else kept.is_old,
        "same_texts": None if found is None else found.same,
        "notes": [] if found is None else list(found.notes),
        **({} if found is None else bounds_record(found)),
    }


def bounds_record(found: Found) -> dict[str, Any]:
    """What is measured, what that took, and who disturbed it."""
    return {
        "basis": found.origins.basis,
        "others_cpu_share": found.others,
        "partial": not found.origins.is_whole,
        "figures": found.origins.as_record(),
        "seconds": round(found.seconds, 3),
        "peak_memory_bytes": found.peak_bytes,
        "memory_limit_bytes": found.most_bytes,
    }


def page_parts(
    plan: AdvisedPlan, program: ProgramConfig, engine: EngineConfig, origin: Origin, decides: str
) -> Iterator[str]:
    """`decides` is the command to run where nobody knows whether to speculate, or ""."""
    job, found = plan.job, origin if isinstance(origin, Found) else None
    yield _words(plan.verdict)
    then = ""
    if found is not None and found.is_disturbed:
        then = " then"
        wait = f"Others used {100 * (found.others or 0.0):.0f} % of the CPU: wait until the machine"
        yield _words(f"{wait} is quiet, and plan again.")
    first = f"Decide it{then}:\n    {decides}\nUntil then, this is the best guess. " * bool(decides)
    yield f"{first}Run it:\n    {command_of(plan, program, engine, found)}"
    basis = _basis(origin)
    yield _words(
        f"{basis.capitalize()}: {program.target} on {origin.calibration.machine}: {job.batch} at "
        f"once, prompts of {job.context} tokens, {job.new_tokens} new ones. Plain decoding "
        f"{'writes' if basis == MEASURED else 'would write'} "
        f"{_rate(plan.plain_tokens_per_second)} tokens a second."
    )
    if found is not None and not found.origins.is_whole:
        yield _words(found.origins.sentence)
    if plan.options:
        estimated = frozenset[str]() if found is None else found.origins.estimated
        best = {one.drafter: one for one in reversed(plan.options)}  # options come the best first
        shown = [one for one in plan.options if best[one.drafter] is one]
        rows = screen_table([_row(option, estimated) for option in shown], header=_HEADER)
        yield (
            f"{rows}\n\nthe best K of each drafter (--json has all {len(plan.options)} rows)\n"
            "draft, verify and rest: milliseconds of a round"
        )
    yield from by_prompt(plan, found)
    if plan.reasons:
        yield "\n".join(map(_words, plan.reasons))
    if isinstance(origin, Elsewhere):
        yield "\n".join(map(_words, _of_device(plan, origin)))
    if plan.memory_bytes is not None:
        yield f"Memory: {size(plan.memory_bytes)} of weights, keys and values."
    yield from plan.left_out
    yield "\n".join(map(_words, _costs_from(origin)))


def by_prompt(plan: AdvisedPlan, found: Found | None) -> Iterator[str]:
    """A row for each prompt: what the best drafter is expected to gain on it alone."""
    best, every = plan.best, _gains(plan, found)
    if best is None or found is None or not every:
        return
    rows: list[tuple[str, ...]] = []
    for number, (text, known) in enumerate(zip(found.texts, every, strict=False), start=1):
        figures = ("-", "-") if known is None else (f"{known[0]:.2f}", f"{known[1]:.2f}")
        begins = json.dumps(text[:_SHOWN_LETTERS], ensure_ascii=False)
        rows.append((f"{number}", *figures, begins))
    table = screen_table(rows, header=("prompt", "speed-up", "tok/round", "begins with"))
    about = f"of {best.drafter} K={best.k}, by what was accepted on each prompt"
    if None in every:
        about += "\n-: the model ended its text at once, or there was no time to write it"
    yield f"{table}\n\n{about}"


def _gains(plan: AdvisedPlan, found: Found | None) -> list[tuple[float, float] | None]:
    """Speed-up and tokens a round of the best drafter on each prompt alone, None of a prompt on
    which nothing was drafted; empty where they are not known."""
    best, probes = plan.best, () if found is None else found.probes
    probe = next((one for one in probes if best and one.name == best.drafter), None)
    if best is None or probe is None or found is None or not found.texts:
        return []
    costs = next(one for one in found.calibration.drafters if one.name == best.drafter)
    every: list[tuple[float, float] | None] = []
    for ahead in probe.texts:
        alone = replace(probe, texts=(ahead,))
        stats = alone.stats(best.k) if alone.rounds(best.k) else None
        every.append(stats and (gain(found.calibration, costs, plan.job, stats), stats.tokens))
    return every


def with_carrier(plan: AdvisedPlan, origin: Origin) -> AdvisedPlan:
    """The plan, whose verdict says so if one prompt carries the gain: the geometric mean of the
    others is small, or they leave it open whether there is a gain."""
    every = _gains(plan, origin if isinstance(origin, Found) else None)
    gains = {number: one[0] for number, one in enumerate(every, start=1) if one is not None}
    best = plan.best
    if best is None or best.words not in plan.verdict or len(gains) < 2:
        return plan
    top = max(gains, key=gains.__getitem__)
    logs = [math.log(one) for number, one in gains.items() if number != top]
    rest = math.exp(statistics.fmean(logs))
    doubt = 2 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    carries = best.speed_up > rest and gains[top] >= _OWN_GAIN * max(rest, 1.0)
    if not carries or (rest >= _LEAST_GAIN and math.log(rest) > doubt):
        return plan
    words = f"prompt {top} carries this, and without it the mean is {rest:.2f}"
    return replace(plan, verdict=f"{plan.verdict.removesuffix('.')}; {words}.")


def _basis(origin: Origin) -> OriginOfFigure:
    """A sheet's figures are estimates."""
    return origin.origins.basis if isinstance(origin, Found) else ESTIMATED


_REPLICAS_HEADER = ("replicas", "texts each", "tok/s of a text", "tok/s of all", "by", "a million")


def replicas_part(found: Sequence[ReplicaPlan]) -> Iterator[str]:
    """A row for each number of replicas."""
    if found:
        rows = [
            (
                f"{one.replicas}",
                f"{one.batch}",
                "-" if one.each is None else _rate(one.each),
                "-" if one.tokens_per_second is None else _rate(one.tokens_per_second),
                one.words,
                "-" if one.price is None else f"{one.price:.3g}",
            )
            for one in found
        ]
        table = screen_table(rows, header=_REPLICAS_HEADER)
        yield f"{table}\n\na million: the cost of as many tokens; each replica has a device"


def _of_device(plan: AdvisedPlan, origin: Elsewhere) -> Iterator[str]:
    """What its sheet says, and joules where it has watts."""
    best = plan.best
    rows = 1 + (max(best.k, best.num_nodes) if best is not None and plan.speculate else 0)
    yield from origin.limits.sentences(plan.job.batch, rows)
    if plan.plain_joules is not None:
        told = f"Energy, from rated watts: {plan.plain_joules:.3g} J a token of plain decoding"
        if best is not None and best.joules is not None:
            told += f", {best.joules:.3g} J of {best.words}"
        yield f"{told}."


def _words(text: str) -> str:
    return prose(text, width=line_width(_PIPED_WIDTH))


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 1000 else f"{tokens_per_second:.4g}"


def _row(option: Option, estimated: Collection[str]) -> tuple[str, ...]:
    tree = f"+{option.num_nodes}" if option.num_nodes > option.k else ""
    return (
        option.drafter,
        f"{option.k}{tree}",
        f"{option.speed_up:.2f}",
        f"{option.low:.2f} to {option.high:.2f}",
        f"{option.tokens:.2f}",
        f"{1e3 * option.draft_seconds:.3g}",
        f"{1e3 * option.verify_seconds:.3g}",
        f"{1e3 * option.host_seconds:.3g}",
        _rate(option.tokens_per_second),
        ESTIMATED if option.drafter in estimated else "",
    )


def _costs_from(origin: Origin) -> Iterator[str]:
    if isinstance(origin, Elsewhere):
        yield "Costs follow from a data sheet and the models' sizes; nothing was measured."
        return
    found, calibration, whole = origin, origin.calibration, origin.calibrated
    yield bounds_sentence(found)
    if found.origins.is_whole:
        yield found.origins.sentence
    if whole is not None:
        when = "measured before" if whole.is_old else "measured now"
        kept = f", kept in {whole.path}" if whole.path else ""
        yield (
            f"Costs: {when} in {calibration.seconds:.1f} s{kept}. Times scatter by "
            f"{100 * calibration.scatter:.1f} %."
        )
        yield f"Measured on: {_machine_words(calibration)}"
    yield from disturbed_sentences(found)
    wrong = [name for name, same in found.same.items() if same is False]
    if wrong:
        yield f"PROBLEM: other text than plain decoding: {', '.join(wrong)}"
    elif all(found.same.values()) and found.same:
        yield "Every drafter wrote the text of plain decoding."
    yield from (f"note: {note}" for note in dict.fromkeys(found.notes))


def _machine_words(calibration: Calibration) -> str:
    """Device, precision, threads, clocks and limits, as far as they can be read."""
    facts = calibration.provenance
    clocks = {name: value for name, value in facts.get("clocks", {}).items() if value is not None}
    told = ", ".join(f"{name} {value:.6g}" for name, value in clocks.items())
    parts = [
        str(facts.get("device", {}).get("device", "")),
        f"dtype {facts.get('dtype')}",
        f"threads {facts.get('threads') or facts.get('torch_threads')}",
        told,
    ]
    return ", ".join(part for part in parts if part)
