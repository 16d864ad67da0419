"""Dataclass fields that document and check themselves: the single source of flags and settings.

A field made with `setting` carries its help text, its bounds and its choices. The settings registry
reads them to make command-line flags, environment variables and file keys, so a name, a default or
a bound is written once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, cast

from outrider.core.errors import ConfigError
from outrider.core.limits import WHOLE, Limit
from outrider.core.nearest import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_MOST_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Meta:
    """What a `setting` field says of itself. Bounds are inclusive. `count` limits how many entries
    a list or mapping has, `each` the bytes of an entry. `harmless` are the values that a file may
    say which nobody named; None is all of them."""

    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    count: Limit | None = None
    each: Limit | None = None
    harmless: tuple[object, ...] | None = None


def setting(
    default: Any,
    text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    limits: Sequence[Limit] = (),
) -> Any:
    """A dataclass field with help, inclusive bounds and choices; `limits` are those of how many
    entries it has, and of the bytes of each."""
    count, each = (*limits, None, None)[:2]
    meta = Meta(text, minimum, maximum, tuple(choices), count, each)
    return field(default=default, metadata={"meta": meta})


def guarded(item: Any, *harmless: object) -> Any:
    """`item`, made by `setting`, as one that names models or files, starts processes or changes the
    law of the text, save with the values that are `harmless`."""
    meta = replace(meta_of(item), harmless=harmless)
    return field(default=item.default, metadata={"meta": meta})


def meta_of(item: Field[Any]) -> Meta:
    return cast("Meta", item.metadata["meta"])


def default_of(item: Field[Any]) -> Any:
    if item.default is MISSING:
        raise TypeError(f"{item.name} is no setting: it has no default")
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
        raise ConfigError(f"{name} must be {wanted}, got {shown(value)}.")
    if isinstance(value, tuple):
        strange = [item for item in cast("tuple[object, ...]", value) if not isinstance(item, str)]
        if strange:
            raise ConfigError(f"{name} must hold texts, got {shown(strange[0])}.")


def check_mapping(name: str, value: object, meta: Meta) -> None:
    """Raise ConfigError unless `value` maps whole numbers from 0 to numbers within the bounds."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must map token ids to numbers, got {shown(value)}.")
    entries = cast("Mapping[object, object]", value)
    _check_count(name, len(entries), meta.count)
    for key, number in entries.items():
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key <= WHOLE:
            raise ConfigError(f"{name}: {shown(key)} is not a token id.")
        check_type(f"{name} of token {key}", number, 0.0)
        check_value(f"{name} of token {key}", number, meta)


def check_value(name: str, value: object, meta: Meta) -> None:
    """Raise ConfigError if `value` is not finite, out of bounds, not one of the choices, too many
    or too long, or is not Unicode."""
    if isinstance(value, str):
        _num_bytes(name, value)
        if meta.choices and value not in meta.choices:
            raise ConfigError(
                f"{name}: unknown value {shown(value)}.", hint=did_you_mean(value, meta.choices)
            )
    elif isinstance(value, tuple):
        _check_texts(name, cast("tuple[str, ...]", value), meta)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(name, value, meta)


def _check_number(name: str, value: float, meta: Meta) -> None:
    # An int may be larger than any float, and is finite.
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value}.")
    low = meta.minimum is not None and value < meta.minimum
    if low or (meta.maximum is not None and value > meta.maximum):
        meta = replace(meta, maximum=None) if low and meta.maximum == WHOLE else meta
        raise ConfigError(f"{name} must be {_range(meta)}, got {shown(value)}.")


def _check_texts(name: str, texts: tuple[str, ...], meta: Meta) -> None:
    _check_count(name, len(texts), meta.count)
    for text in texts:
        size = _num_bytes(name, text)
        if meta.each is not None and size > meta.each.most:
            raise ConfigError(
                f"{name}: {shown(text)} has {size} bytes; at most {meta.each.most} are allowed.",
                hint="shorten it: `outrider config` lists the limits",
            )


def _check_count(name: str, number: int, limit: Limit | None) -> None:
    if limit is not None and number > limit.most:
        raise ConfigError(
            f"{name} has {number} entries; a request may have {limit.most} {limit.what}.",
            hint="leave some out: `outrider config` lists the limits",
        )


def _num_bytes(name: str, text: str) -> int:
    """Of `text` in UTF-8. Raises ConfigError if it has surrogates, which are no characters."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{name} has bytes that are not UTF-8.") from None


def shown(value: object) -> str:
    """`value` for a message: not all of it, and none of what it raises while it is written."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an int of 5,000 digits, or anybody's object
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _range(meta: Meta) -> str:
    if meta.minimum is None:
        return f"at most {meta.maximum}"
    if meta.maximum is None:
        return f"at least {meta.minimum}"
    return f"between {meta.minimum} and {meta.maximum}"
