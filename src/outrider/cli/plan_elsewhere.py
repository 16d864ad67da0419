"""Plans for a device that is not here: costs from its sheet, acceptance supposed or told.

What a device takes follows from its sheet and the sizes of the models (planner/roofline.py), so
nothing is loaded. Lookups take no time worth counting there. A draft model may have a device of its
own; handing tokens over is taken to cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.cli.fit import read_spec
from outrider.cli.output import size
from outrider.cli.plan_options import PlanOptions
from outrider.core.config import DEVICES, EngineConfig
from outrider.core.errors import CapacityError, ConfigError, did_you_mean
from outrider.core.settings import ProgramConfig
from outrider.core.spec import ModelSpec
from outrider.estimate.calibration import Calibration, DrafterCosts, PlaceCount
from outrider.estimate.cost import Curve
from outrider.pairs.catalog import draft_of
from outrider.planner.advise import MODEL
from outrider.planner.candidates import Engines, Job
from outrider.planner.devices import DeviceSheet, device_sheet
from outrider.planner.energy import Energy, Limits, limits_of
from outrider.planner.overlap import AheadWays
from outrider.planner.roofline import PassWork, calibrate

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
    limits: Limits


def elsewhere(
    options: PlanOptions, program: ProgramConfig, engine: EngineConfig, job: Job
) -> Elsewhere:
    """Raises ConfigError for an unknown sheet, and without an acceptance to suppose; CapacityError
    for a draft model that its own device has no room for."""
    sheet = device_sheet(options.device)
    rates = _rates(options.alpha)
    target = replace(read_spec(program.target, engine.dtype), quantise=engine.quantise)
    names = [word.strip() for word in options.drafters.split(",") if word.strip()]
    _check_known(names)
    named = program.draft if program.draft not in ("auto", "none") else draft_of(program.target)
    wanted = bool({AUTO, MODEL} & set(names))
    draft = read_spec(named, engine.dtype) if named is not None and wanted else None
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


def _draft_device(options: PlanOptions, draft: ModelSpec | None, job: Job) -> DeviceSheet | None:
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


def _rates(words: str | None) -> list[float]:
    if words is None:
        raise ConfigError(
            "what is accepted cannot be counted on a device that is not here.",
            hint="suppose it: --alpha 0.8, or count it here first: `outrider plan` says it",
        )
    try:
        rates = [float(word) for word in words.split(",")]
    except ValueError:
        rates = [-1.0]
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(
            f"--alpha is {words!r}, and rates lie between 0 and 1.", hint="--alpha 0.8,0.7,0.6"
        )
    return rates


def _places(rates: list[float]) -> tuple[PlaceCount, ...]:
    return tuple(PlaceCount(drafted=_SURE, accepted=round(rate * _SURE)) for rate in rates)
