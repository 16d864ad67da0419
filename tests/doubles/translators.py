"""Translators between toy vocabularies, by arithmetic instead of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Renaming:
    """Draft id (t + shift) % size for target id t."""

    size: int
    shift: int = 0

    def open(self) -> Renaming:
        return self

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        return [(token + self.shift) % self.size for token in tokens]

    def to_target(self, drafted: Sequence[int]) -> list[int]:
        return [(token - self.shift) % self.size for token in drafted]


@dataclass(frozen=True, slots=True)
class Digits:
    """Two draft ids, the digits to base `base`, for each of `size` target ids."""

    size: int
    base: int

    def open(self) -> Digits:
        return self

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        return [digit for token in tokens for digit in divmod(token, self.base)]

    def to_target(self, drafted: Sequence[int]) -> list[int]:
        pairs = zip(drafted[::2], drafted[1::2], strict=False)
        spelled: list[int] = []
        for high, low in pairs:
            if low >= self.base or high * self.base + low >= self.size:
                break
            spelled.append(high * self.base + low)
        return spelled


@dataclass(frozen=True, slots=True)
class Mute:
    """Finds no text in anything."""

    def open(self) -> Mute:
        return self

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        del tokens
        return []

    def to_target(self, drafted: Sequence[int]) -> list[int]:
        del drafted
        return []
