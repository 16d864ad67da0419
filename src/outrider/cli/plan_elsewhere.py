"""Plans for a device that is not here: costs from its sheet, acceptance supposed or told.

What a device takes follows from its sheet and the sizes of the models (planner/roofline.py), so
nothing is loaded. Lookups take no time worth counting there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.cli.fit import read_spec
from outrider.cli.plan_options import PlanOptions
from outrider.core.calibration import Calibration, DrafterCosts, PlaceCount
from outrider.core.config import DEVICES, EngineConfig
from outrider.core.cost import Curve
from outrider.core.errors import ConfigError
from outrider.core.nearest import did_you_mean
from outrider.core.settings import ProgramConfig
from outrider.pairs.catalog import draft_of
from outrider.planner.roofline import calibrate
from outrider.planner.sheets import device_sheet

# Counts that leave no doubt of a rate that is supposed.
_SURE = 1_000_000
AUTO = "auto"
_FREE = ("ngram", "suffix", "lookup", "recycling")


def is_sheet(device: str) -> bool:
    return device not in DEVICES


def calibration_elsewhere(
    options: PlanOptions, program: ProgramConfig, engine: EngineConfig
) -> tuple[Calibration, int]:
    """And the bytes of the device's memory. Raises ConfigError for an unknown sheet, and without
    an acceptance to suppose."""
    sheet = device_sheet(options.device)
    rates = _rates(options.alpha)
    target = replace(read_spec(program.target, engine.dtype), quantise=engine.quantise)
    names = [word.strip() for word in options.drafters.split(",") if word.strip()]
    _check_known(names)
    draft = program.draft if program.draft not in ("auto", "none") else draft_of(program.target)
    spec = None if draft is None else read_spec(draft, engine.dtype)
    calibration = calibrate(target, spec, sheet)
    free = [
        DrafterCosts(name=name, draft=((1, Curve(((1.0, 0.0),))),))
        for name in names
        if name in _FREE
    ]
    models = [one for one in calibration.drafters if {AUTO, one.name} & set(names)]
    drafters = tuple(replace(one, places=_places(rates)) for one in (*models, *free))
    if not drafters:
        raise ConfigError(
            f"nothing that a sheet knows of drafts for {program.target}.",
            hint="name a draft model with --draft, or --drafters ngram",
        )
    return replace(calibration, drafters=drafters), sheet.memory_bytes


def _check_known(names: Sequence[str]) -> None:
    """Raises ConfigError for a drafter of which a sheet says nothing."""
    known = (AUTO, "model", *_FREE)
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
