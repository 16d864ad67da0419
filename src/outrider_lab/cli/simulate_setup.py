"""From the words of `simulate` to a study: whose costs, how often drafts are kept, what varies.

Models are known by their sizes alone, which model_sizes.json and config.json files have: no
tensors. Bytes are two a number, bfloat16.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from outrider.core.errors import CheckpointError, ConfigError, MachineError, did_you_mean
from outrider.core.fields import numbers_of, split
from outrider.core.files import FileKind, read_text
from outrider.core.settings import Given, typed
from outrider.core.spec import ModelSpec
from outrider.models.configs import GPT2Config, LlamaConfig
from outrider.models.families import DECODER_FAMILIES, parse_llama
from outrider.models.json_object import JsonObject
from outrider_lab.cli.verb_options import SimulateOptions
from outrider_lab.planner.calibration import Calibration, DrafterCosts
from outrider_lab.planner.roofline import calibrate, device_sheet
from outrider_lab.planner.rounds import believe
from outrider_lab.simulator.load import Failure
from outrider_lab.simulator.study import CLOSED, TOGETHER, SimulatedStudy

_FAILURE = re.compile(r"(?P<replica>\d+)@(?P<at>\d+(?:\.\d+)?)\+(?P<seconds>\d+(?:\.\d+)?)")
_BYTES = 2
_LONG = 131_072


@cache
def _table() -> Mapping[str, Any]:
    return json.loads(files("outrider.cli").joinpath("model_sizes.json").read_text("utf-8"))


def known_sizes() -> Mapping[str, Mapping[str, Any]]:
    return _table()["models"]


def known_ids() -> Mapping[str, str]:
    """What `outrider models pairs` calls them."""
    return _table()["names"]


def _config(sizes: Mapping[str, Any]) -> LlamaConfig | GPT2Config:
    family = sizes["family"]
    if family == "gpt2":
        return GPT2Config(**sizes)
    more = {"max_tokens": _LONG, "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    return LlamaConfig(**more, **sizes)


def spec_named(name: str) -> ModelSpec:
    """A known name, a model of `outrider models pairs`, a config.json, or the folder of one. Raises
    ConfigError for another name and CheckpointError for a file that cannot be read."""
    known = known_ids().get(name, name)
    if known in known_sizes():
        config = _config(known_sizes()[known])
        return config.spec(known, bytes_per_weight=_BYTES, bytes_per_kv=_BYTES)
    path = Path(name)
    if name and path.is_dir():
        path /= "config.json"
    if name and path.is_file():
        return _read(path)
    raise ConfigError(
        f"no model sizes {name!r}.",
        hint=did_you_mean(name, known_sizes()) + " Or name a config.json.",
    )


def _read(path: Path) -> ModelSpec:
    raw = JsonObject.read(path)
    name = path.parent.name or path.stem
    if raw.text("model_type") in DECODER_FAMILIES:
        return parse_llama(raw).spec(name, bytes_per_weight=_BYTES, bytes_per_kv=_BYTES)
    # Imported here: configs of hybrids, and of what transformers runs, come with tensors.
    from outrider.models.families import read_config

    if path.name != "config.json":
        raise CheckpointError(
            f"{path} must be called config.json, for a model of its family.", hint="name its folder"
        )
    return read_config(path.parent).spec(name, bytes_per_weight=_BYTES, bytes_per_kv=_BYTES)


TARGET, DRAFT, DEVICE = "llama-8b", "llama-1b", "h100"
ALPHA = 0.8
MOST_PLACES = 64
# What a sweep cannot change, because it says what is done with the results.
_OF_OUTPUT = ("json", "engines", "sweep", "figure", "trace")
_ABOUT = ("calibration", "drafter", "rates", "engines")
# What a study's record has besides whose costs they are, and options that a study has alike.
OF_LOAD = tuple(item.name for item in fields(SimulatedStudy) if item.name not in (*_ABOUT, "p_hit"))
_STUDIED = {item.name for item in SimulateOptions.verb.own_options()}
_SAME = tuple(
    item.name
    for item in fields(SimulatedStudy)
    if item.name in _STUDIED and item.name not in (*_ABOUT, "arrivals", "failures", "price")
)
OF_SHEETS = ("target", "draft", "device", "draft_device")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Values of one option, as they were written and as they are meant."""

    name: str
    words: tuple[str, ...]
    values: tuple[Any, ...]

    def options(self, options: SimulateOptions) -> list[SimulateOptions]:
        return [replace(options, **{self.name: value}) for value in self.values]


def sweep_of(options: SimulateOptions) -> Sweep | None:
    """What --sweep asks for. Raises ConfigError for an option that there is not, and for a value
    that it cannot have."""
    if options.sweep is None:
        return None
    if options.trace is not None:
        raise ConfigError("--trace tells of one run, not of a sweep.", hint="leave one of them out")
    name, equals, values = options.sweep.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    offered = SimulateOptions.verb.own_options()
    known = {item.name: item for item in offered if item.name not in _OF_OUTPUT}
    words = split(values)
    if not equals or not words:
        raise ConfigError(f"--sweep {options.sweep}: no values.", hint="--sweep k=1,2,4,8")
    if name not in known:
        raise ConfigError(f"--sweep: no option {name!r}.", hint=did_you_mean(name, known))
    if getattr(options, name) != getattr(SimulateOptions(), name):
        raise ConfigError(
            f"--sweep: {known[name].flag} is given too.", hint="leave one of them out"
        )
    origin = f"--sweep {name}"
    return Sweep(name, words, tuple(typed(known[name], Given(word, origin)) for word in words))


def study_of(options: SimulateOptions) -> SimulatedStudy:
    """Raises ConfigError, with what to change, for options that do not go together."""
    calibration, drafter = _costs(options)
    return SimulatedStudy(
        calibration=calibration,
        drafter=drafter,
        rates=_rates(options, drafter),
        engines=split(options.engines),
        prompt=options.context,
        output=options.max_tokens,
        arrivals=_arrivals(options.arrivals),
        sync=options.sync_us * 1e-6,
        failures=_failures(options.failures),
        price=_price(options),
        **{name: getattr(options, name) for name in _SAME},
    )


def too_large(options: SimulateOptions, study: SimulatedStudy) -> str | None:
    """What a user should hear of a model that does not fit on its data sheet's device. It is
    simulated all the same, as if it did."""
    if options.calibration is not None:
        return None
    sheet = device_sheet(DEVICE if options.device is None else options.device)
    known = study.calibration
    tokens = study.most_live * (study.prompt + study.output)
    need = known.memory_bytes + tokens * known.kv_bytes_per_token
    if options.draft_device is None:
        need += study.drafter.memory_bytes + tokens * study.drafter.kv_bytes_per_token
    if need <= sheet.memory_bytes:
        return None
    return (
        f"weights, keys and values take {need / 1e9:.0f} GB, and {sheet.name} has "
        f"{sheet.memory_bytes / 1e9:.0f} GB; this is as if they fitted."
    )


def _costs(options: SimulateOptions) -> tuple[Calibration, DrafterCosts]:
    if options.calibration is None:
        if options.drafter is not None:
            raise ConfigError(
                "--drafter chooses from a calibration, and none is given.",
                hint="--draft SIZES, or --calibration FILE",
            )
        found = _foretold(options)
        return found, found.drafters[0]
    for name in OF_SHEETS:
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} and --calibration are given: the file says both what "
                "runs and where.",
                hint="leave one of them out",
            )
    found = _measured(Path(options.calibration))
    return found, _drafter(found, options.drafter)


def _foretold(options: SimulateOptions) -> Calibration:
    """Costs from sizes and data sheets."""
    sheet = device_sheet(DEVICE if options.device is None else options.device)
    draft = DRAFT if options.draft is None else options.draft
    apart = None if options.draft_device is None else device_sheet(options.draft_device)
    found = calibrate(
        spec_named(TARGET if options.target is None else options.target),
        spec_named(draft),
        sheet,
        draft_sheet=apart,
    )
    return replace(found, drafters=tuple(replace(one, name=draft) for one in found.drafters))


def _measured(path: Path) -> Calibration:
    """From a plan that was saved, a calibration that `plan` keeps, or one by itself."""
    hint = "outrider plan TARGET --save FILE writes one"
    try:
        record: Any = json.loads(read_text(path, FileKind.CALIBRATION))
    except OSError as error:
        raise MachineError(
            f"{path} cannot be read: {error.strerror or error}.", hint=hint
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}.", hint=hint) from None
    if isinstance(record, dict) and "calibration" in record:
        record = cast("dict[str, Any]", record)["calibration"]
    try:
        return Calibration.of_json(json.dumps(record))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", hint=hint) from None


def _drafter(calibration: Calibration, name: str | None) -> DrafterCosts:
    known = {one.name: one for one in calibration.drafters if one.name != "none"}
    if not known:
        raise ConfigError(
            "the calibration has no drafter.", hint="measure one: outrider plan TARGET --fresh"
        )
    if name is None:
        return next(iter(known.values()))
    if name not in known:
        raise ConfigError(
            f"the calibration has no drafter {name!r}.", hint=did_you_mean(name, known)
        )
    return known[name]


def _rates(options: SimulateOptions, drafter: DrafterCosts) -> tuple[float, ...]:
    """As they were given, else as they were measured, else ALPHA."""
    if options.places is None:
        if options.alpha is not None:
            return (options.alpha,)
        if not drafter.places:
            return (ALPHA,)
        known = believe(drafter).mean
        return tuple(known.kept_at(place + 1) for place in range(known.depth))
    if options.alpha is not None:
        raise ConfigError("--alpha and --places say the same thing.", hint="leave one of them out")
    rates = numbers_of("--places", options.places, float, 0, 1, hint="--places .8,.7,.6")
    if len(rates) > MOST_PLACES:
        raise ConfigError(
            f"--places names {len(rates)} positions, and at most {MOST_PLACES} can be.",
            hint="--places .8,.7,.6",
        )
    return rates


def _arrivals(word: str) -> str | float:
    if word in (CLOSED, TOGETHER):
        return word
    try:
        rate = float(word)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ConfigError(
            f"--arrivals {word}: no requests a second above 0, {CLOSED} or {TOGETHER}.",
            hint="--arrivals 2.5",
        )
    return rate


def _failures(words: str | None) -> tuple[Failure, ...]:
    return tuple(map(_failure, split(words or "")))


def _failure(word: str) -> Failure:
    found = _FAILURE.fullmatch(word)
    if found is None:
        raise ConfigError(f"--failures {word}: no such failure.", hint="--failures 0@10+5,1@30+2.5")
    return Failure(int(found["replica"]), float(found["at"]), float(found["seconds"]))


def _price(options: SimulateOptions) -> float | None:
    """Raises ConfigError where prices are of devices and the one that is simulated has none."""
    if options.price is None:
        return None
    prices = dict(_priced(word) for word in split(options.price))
    device = DEVICE if options.device is None else options.device
    found = prices.get("", prices.get(device))
    if found is None:
        raise ConfigError(
            f"--price {options.price}: nothing of {device}.",
            hint=f"--price {device}=3, or one for all",
        )
    return found


def _priced(word: str) -> tuple[str, float]:
    """A device, "" for all, and its price."""
    name, _, value = word.rpartition("=")
    try:
        price = float(value)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise ConfigError(f"--price {word}: {value} is no price.", hint="--price 2.5")
    return name, price
