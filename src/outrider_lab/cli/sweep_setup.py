"""From the words of `bench sweep` and `bench k` to a sweep: pairs, axes, prompts and a folder.

What a flag leaves open is filled in by the experiment file, then by the preset, then by the user's
settings, then by a default that keeps a first run short. A flag that names a setting takes the
place of a preset's axis of that name.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

from outrider.cli.call import Call
from outrider.cli.options import Verb
from outrider.core.errors import ConfigError, hint_for, nearest
from outrider.core.fields import numbers_of, shown
from outrider.core.settings import (
    DEFAULT,
    SETTINGS,
    Chosen,
    Given,
    Layer,
    Resolved,
    Setting,
    read_settings,
    typed,
)
from outrider.kernels.operators import pick_device
from outrider_lab.bench.studies.sweep_grid import PromptSource, Terms
from outrider_lab.bench.studies.sweep_plan import (
    CONCURRENCY,
    DOMAIN,
    FLAG,
    PAIR,
    SPECIAL,
    SweepAxis,
    SweptPair,
    axes_of,
)
from outrider_lab.bench.studies.sweep_recipes import Recipe, recipe
from outrider_lab.bench.studies.sweep_record import K_SWEEP, SWEEP, Schema
from outrider_lab.bench.workload import MIXED, PromptDataset, check_domain
from outrider_lab.cli import engine_setup
from outrider_lab.cli.bench_options import GridOptions, KSweepOptions, SweepOptions

DOMAINS = "code,maths,conversation"
KS = "1,2,4,8"
NUM_PROMPTS = 10
MAX_TOKENS = 64
SINGLE = "single"
_MOST_KS = 64
# A folder's name has so many pairs or axes before it only counts them.
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A sweep that is ready to be planned; `grids` are the axes of each."""

    grids: tuple[tuple[SweepAxis, ...], ...]
    subjects: tuple[SweptPair, ...]
    terms: Terms
    folder: Path
    options: SweepOptions | KSweepOptions
    recipe: Recipe | None
    warmup: int
    plots: bool


def set_up(call: Call[SweepOptions]) -> Setup:
    """Of `bench sweep`. Raises ConfigError for words that cannot be meant."""
    options = call.options
    found = recipe(options.preset) if options.preset else None
    if found is None and not options.over:
        raise ConfigError(
            "nothing to vary.", hint=f"outrider bench sweep {FLAG} k=2,4,8, or --presets"
        )
    saved = PromptDataset.load(Path(options.prompt_set)) if options.prompt_set else None
    return _set_up(options, call.resolved, found, saved)


def set_up_k(call: Call[KSweepOptions]) -> Setup:
    """Of `bench k`: a sweep over K and domains. Raises ConfigError for words that cannot be
    meant."""
    options = call.options
    found = recipe(options.preset) if options.preset else None
    if found is not None:
        axes = tuple(word for word in found.grids[0] if word.startswith(("pair=", "k=")))
        settings = {"max_tokens": MAX_TOKENS, **found.settings}
        found = replace(found, grids=(axes,), settings=settings)
    chosen = dict(call.resolved.chosen)
    for name in ("max_tokens", "batch_size"):
        value = getattr(options, name)
        if value is not None:
            flag = SETTINGS[name].flag
            chosen[name] = Chosen(SETTINGS[name], value, flag)
    saved = _saved(options)
    domains = options.domains or (DOMAINS if saved is None else ",".join(saved.domains))
    ks = _ks(options, KS if found is None else None)
    over = [f"domain={domains}", *([f"k={ks}"] if ks else [])]
    alike = {item.name for item in fields(GridOptions)}
    shared = {name: getattr(options, name) for name in alike}
    asked = SweepOptions(**shared, over=tuple(over), pair=options.pairs, at_once=_MOST_KS)
    return replace(_set_up(asked, Resolved(chosen), found, saved, K_SWEEP), options=options)


def _saved(options: KSweepOptions) -> PromptDataset | None:
    """The prompts that are not shipped ones."""
    prompt = options.single_prompt
    if prompt is None:
        return PromptDataset.load(Path(options.prompt_set)) if options.prompt_set else None
    for name in ("domains", "prompts", "prompt_set"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--single-prompt and --{name.replace('_', '-')} both say which prompts.",
                hint="drop one of them",
            )
    if not prompt:
        raise ConfigError("--single-prompt is empty.", hint="give at least one token of text")
    return PromptDataset.build({SINGLE: [prompt]}, len, tokenizer="", sources={SINGLE: "flag"})


def _ks(options: KSweepOptions, usual: str | None) -> str:
    """Values of K between commas: those of flags, or else a recipe's own and then nothing."""
    if options.ks is not None and options.max_k is not None:
        raise ConfigError("--ks and --max-k both say which K.", hint="drop one of them")
    if options.max_k is not None:
        return ",".join(map(str, range(1, options.max_k + 1))) or "0"
    if options.ks is None:
        return "" if usual is None else usual
    found = numbers_of("--ks", options.ks, int, 0, _MOST_KS, hint=f"--ks {KS}")
    return ",".join(map(str, sorted(set(found) - {0}) or [0]))


def _set_up(
    options: SweepOptions,
    resolved: Resolved,
    found: Recipe | None,
    saved: PromptDataset | None,
    schema: Schema = SWEEP,
) -> Setup:
    resolved = _with_settings(options, resolved, found)
    own = axes_of(options.over)
    _check_flags(resolved, own)
    grids = _grids(own, found, options, resolved)
    subjects = _subjects(grids, options, resolved)
    terms = replace(_terms(options, resolved, found, saved), schema=schema)
    for axis in (axis for grid in grids for axis in grid):
        _check_domains(axis, saved)
    return Setup(
        grids=grids,
        subjects=subjects,
        terms=terms,
        folder=Path(options.output_dir or _folder_name(options, subjects, grids[0], schema)),
        options=options,
        recipe=found,
        warmup=_first(options.warmup, found and found.warmup, 1),
        plots=not options.no_plots and (found is None or found.plots),
    )


def _with_settings(options: SweepOptions, resolved: Resolved, found: Recipe | None) -> Resolved:
    """The recipe's settings, and defaults of a sweep, where nobody decided. Other models than the
    recipe's have a precision of their own."""
    given: dict[str, object] = {"max_tokens": MAX_TOKENS, "batch_size": 1}
    given |= dict(found.settings) if found else {}
    if _other_models(options, resolved):
        given.pop("dtype", None)
    chosen = dict(resolved.chosen)
    for name, value in given.items():
        if chosen[name].origin == DEFAULT:
            fixed = typed(SETTINGS[name], Given(value, f"the preset's {name}"))
            chosen[name] = Chosen(SETTINGS[name], fixed, "preset")
    return Resolved(chosen)


def _flagged(resolved: Resolved, name: str) -> bool:
    setting = name not in SPECIAL and resolved.chosen.get(name)
    return bool(setting) and setting.origin.startswith("--")


def _other_models(options: SweepOptions, resolved: Resolved) -> bool:
    return options.pair is not None or _flagged(resolved, "target")


def _check_flags(resolved: Resolved, own: Sequence[SweepAxis]) -> None:
    for axis in own:
        if _flagged(resolved, axis.name):
            flag = SETTINGS[axis.name].flag
            raise ConfigError(
                f"{flag} and {FLAG} {axis.name} both say which.", hint="drop one of them"
            )


def _grids(
    own: Sequence[SweepAxis], found: Recipe | None, options: SweepOptions, resolved: Resolved
) -> tuple[tuple[SweepAxis, ...], ...]:
    """The user's axes take the place of the recipe's."""
    ours = {axis.name: axis for axis in own}
    models = _other_models(options, resolved)
    if models and PAIR in ours:
        raise ConfigError(
            f"{FLAG} pair and --{'pair' if options.pair else 'target'} both name models.",
            hint="drop one of them",
        )
    grids: list[tuple[SweepAxis, ...]] = []
    for words in found.grids if found else ((),):
        theirs = {
            axis.name: axis
            for axis in axes_of(words)
            if not _flagged(resolved, axis.name) and not (models and axis.name == PAIR)
        }
        if CONCURRENCY in ours:
            theirs.pop("batch_size", None)
        grids.append(tuple((theirs | ours).values()))
    return tuple(dict.fromkeys(grids))


def _check_domains(axis: SweepAxis, saved: PromptDataset | None) -> None:
    for value in axis.values if axis.name == DOMAIN else ():
        if saved is None:
            check_domain(str(value))
        else:
            saved.get_by_domain(str(value))


def _subjects(
    grids: Sequence[Sequence[SweepAxis]], options: SweepOptions, resolved: Resolved
) -> tuple[SweptPair, ...]:
    """Known pairs, or the models that settings name."""
    axis = next((axis for grid in grids for axis in grid if axis.name == PAIR), None)
    names = options.pair or (",".join(map(str, axis.values)) if axis else None)
    if names is None:
        found = [engine_setup.subject(resolved, most_in_flight=1)]
    else:
        found = engine_setup.known_pairs(resolved, names, most_in_flight=1)
    return tuple(
        SweptPair(one.name, one.models.target, one.models.draft, one.engine) for one in found
    )


def _terms(
    options: SweepOptions, resolved: Resolved, found: Recipe | None, saved: PromptDataset | None
) -> Terms:
    params = resolved.repeatable_sampling()
    params = replace(params, n=1, logprobs=False, top_logprobs=0, round_events=False)
    return Terms(
        params=params,
        prompts=PromptSource(_first(options.prompts, found and found.prompts, NUM_PROMPTS), saved),
        domain=MIXED if saved is None else saved.domains[0],
        iterations=_first(options.iterations, found and found.iterations, 1),
        num_requests=options.requests,
        at_once=options.at_once,
    )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _folder_name(
    options: SweepOptions, subjects: Sequence[SweptPair], axes: Sequence[SweepAxis], schema: Schema
) -> Path:
    today = datetime.date.today().isoformat()
    device = pick_device(subjects[0].engine.device).type
    names = [axis.name for axis in axes if axis.name != PAIR]
    what = [options.preset or "-".join(["sweep", *_few(names, "axes")])]
    pairs = "+".join(_few([one.name for one in subjects], "pairs"))
    return Path("results") / "-".join([today, device, pairs, *(what if schema == SWEEP else [])])


def _few(names: Sequence[str], noun: str) -> list[str]:
    return list(names) if len(names) <= _MOST_NAMED else [f"{len(names)}-{noun}"]


def experiment(verb: Verb, path: Path) -> Layer:
    """Return options and settings of the YAML file of --experiment, one `name: value` per line.

    A list may be written for comma-separated values, and nested lines for an option that may be
    repeated. Raises ConfigError for an unknown name.
    """
    own = {item.name: item for item in verb.own_options()}
    options = [name for name in own if name not in ("experiment", "json", "presets")]
    known = [*options, *(item.name for item in verb.offered_settings())]
    found: dict[str, Given] = {}
    for name, value in read_settings(path).items():
        if name not in known:
            every = "`outrider bench --help` lists options and settings."
            hint = hint_for(name) or nearest(name[:64], known, every)
            raise ConfigError(f"{path}: unknown key {shown(name)}.", hint=hint)
        worded = _as_given(own[name], value) if name in own else value
        found[name] = Given(worded, f"{path}:{name}")
    return found


def _as_given(option: Setting, value: object) -> object:
    """Return a value as flags would give it: comma-separated words, or several NAME=WORDS."""
    if option.kind is tuple and isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        return [f"{name}={_joined(values)}" for name, values in entries.items()]
    return value if option.kind is tuple else _joined(value)


def _joined(value: object) -> object:
    return ",".join(map(str, cast("list[object]", value))) if isinstance(value, list) else value
