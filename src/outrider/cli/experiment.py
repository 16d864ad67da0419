"""An experiment as a YAML file: options of a sweep and settings, one `name: value` a line.

The file fills in what flags and the environment leave open, and goes before `outrider.toml`. Its
names are those of the flags with `_` for `-`. A list may stand for an option's values between
commas; a setting that is a list is written as one. An option that may be given several times is a
list, or `name: values` lines below it: `over:` with `k: [2, 4]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from outrider.cli.bench_sweep_options import SweepOptions
from outrider.cli.options import KSweepOptions
from outrider.core.errors import ConfigError, nearest
from outrider.core.fields import default_of, shown
from outrider.core.foreign import hint_for
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
