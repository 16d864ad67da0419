"""Files of settings, TOML or YAML, read within bounds: what a stranger wrote must cost nothing.

Such a file is a mapping of few levels. Of YAML that is all that is read: anchors, aliases, tags and
further documents are refused, and a scalar without quotes stays the text that was written, which
each setting then reads as it reads a flag. So `no`, `1:30`, `010` and `2026-01-01` are never taken
for something that nobody meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from outrider.core.errors import ConfigError
from outrider.core.files import FileKind, read_text

_MAX_CHARS = 256 << 10
# A line of options that are lists is the deepest: a mapping, of lists, in the file's own mapping.
_MAX_LEVELS = 4
_MAX_EVENTS = 20_000
# tomllib takes the square of the parts of a dotted key.
_MAX_DOTS, _BETWEEN_KEYS = 256, re.compile(r"[\n,=\[\]{}]")
_MAX_REASON = 300
_NOTHING = ("", "~", "null", "Null", "NULL")


def read_settings(path: Path) -> dict[str, object]:
    """What `path` says, by key. Raises ConfigError if it cannot be read or understood."""
    readers = {".toml": _from_toml, ".yaml": _from_yaml, ".yml": _from_yaml}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: a settings file ends in .toml, .yaml or .yml.")
    text = _text(path)
    try:
        return readers[path.suffix](text)
    except RecursionError:
        reason = "it is nested too deeply"
    except Exception as error:  # noqa: BLE001 - what a parser raises for a damaged file is its own
        reason = " ".join(str(error).split()) or type(error).__name__
    raise ConfigError(
        f"{path}: {reason[:_MAX_REASON]}", hint="a settings file has `setting: value` lines"
    ) from None


def _text(path: Path) -> str:
    try:
        text = read_text(path, FileKind.SETTINGS)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}.") from None
    if len(text) > _MAX_CHARS:
        raise ConfigError(f"{path} has more than {_MAX_CHARS} characters, too many for settings.")
    return text


def _from_toml(text: str) -> dict[str, object]:
    import tomllib

    if any(part.count(".") > _MAX_DOTS for part in _BETWEEN_KEYS.split(text)):
        raise ValueError(f"a key has more than {_MAX_DOTS} parts")
    return tomllib.loads(text)


def _from_yaml(text: str) -> dict[str, object]:
    import yaml

    loader: Any = yaml.SafeLoader(text)
    events = _bounded(iter(loader.get_event, None))
    next(events)
    first = next(events)
    if isinstance(first, yaml.StreamEndEvent):
        return {}
    value = _node(next(events), events, 1)
    next(events)
    if not isinstance(next(events), yaml.StreamEndEvent):
        raise ValueError("it holds several documents, and one is read")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("expected `setting: value` lines")
    return cast("dict[str, object]", value)


def _bounded(events: Iterator[Any]) -> Iterator[Any]:
    for number, event in enumerate(events):
        if number > _MAX_EVENTS:
            raise ValueError(f"it has more than {_MAX_EVENTS} entries")
        yield event


def _node(event: Any, events: Iterator[Any], level: int) -> object:
    """The value that begins with `event`; what is in it is taken from `events`."""
    import yaml

    where = f"line {event.start_mark.line + 1}"
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise ValueError(f"{where}: anchors and aliases are not read; write the value out")
    if event.tag is not None:
        raise ValueError(f"{where}: tags are not read; leave {event.tag[:40]!r} out")
    if isinstance(event, yaml.ScalarEvent):
        plain = event.style is None
        return None if plain and event.value in _NOTHING else event.value
    if level > _MAX_LEVELS:
        raise ValueError(f"{where}: nested too deeply")
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[object] = []
        while not isinstance(one := next(events), yaml.SequenceEndEvent):
            items.append(_node(one, events, level + 1))
        return items
    entries: dict[str, object] = {}
    while not isinstance(one := next(events), yaml.MappingEndEvent):
        key = _node(one, events, level + 1)
        if not isinstance(key, str) or key in entries:
            at = f"line {one.start_mark.line + 1}"
            raise ValueError(f"{at}: a key that is no text, or is there twice")
        entries[key] = _node(next(events), events, level + 1)
    return entries
