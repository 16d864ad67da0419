"""Names between commas, as flags have them, and sizes as people read them."""

from __future__ import annotations

from collections.abc import Collection

from outrider.core.errors import ConfigError
from outrider.core.nearest import did_you_mean


def words_of(flag: str, text: str, *, hint: str) -> tuple[str, ...]:
    """Each once, in order. Raises ConfigError with `hint` if there are none."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise ConfigError(f"{flag} names nothing.", hint=hint)
    return found


def known_words(flag: str, text: str, known: Collection[str], *, kind: str) -> tuple[str, ...]:
    """The same for names of a `kind` of which all are `known`. Raises ConfigError for others."""
    found = words_of(flag, text, hint=f"{flag} {','.join(known)}")
    for name in found:
        if name not in known:
            raise ConfigError(f"unknown {kind} {name!r}.", hint=did_you_mean(name, known))
    return found


def size(num_bytes: float) -> str:
    """Decimal units, as model hubs print them."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
