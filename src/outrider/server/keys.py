"""The file of API keys: one per line, optionally followed by its weight."""

from __future__ import annotations

from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.core.files import FileKind, read_text


def read_keys(name: str | None) -> dict[str, float]:
    """Return the weight of each key; empty without a file. Raises ConfigError."""
    if name is None:
        return {}
    try:
        lines = read_text(Path(name), FileKind.SETTINGS).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}.", hint="one key a line") from None
    found: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        key, *share = line.split() or ["#"]
        if key.startswith("#"):
            continue
        try:
            found[key] = float(*share or [1])
        except (TypeError, ValueError):
            found[key] = 0
        if not 0.001 <= found[key] <= 1000:
            raise ConfigError(
                f"{name}, line {number}: the share of a key is a number from 0.001 to 1000.",
                hint="KEY, or KEY SHARE",
            )
    if not found:
        raise ConfigError(f"{name}: there is no key in it.", hint="one key a line")
    return found
