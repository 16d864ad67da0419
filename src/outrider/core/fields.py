"""Dataclass fields with documentation and checks: the one source of flags, variables and keys.

A field made with `setting` carries its help text, its bounds and its choices. The settings registry
(settings.py) reads them, so a name, a default or a bound is written once. A `FieldKind` reads a
value from text or a parsed file, and raises ValueError or OverflowError if it cannot read it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from outrider.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper limit; `what` names the counted things, for messages and documents."""

    most: int
    what: str


# Limits of one request: anything above is refused with ConfigError before any of it runs. Each
# limit bounds work or memory that a request costs others in addition to its own tokens.
STOPS = Limit(16, "stop strings")
STOP_BYTES = Limit(256, "bytes of a stop string in UTF-8")
STOP_IDS = Limit(64, "token ids that end a text")
BAD_WORDS = Limit(256, "bad words")
BAD_WORD_BYTES = Limit(256, "bytes of a bad word in UTF-8")
LOGIT_BIAS = Limit(1024, "token ids with a bias")
COMPLETIONS = Limit(16, "completions of one prompt")
TOP_LOGPROBS = Limit(20, "likeliest tokens reported at a position")
MESSAGES = Limit(1024, "messages of a conversation, and tools that it offers")
# Text of any language has 1 to 8 bytes a token; only long runs of blanks come near this.
BYTES_PER_TOKEN = Limit(
    32, "bytes of a prompt, of all messages or of a prediction, for each token of the window"
)
# Largest whole number of a setting: no machine reaches it, and every integer type of a kernel holds
# it.
WHOLE = 2**31 - 1

LIMITS: Mapping[str, Limit] = {
    "stop": STOPS,
    "stop, each": STOP_BYTES,
    "stop_token_ids": STOP_IDS,
    "bad_words": BAD_WORDS,
    "bad_words, each": BAD_WORD_BYTES,
    "logit_bias": LOGIT_BIAS,
    "n": COMPLETIONS,
    "top_logprobs": TOP_LOGPROBS,
    "messages": MESSAGES,
    "prompt": BYTES_PER_TOKEN,
}


_MOST_SHOWN = 100
Number = TypeVar("Number", int, float)
Class = TypeVar("Class")


@dataclass(frozen=True, slots=True)
class Meta:
    """Description of a `setting` field. Bounds are inclusive. `count` limits the entries of a list
    or mapping, `each` the bytes of an entry. `others` are choices that installed packages add.
    Where a setting names models or files, starts processes or changes the distribution of the text,
    `harmless` are the only values allowed in a file that the user did not name; None allows all.
    `kind` is the type of its values where neither default nor annotation says it. A `per_request`
    field has no flag, variable or file key."""

    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    others: Callable[[], tuple[str, ...]] = tuple
    count: Limit | None = None
    each: Limit | None = None
    harmless: tuple[object, ...] | None = None
    kind: type | None = None
    per_request: bool = False


def setting(default: Any, text: str, **declared: Any) -> Any:
    """A dataclass field with help and further fields of `Meta`, by name."""
    return field(default=default, metadata={"meta": Meta(text, **declared)})


def documented(kind: type[Class]) -> type[Class]:
    """Class decorator: `help` shows the meaning of each field, with the text of its flag."""
    lines = [
        f"    {item.name} = {default_of(item)!r}: {meta_of(item).help}"
        for item in fields(cast("Any", kind))
    ]
    kind.__doc__ = "\n".join(((kind.__doc__ or "").rstrip(), "", "    Fields:", *lines))
    return kind


def as_texts(value: object) -> object:
    """A string or a sequence as a tuple, None as an empty one; any other value unchanged."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(cast("Sequence[object]", value)) if isinstance(value, Sequence) else value


def as_ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids of any container, each once; None is an empty one. Raises ConfigError."""
    given: list[object] = [] if value is None else [value]
    if isinstance(value, Iterable):
        # Arrays without axes say that they are iterable, and are not.
        with suppress(TypeError):
            given = list(cast("Iterable[object]", value))
    if strange := [one for one in given if not is_id(one)]:
        raise ConfigError(f"{name} must be a list of token ids, got {shown(strange[0])}.")
    return tuple(dict.fromkeys(index(cast("Any", one)) for one in given))


def is_id(value: object) -> bool:
    """True for a whole number that may be a token's id, also NumPy's."""
    if isinstance(value, bool):
        return False
    try:
        return 0 <= index(cast("Any", value)) <= WHOLE
    except TypeError:
        return False


def meta_of(item: Field[Any]) -> Meta:
    return cast("Meta", item.metadata["meta"])


def default_of(item: Field[Any]) -> Any:
    if item.default is MISSING:
        raise TypeError(f"{item.name} is no setting: it has no default")
    return item.default


def is_changed(config: DataclassInstance, name: str) -> bool:
    """True if this setting differs from its default."""
    item = next(item for item in fields(config) if item.name == name)
    return getattr(config, name) != default_of(item)


def check_fields(config: DataclassInstance) -> None:
    """Raise ConfigError for the first field of `config` that breaks its own description."""
    for item in fields(config):
        meta = meta_of(item)
        default = default_of(item) if meta.kind is None else meta.kind()
        value = _plain_integer(config, item.name, default)
        if default is None and value is not None:
            check_mapping(item.name, value, meta)
        elif value is not None or default_of(item) is not None:
            check_type(item.name, value, default)
            check_value(item.name, value, meta)


def _plain_integer(config: DataclassInstance, name: str, default: object) -> object:
    """The field's value; another library's integer, such as numpy's, becomes Python's own."""
    if type(default) is int and not isinstance(getattr(config, name), int):
        with suppress(TypeError):
            object.__setattr__(config, name, index(getattr(config, name)))
    return getattr(config, name)


def check_type(name: str, value: object, default: object) -> None:
    """Raise ConfigError unless `value` has the type of `default`; an int is a float too."""
    kinds = (int, float) if isinstance(default, float) else type(default)
    lies = isinstance(value, bool) and not isinstance(default, bool)
    if lies or not isinstance(value, kinds):
        wanted = "a number" if isinstance(default, float) else f"of type {type(default).__name__}"
        wanted = "a text or a list of texts" if isinstance(default, tuple) else wanted
        raise ConfigError(f"{name} must be {wanted}, got {shown(value)}.")


def check_mapping(name: str, value: object, meta: Meta) -> None:
    """Raise ConfigError unless `value` maps whole numbers from 0 to numbers within the bounds."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must map token ids to numbers, got {shown(value)}.")
    entries = cast("Mapping[object, object]", value)
    _check_count(name, len(entries), meta.count)
    for key, number in entries.items():
        if not is_id(key):
            raise ConfigError(f"{name}: {shown(key)} is not a token id.")
        check_type(f"{name} of token {key}", number, 0.0)
        check_value(f"{name} of token {key}", number, meta)


def check_value(name: str, value: object, meta: Meta) -> None:
    """Raise ConfigError if `value` is not finite, out of bounds, not one of the choices, too many
    or too long, or is not Unicode."""
    if isinstance(value, str):
        num_bytes(name, value)
        if meta.choices and value not in meta.choices and value not in meta.others():
            hint = did_you_mean(value, (*meta.choices, *meta.others()))
            raise ConfigError(f"{name}: unknown value {shown(value)}.", hint=hint)
    elif isinstance(value, tuple):
        _check_items(name, cast("tuple[object, ...]", value), meta)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(name, value, meta)


def _check_number(name: str, value: float, meta: Meta) -> None:
    # An int may be larger than any float, and is finite.
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(
            f"{name} must be a finite number, got {value}.", hint="a number, or leave it out"
        )
    low = meta.minimum is not None and value < meta.minimum
    if low or (meta.maximum is not None and value > meta.maximum):
        meta = replace(meta, maximum=None) if low and meta.maximum == WHOLE else meta
        raise ConfigError(
            f"{name} must be {_range(meta)}, got {shown(value)}.",
            hint=f"{meta.minimum if low else meta.maximum}, or leave it out",
        )


def _check_items(name: str, items: tuple[object, ...], meta: Meta) -> None:
    """Check a list of texts, or of ids, which have a minimum (`as_ids`)."""
    _check_count(name, len(items), meta.count)
    for text in items if meta.minimum is None else ():
        if not isinstance(text, str):
            raise ConfigError(f"{name} must hold texts, got {shown(text)}.")
        size = num_bytes(name, text)
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


def num_bytes(name: str, text: str) -> int:
    """Size of `text` in UTF-8. Raises ConfigError if it has surrogates, which are no characters."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        pass
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        raise ConfigError(f"{name} has bytes that are not UTF-8.")
    raise ConfigError(
        f"{name} cannot be read: Python takes words for {encoding} here.",
        hint="PYTHONUTF8=1 before the command, or a locale of UTF-8, as LC_ALL=C.UTF-8",
    )


def shown(value: object) -> str:
    """`value` for a message: shortened, and safe where its `repr` raises."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an int of 5,000 digits, or a third-party object
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _range(meta: Meta) -> str:
    if meta.minimum is None:
        return f"at most {meta.maximum}"
    if meta.maximum is None:
        return f"at least {meta.minimum}"
    return f"between {meta.minimum} and {meta.maximum}"


Value: TypeAlias = bool | int | float | str | tuple[str, ...] | Mapping[int, float]


@dataclass(frozen=True, slots=True)
class FieldKind:
    """The name of one type's values, and a reader of them: from text or from a parsed file."""

    noun: str
    read: Callable[[object], Value]


# As in 25.6k and 32K: decimal small, binary capital.
_MULTIPLES = {"k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(value)
    multiple = _MULTIPLES.get(value[-1:]) if isinstance(value, str) else None
    if multiple is None or isinstance(value, int):
        return int(value)
    whole, _, fraction = value[:-1].partition(".")
    if not all(part.isascii() and part.isdigit() for part in (whole, fraction or "0")):
        raise ValueError(value)
    number, rest = divmod(int(whole + fraction) * multiple, 10 ** len(fraction))
    if rest:
        raise ValueError(value)
    return number


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    lowered = _text(value).strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(value)


def _texts(value: object) -> tuple[str, ...]:
    """A list of texts; given as text, a JSON list or its only entry."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("[") else [value]
    if not isinstance(value, list | tuple):
        raise ValueError(value)
    return tuple(_text(entry) for entry in cast("list[object] | tuple[object, ...]", value))


def _numbers_by_id(value: object) -> Mapping[int, float]:
    """A mapping; given as text, a JSON object or comma-separated ID=NUMBER entries."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("{") else _entries(value)
    if not isinstance(value, dict):
        raise ValueError(value)
    entries = cast("dict[object, object]", value)
    return {_integer(key): _number(number) for key, number in entries.items()}


def _entries(text: str) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(text)
    return {key.strip(): number for key, _, number in pairs}


KINDS: Mapping[type, FieldKind] = {
    bool: FieldKind("a switch (1 or 0)", _switch),
    int: FieldKind("an integer", _integer),
    float: FieldKind("a number", _number),
    str: FieldKind("text", _text),
    tuple: FieldKind("a list of texts", _texts),
    Mapping: FieldKind("entries ID=NUMBER", _numbers_by_id),
}


def split(text: str) -> tuple[str, ...]:
    """The comma-separated words of `text`, each once, in order."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def words_of(flag: str, text: str, *, hint: str) -> tuple[str, ...]:
    """The comma-separated words of a flag. Raises ConfigError with `hint` if there is none."""
    if found := split(text):
        return found
    raise ConfigError(f"{flag} names nothing.", hint=hint)


def numbers_of(
    flag: str, text: str, kind: type[Number], low: float, high: float, *, hint: str
) -> tuple[Number, ...]:
    """Comma-separated numbers, in order, repetitions included. Raises ConfigError if there are
    none, or if a word is no such number."""
    try:
        found = tuple(kind(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = ()
    if not found or not all(low <= number <= high for number in found):
        noun = "whole numbers" if kind is int else "numbers"
        bounds = f"from {low:g}" + ("" if math.isinf(high) else f" to {high:g}")
        raise ConfigError(
            f"{flag} must be {noun} {bounds} between commas, got {shown(text)}.", hint=hint
        )
    return found


def known_words(flag: str, text: str, known: Collection[str], *, kind: str) -> tuple[str, ...]:
    """Comma-separated names of a `kind`, all of them `known`. Raises ConfigError for others."""
    found = words_of(flag, text, hint=f"{flag} {','.join(known)}")
    for name in found:
        if name not in known:
            raise ConfigError(f"unknown {kind} {name!r}.", hint=did_you_mean(name, known))
    return found


def size(num_bytes: float) -> str:
    """A number of bytes in decimal units, as model hubs print them."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
