"""From the words of `outrider bench k` to a sweep: pairs, prompts, draft lengths and their folder.

What a flag leaves open is filled in by the experiment file, then by the recipe, then by the user's
settings, then by a default that keeps a first run short.

An experiment as a YAML file: options of a sweep and settings, one `name: value` a line.

The file fills in what flags and the environment leave open, and goes before `outrider.toml`. Its
names are those of the flags with `_` for `-`. A list may stand for an option's values between
commas; a setting that is a list is written as one. An option that may be given several times is a
list, or `name: values` lines below it: `over:` with `k: [2, 4]`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from outrider.bench.studies.sweep_grid import PromptSource
from outrider.bench.studies.sweep_plan import KSweep, Pair, Prompts, Work
from outrider.bench.studies.sweep_recipes import Preset, preset
from outrider.bench.workload import PromptDataset, fingerprint
from outrider.cli.bench_options import SweepOptions
from outrider.cli.call import Call
from outrider.cli.options import KSweepOptions
from outrider.cli.verbs import DECIDED_BY_SWEEPS
from outrider.core.config import EngineConfig
from outrider.core.drafter_kinds import AUTO, KINDS, MODEL, OFF
from outrider.core.errors import ConfigError, nearest
from outrider.core.fields import default_of, shown
from outrider.core.foreign import hint_for
from outrider.core.params import SamplingParams
from outrider.core.settings import (
    DEFAULT,
    SETTINGS,
    Chosen,
    Given,
    Resolved,
    Setting,
    describe,
    typed,
)
from outrider.core.settings_file import read_settings
from outrider.models.loading import pick_device
from outrider.pairs.catalog import PAIRS, ModelPair, draft_of, get_pair

_NOT_IN_A_FILE = ("experiment", "json", "presets")
Options = TypeVar("Options", KSweepOptions, SweepOptions)


def with_experiment(
    options: Options, resolved: Resolved, *, decided: Sequence[str]
) -> tuple[Options, Resolved]:
    """Both with the file's values where nothing stronger was given. `decided` are settings that the
    verb does not take. Raises ConfigError."""
    if options.experiment is None:
        return options, resolved
    path = Path(options.experiment)
    data = read_settings(path)
    own = {
        name: item
        for name, item in describe(type(options), group="").items()
        if name not in _NOT_IN_A_FILE
    }
    known = [*own, *(name for name in SETTINGS if name not in decided)]
    for name in data:
        if name not in known:
            every = "`outrider bench --help` lists options and settings."
            hint = hint_for(name) or nearest(name[:64], known, every)
            raise ConfigError(f"{path}: unknown key {shown(name)}.", hint=hint)
    given = {
        name: Given(_as_given(own[name], value) if name in own else value, f"{path}:{name}")
        for name, value in data.items()
    }
    taken = {name: typed(own[name], item) for name, item in given.items() if name in own}
    open_options = {item.name for item in fields(options) if _is_default(options, item)}
    chosen = dict(resolved.chosen)
    for name, item in given.items():
        if name not in own and _weaker(chosen[name].origin):
            chosen[name] = Chosen(SETTINGS[name], typed(SETTINGS[name], item), item.origin)
    filled = {name: value for name, value in taken.items() if name in open_options}
    return replace(options, **cast("dict[str, Any]", filled)), Resolved(chosen)


def _is_default(options: KSweepOptions | SweepOptions, item: Any) -> bool:
    return getattr(options, item.name) == default_of(item)


def _weaker(origin: str) -> bool:
    """Defaults and files of settings, whose origins have the form FILE:NAME."""
    return origin == DEFAULT or ":" in origin


def _as_given(option: Setting, value: object) -> object:
    """What flags would have said: words between commas, or several of NAME=WORDS."""
    if option.kind is tuple and isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        return [f"{name}={_joined(values)}" for name, values in entries.items()]
    return value if option.kind is tuple else _joined(value)


def _joined(value: object) -> object:
    if isinstance(value, list):
        return ",".join(str(entry) for entry in cast("list[object]", value))
    return value


DOMAINS = "code,maths,conversation"
KS = "1,2,4,8"
NUM_PROMPTS = 10
MAX_TOKENS = 64
SINGLE = "single"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setup:
    """A sweep that is ready to run; `notes` are what a user should hear before it does."""

    sweep: KSweep
    pairs: tuple[Pair, ...]
    folder: Path
    options: KSweepOptions
    plots: bool
    notes: tuple[str, ...]


def set_up(call: Call[KSweepOptions]) -> Setup:
    """Raises ConfigError for words that cannot be meant."""
    options, resolved = with_experiment(call.options, call.resolved, decided=DECIDED_BY_SWEEPS)
    recipe = preset(options.preset) if options.preset else None
    engine = _engine(options, resolved, recipe)
    pairs = _pairs(options, resolved, recipe, engine)
    params = _params(options, resolved, recipe)
    sweep = KSweep(
        prompts=_prompts(options, recipe),
        ks=_ks(options, recipe),
        iterations=_first(options.iterations, recipe and recipe.iterations, 1),
        warmup=_first(options.warmup, 1),
        params=params,
    )
    plain = [pair.name for pair in pairs if len(sweep.group(pair).ways) == 1]
    return Setup(
        sweep=sweep,
        pairs=pairs,
        folder=Path(options.output_dir or _folder_name(pairs, engine)),
        options=options,
        plots=not options.no_plots and (recipe is None or recipe.plots),
        notes=tuple(f"{name}: nothing is drafted, so only plain decoding runs" for name in plain),
    )


def _engine(options: KSweepOptions, resolved: Resolved, recipe: Preset | None) -> EngineConfig:
    """`k` and `drafter` are each pair's and each cell's to decide."""
    engine = resolved.engine()
    batch_size = _first(options.batch_size, _decided(resolved, "batch_size", engine.batch_size), 1)
    engine = replace(engine, batch_size=batch_size, profile=False)
    if recipe is not None:
        dtype = _first(_decided(resolved, "dtype", engine.dtype), recipe.dtype)
        deterministic = engine.deterministic or recipe.deterministic
        engine = replace(engine, dtype=dtype, deterministic=deterministic)
    return engine


def _params(options: KSweepOptions, resolved: Resolved, recipe: Preset | None) -> SamplingParams:
    params = resolved.sampling()
    max_tokens = _first(
        options.max_tokens,
        recipe and recipe.max_tokens,
        _decided(resolved, "max_tokens", params.max_tokens),
        MAX_TOKENS,
    )
    return replace(params, max_tokens=max_tokens, n=1, logprobs=False, top_logprobs=0)


def _pairs(
    options: KSweepOptions, resolved: Resolved, recipe: Preset | None, engine: EngineConfig
) -> tuple[Pair, ...]:
    program = resolved.program()
    names = _split("--pairs", options.pairs) if options.pairs else []
    models = [name for name in ("target", "draft") if resolved.chosen[name].origin.startswith("--")]
    if names and "target" in models:
        raise ConfigError("--pairs and --target both name models.", hint="drop one of them")
    if not names and recipe is not None and "target" not in models:
        names = [recipe.pair]
    if names:
        return tuple(_named(get_pair(name), program.draft, engine) for name in dict.fromkeys(names))
    draft = {"auto": draft_of(program.target), "none": None}.get(program.draft, program.draft)
    for pair in PAIRS.values():
        models = (pair.target_model_id, pair.draft_to_load)
        if draft is not None and models == (program.target, draft):
            return (_named(pair, "auto", engine),)
    slugs = [_slug(name) for name in (program.target, draft) if name]
    return (_pair("+".join(slugs), program.target, draft, engine),)


def _named(pair: ModelPair, draft: str, engine: EngineConfig) -> Pair:
    """A known pair, in its published precision; --draft replaces its draft, none drops it."""
    if engine.drafter == "auto" and pair.drafter != "auto" and draft != "none":
        bits = pair.self_quantise or engine.self_quantise
        engine = replace(engine, drafter=pair.drafter, self_quantise=bits)
    if engine.dtype == "auto" and PAIRS["embedded"] is not pair:
        engine = replace(engine, dtype=pair.target_dtype)
    chosen = {"auto": pair.draft_to_load, "none": None}.get(draft, draft)
    return _pair(pair.pair_name, pair.target_model_id, chosen, engine)


def _pair(name: str, target: str, draft: str | None, engine: EngineConfig) -> Pair:
    drafter = engine.drafter
    if drafter == AUTO:
        drafter = MODEL if draft else OFF
    reads_model = KINDS[drafter].source == "model"
    if reads_model and draft is None:
        raise ConfigError(
            f"--drafter {drafter} needs a draft model, and {target} has none.",
            hint="name a model with --draft, or use --drafter ngram",
        )
    used = draft if reads_model else None
    return Pair(name, target, used, replace(engine, drafter=drafter))


def _prompts(options: KSweepOptions, recipe: Preset | None) -> dict[str, Prompts]:
    """By domain."""
    if options.single_prompt is not None:
        work = Work(f"{SINGLE}_000", _single(options, options.single_prompt))
        return {SINGLE: Prompts((work,), fingerprint([work.text]))}
    num = _first(options.prompts, recipe and recipe.prompts, NUM_PROMPTS)
    saved = PromptDataset.load(Path(options.prompt_set)) if options.prompt_set else None
    listed = options.domains or (DOMAINS if saved is None else ",".join(saved.domains))
    source = PromptSource(num, saved)
    return {domain: source.of(domain) for domain in dict.fromkeys(_split("--domains", listed))}


def _single(options: KSweepOptions, prompt: str) -> str:
    others = {
        "--domains": options.domains,
        "--prompts": options.prompts,
        "--prompt-set": options.prompt_set,
    }
    for flag, value in others.items():
        if value is not None:
            raise ConfigError(
                f"--single-prompt and {flag} both say which prompts.", hint="drop one of them"
            )
    if not prompt:
        raise ConfigError("--single-prompt is empty.", hint="give at least one token of text")
    return prompt


def _ks(options: KSweepOptions, recipe: Preset | None) -> tuple[int, ...]:
    if options.ks is not None and options.max_k is not None:
        raise ConfigError("--ks and --max-k both say which K.", hint="drop one of them")
    if options.max_k is not None:
        return tuple(range(1, options.max_k + 1))
    words = _split("--ks", options.ks or (recipe.ks if recipe else KS))
    if not all(word.isdecimal() and int(word) <= 64 for word in words):
        raise ConfigError(
            f"--ks must be whole numbers from 0 to 64 between commas, got {options.ks!r}.",
            hint=f"--ks {KS}",
        )
    return tuple(sorted({int(word) for word in words} - {0}))


def _folder_name(pairs: Sequence[Pair], engine: EngineConfig) -> Path:
    today = datetime.date.today().isoformat()
    device = pick_device(engine.device).type
    return Path("results") / f"{today}-{device}-{'+'.join(pair.name for pair in pairs)}"


def _slug(model: str) -> str:
    """A name of a model that can be part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", Path(model).name or model).strip("-.") or "model"


def _split(flag: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{flag} names nothing.", hint=f"give {flag} names between commas")
    return words


def _decided(resolved: Resolved, name: str, value: T) -> T | None:
    """`value` of a setting that something other than its default decided."""
    return None if resolved.chosen[name].origin == DEFAULT else value


def _first(*values: T | None) -> T:
    return next(value for value in values if value is not None)
