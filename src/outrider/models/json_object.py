"""A checkpoint's JSON file, read key by key: every error names the file and the key.

A key that holds null counts as absent, as in Hugging Face folders. Functions below read keys of a
`config.json` that mean the same in every family, and refuse values that no family supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard, cast

from outrider.core.errors import CheckpointError, reason_of
from outrider.core.files import FileKind, read_json

MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e30


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object. Messages call it `where`: a path, or a path and a key."""

    where: str
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        """Read `path`. Raises CheckpointError unless it is a readable file with one JSON object."""
        try:
            loaded = read_json(path, FileKind.of(path))
        except OSError as error:
            raise CheckpointError(
                f"cannot read {path}: {reason_of(error)}.",
                hint="is it the folder of a model, and is the download complete?",
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"{path} is not valid JSON: {error}.", hint="download the file again"
            ) from error
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{path} must hold a JSON object, not {_kind(loaded)}.")
        return cls(str(path), cast("dict[str, object]", loaded))

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def child(self, key: str) -> JsonObject | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object", value)
        return JsonObject(f"{self.where}: {key}", cast("dict[str, object]", value))

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_INTEGER
    ) -> int:
        """A count from `least` to `most`."""
        value = self._value(key, default)
        if not _is_integer(value):
            raise self.wrong(key, "an integer", value)
        if not least <= value <= most:
            raise CheckpointError(
                f"{self.where}: {key} must be from {least} to {most}, got {value!r:.40}."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0, and far from overflow."""
        return self._number(key, self._value(key, default))

    def numbers(self, key: str, *, signed: bool = False) -> tuple[float, ...]:
        """A list of numbers, each as in `number`, or also 0 and below if `signed`."""
        return tuple(self._number(key, item, signed=signed) for item in self._list(key))

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty if the key is absent."""
        if not self.has(key):
            return ()
        items = self._list(key)
        found = tuple(item for item in items if isinstance(item, str))
        if len(found) < len(items):
            raise self.wrong(key, "a list of strings", items)
        return found

    def objects(self, key: str) -> tuple[JsonObject, ...]:
        """A list of objects; empty if the key is absent."""
        items = self._list(key) if self.has(key) else []
        values = [cast("dict[str, object]", item) for item in items if isinstance(item, dict)]
        if len(values) < len(items):
            raise self.wrong(key, "a list of objects", items)
        return tuple(JsonObject(f"{self.where}: {key}", value) for value in values)

    def integers(self, key: str) -> tuple[int, ...]:
        """One integer or a list of them; empty if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = cast("list[object]", value if isinstance(value, list) else [value])
        found = tuple(item for item in items if _is_integer(item))
        if len(found) < len(items):
            other = next(item for item in items if not _is_integer(item))
            raise self.wrong(key, "an integer or a list of integers", other)
        return found

    def wrong(self, key: str, expected: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {key} must be {expected}, got {_kind(value)}.",
            hint="correct it in that file, or download the file again",
        )

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.where}: the key {key} is missing.")
        return default

    def _list(self, key: str) -> list[object]:
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self.wrong(key, "a list", value)
        return cast("list[object]", value)

    def _number(self, key: str, value: object, *, signed: bool = False) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number", value)
        least = -MAX_NUMBER if signed else 0
        if not least < value < MAX_NUMBER:
            wanted = "finite" if signed else "above 0"
            raise CheckpointError(f"{self.where}: {key} must be {wanted}, got {value!r:.40}.")
        return float(value)


def _is_integer(value: object) -> TypeGuard[int]:
    """True for integers but not for booleans, which are a kind of int in Python."""
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else f"{value!r:.40}"


def token_text(entry: object) -> str | None:
    """A token as tokenizer_config.json writes it: plain, or an object with its content."""
    if isinstance(entry, dict):
        entry = cast("dict[str, object]", entry).get("content")
    return entry if isinstance(entry, str) else None


OTHER_CHECKPOINT = "choose another checkpoint; `outrider models pairs` lists some that load"
CONTRADICTION = "config.json contradicts itself: download it again, or choose another checkpoint"


def unsupported(where: str | Path, what: str) -> CheckpointError:
    """The error for a value with which no decoder here computes the right logits."""
    return CheckpointError(f"{where}: {what}.", hint=OTHER_CHECKPOINT)


def contradictory(where: str | Path, what: str) -> CheckpointError:
    """The error for values of which one must be wrong."""
    return CheckpointError(f"{where}: {what}.", hint=CONTRADICTION)


# Values of a file are checked against limits before anything is made of them. No model has so many
# layers.
MAX_LAYERS = 4096
# The last position that float32, in which angles are computed, can tell from its neighbours.
MAX_POSITIONS = 1 << 24


def bounded_window(max_tokens: int) -> tuple[int, tuple[str, ...]]:
    """The window that float32 positions allow, and a note if it is shorter than `max_tokens`."""
    if max_tokens <= MAX_POSITIONS:
        return max_tokens, ()
    note = f"float32 can tell positions apart up to {MAX_POSITIONS}: that is the window"
    return MAX_POSITIONS, (f"{note}, not {max_tokens}",)


def refuse_activation(raw: JsonObject, key: str, known: tuple[str, ...]) -> None:
    """Raise unless `key` names one of `known`, of which the first is the default."""
    activation = raw.text(key, known[0])
    if activation not in known:
        raise unsupported(
            raw.where, f"{key} {activation!r} is not supported; this decoder has {known[0]}"
        )


def stop_ids(vocab_size: int, *files: JsonObject | None) -> tuple[int, ...]:
    """End-of-text ids of all files that are in the vocabulary; no others are ever sampled."""
    ids = [item for file in files if file for item in file.integers("eos_token_id")]
    return tuple(dict.fromkeys(item for item in ids if 0 <= item < vocab_size))


def stored_dtype(raw: JsonObject) -> str:
    """The checkpoint's own dtype, under its new key or its old one; "" if it has neither."""
    return raw.text("dtype", raw.text("torch_dtype", "")).removeprefix("torch.")
