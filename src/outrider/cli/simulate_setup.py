"""From the words of `simulate` to a study: whose costs, how often drafts are kept, what varies.

Models by their sizes alone: known names, and config.json files. No tensors.

The sizes are those of the published configurations; bytes are two a number, bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from outrider.cli.plan_options import SimulateOptions
from outrider.core.errors import CheckpointError, ConfigError, MachineError, did_you_mean
from outrider.core.files import FileKind, read_text
from outrider.core.settings import Given, describe, typed
from outrider.core.spec import ModelSpec
from outrider.estimate.calibration import Calibration, DrafterCosts
from outrider.models.families import LLAMA_FAMILIES, GPT2Config, LlamaConfig, parse_llama
from outrider.models.json_object import JsonObject
from outrider.pairs.catalog import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.planner.devices import device_sheet
from outrider.planner.places import believe
from outrider.planner.roofline import calibrate
from outrider.planner.simulate_study import CLOSED, TOGETHER, SimulatedStudy

_LLAMA3 = 128_256


def _llama(
    widths: tuple[int, int],
    num_layers: int,
    heads: tuple[int, int, int],
    vocab_size: int,
    *,
    tied: bool = False,
    family: str = "llama",
) -> LlamaConfig:
    """`widths` of the residual and the feed-forward, `heads` of queries and keys, and their size.
    The window is no limit here."""
    return LlamaConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=widths[0],
        ffn_size=widths[1],
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        max_tokens=131_072,
        tie_word_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _gpt2(hidden_size: int, num_layers: int, num_heads: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=50_257,
        hidden_size=hidden_size,
        ffn_size=4 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        max_tokens=1024,
    )


SIZES: Mapping[str, LlamaConfig | GPT2Config] = {
    "llama-1b": _llama((2048, 8192), 16, (32, 8, 64), _LLAMA3, tied=True),
    "llama-3b": _llama((3072, 8192), 28, (24, 8, 128), _LLAMA3, tied=True),
    "llama-8b": _llama((4096, 14336), 32, (32, 8, 128), _LLAMA3),
    "llama-70b": _llama((8192, 28672), 80, (64, 8, 128), _LLAMA3),
    "tinyllama": _llama((2048, 5632), 22, (32, 4, 64), 32_000),
    "phi3-mini": _llama((3072, 8192), 32, (32, 32, 96), 32_064, family="phi3"),
    "smollm2-135m": _llama((576, 1536), 30, (9, 3, 64), 49_152, tied=True),
    "smollm2-1.7b": _llama((2048, 8192), 24, (32, 32, 64), 49_152, tied=True),
    "qwen2.5-0.5b": _llama((896, 4864), 24, (14, 2, 64), 151_936, tied=True, family="qwen2"),
    "qwen2.5-7b": _llama((3584, 18944), 28, (28, 4, 128), 152_064, family="qwen2"),
    "qwen3-0.6b": _llama((1024, 3072), 28, (16, 8, 128), 151_936, tied=True, family="qwen3"),
    "qwen3-8b": _llama((4096, 12288), 36, (32, 8, 128), 151_936, family="qwen3"),
    "qwen3-32b": _llama((5120, 25600), 64, (64, 8, 128), 151_936, family="qwen3"),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "distilgpt2": _gpt2(768, 6, 12),
    "embedded": _llama((256, 704), 8, (4, 2, 64), 8192, tied=True),
    "embedded-draft": _llama((128, 352), 2, (2, 1, 64), 8192, tied=True),
}
# What `outrider pairs` calls them.
MODEL_IDS: Mapping[str, str] = {
    EMBEDDED_TARGET: "embedded",
    EMBEDDED_DRAFT: "embedded-draft",
    "openai-community/gpt2": "gpt2",
    "openai-community/gpt2-xl": "gpt2-xl",
    "distilbert/distilgpt2": "distilgpt2",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "tinyllama",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-8b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama-1b",
    "meta-llama/Llama-3.2-3B-Instruct": "llama-3b",
    "microsoft/Phi-3-mini-4k-instruct": "phi3-mini",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "smollm2-1.7b",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-8B": "qwen3-8b",
}
_BYTES = 2


def spec_named(name: str) -> ModelSpec:
    """A known name, a model of `outrider pairs`, a config.json, or the folder of one. Raises
    ConfigError for another name and CheckpointError for a file that cannot be read."""
    known = MODEL_IDS.get(name, name)
    if known in SIZES:
        return SIZES[known].spec(known, bytes_per_weight=_BYTES, bytes_per_kv=_BYTES)
    path = Path(name)
    if name and path.is_dir():
        path /= "config.json"
    if name and path.is_file():
        return _read(path)
    raise ConfigError(
        f"no model sizes {name!r}.",
        hint=did_you_mean(name, SIZES) + " Or name a config.json.",
    )


def _read(path: Path) -> ModelSpec:
    raw = JsonObject.read(path)
    name = path.parent.name or path.stem
    if raw.text("model_type") in LLAMA_FAMILIES:
        return parse_llama(raw).spec(name, bytes_per_weight=_BYTES, bytes_per_kv=_BYTES)
    # Imported here: configs of hybrids, and of what transformers runs, come with tensors.
    from outrider.models.hf_config import read_config

    if path.name != "config.json":
        raise CheckpointError(
            f"{path} must be called config.json, for a model of its family.",
            hint="name its folder",
        )
    return read_config(path.parent).spec(name, bytes_per_weight=_BYTES, bytes_per_kv=_BYTES)


TARGET, DRAFT, DEVICE = "llama-8b", "llama-1b", "h100"
ALPHA = 0.8
MOST_PLACES = 64
# What a sweep cannot change, because it says what is done with the results.
_OF_OUTPUT = ("json", "engines", "sweep", "figure", "trace")
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
    known = {
        field: item
        for field, item in describe(SimulateOptions, group="").items()
        if field not in _OF_OUTPUT
    }
    words = _words(values)
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
        engines=tuple(dict.fromkeys(_words(options.engines))),
        k=options.k,
        p_hit=options.p_hit,
        fan_out=options.fan_out,
        batch=options.batch,
        prompt=options.context,
        output=options.max_tokens,
        requests=options.requests,
        spread=options.spread,
        arrivals=_arrivals(options.arrivals),
        contention=options.contention,
        sync=options.sync_us * 1e-6,
        prefill_chunk=options.prefill_chunk,
        hybrid_threshold=options.hybrid_threshold,
        decode_batch=options.decode_batch,
        verify_batch=options.verify_batch,
        seed=options.seed,
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
    words = _words(options.places)
    if not 1 <= len(words) <= MOST_PLACES:
        raise ConfigError(
            f"--places names {len(words)} places, and 1 to {MOST_PLACES} can be.",
            hint="--places .8,.7,.6",
        )
    return tuple(_number("--places", word) for word in words)


def _arrivals(word: str) -> str | float:
    if word in (CLOSED, TOGETHER):
        return word
    rate = _number("--arrivals", word, f", {CLOSED} or {TOGETHER}")
    if not 0 < rate < float("inf"):
        raise ConfigError(
            f"--arrivals {word}: requests a second must be more than 0.", hint="--arrivals 2.5"
        )
    return rate


def _number(flag: str, word: str, other: str = "") -> float:
    try:
        return float(word)
    except ValueError:
        raise ConfigError(
            f"{flag}: {word!r} is no number{other}.", hint=f"outrider simulate --help, at {flag}"
        ) from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
