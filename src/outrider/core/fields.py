"""Dataclass fields that document and check themselves: the single source of flags and settings.

A field made with `setting` carries its help text, its bounds and its choices. The settings registry
reads them to make command-line flags, environment variables and file keys, so a name, a default or
a bound is written once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast

from outrider.core.errors import ConfigError
from outrider.core.nearest import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Meta:
    """What a `setting` field says of itself. Bounds are inclusive."""

    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()


def setting(
    default: Any,
    text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A dataclass field with help, inclusive bounds and choices."""
    return field(default=default, metadata={"meta": Meta(text, minimum, maximum, tuple(choices))})


def meta_of(item: Field[Any]) -> Meta:
    meta = item.metadata["meta"]
    assert isinstance(meta, Meta)
    return meta


def default_of(item: Field[Any]) -> Any:
    assert item.default is not MISSING
    return item.default


def check_fields(config: DataclassInstance) -> None:
    """Raise ConfigError for the first field of `config` outside what it declares."""
    for item in fields(config):
        value, default = getattr(config, item.name), default_of(item)
        if default is None:
            if value is not None:
                check_mapping(item.name, value, meta_of(item))
            continue
        check_type(item.name, value, default)
        check_value(item.name, value, meta_of(item))


def check_type(name: str, value: object, default: object) -> None:
    """Raise ConfigError unless `value` is of the kind that `default` is; an int is a float too."""
    kinds = (int, float) if isinstance(default, float) else type(default)
    lies = isinstance(value, bool) and not isinstance(default, bool)
    if lies or not isinstance(value, kinds):
        wanted = "a number" if isinstance(default, float) else f"of type {type(default).__name__}"
        raise ConfigError(f"{name} must be {wanted}, got {value!r}.")
    if isinstance(value, tuple):
        strange = [item for item in cast("tuple[object, ...]", value) if not isinstance(item, str)]
        if strange:
            raise ConfigError(f"{name} must hold texts, got {strange[0]!r}.")


def check_mapping(name: str, value: object, meta: Meta) -> None:
    """Raise ConfigError unless `value` maps whole numbers from 0 to numbers within the bounds."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must map token ids to numbers, got {value!r}.")
    for key, number in cast("Mapping[object, object]", value).items():
        if isinstance(key, bool) or not isinstance(key, int) or key < 0:
            raise ConfigError(f"{name}: {key!r} is not a token id.")
        check_type(f"{name} of token {key}", number, 0.0)
        check_value(f"{name} of token {key}", number, meta)


def check_value(name: str, value: object, meta: Meta) -> None:
    """Raise ConfigError if `value` is not finite, out of bounds or not one of the choices."""
    if isinstance(value, str) and meta.choices and value not in meta.choices:
        raise ConfigError(
            f"{name}: unknown value {value!r}.", hint=did_you_mean(value, meta.choices)
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value}.")
    low = meta.minimum is not None and value < meta.minimum
    if low or (meta.maximum is not None and value > meta.maximum):
        raise ConfigError(f"{name} must be {_range(meta)}, got {value}.")


def _range(meta: Meta) -> str:
    if meta.minimum is None:
        return f"at most {meta.maximum}"
    if meta.maximum is None:
        return f"at least {meta.minimum}"
    return f"between {meta.minimum} and {meta.maximum}"
