"""Interface of a certificate's parts: they report steps, and end in a check."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One part's result. `holds` None says that it could not be checked here.

    `summary` is one line for people, `facts` plain values for programs. `problems` say what failed
    and `warnings` what a reader should know although nothing failed.
    """

    name: str
    title: str
    holds: bool | None
    summary: str
    facts: Mapping[str, Any]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "holds": self.holds,
            "summary": self.summary,
            "problems": list(self.problems),
            "warnings": list(self.warnings),
            "facts": dict(self.facts),
        }


@dataclass(frozen=True, slots=True)
class Effort:
    """Amounts of work of each part. Counts are per exact sampler and pair of distributions, where a
    part has them; the user's own sampler is walked more often than the others."""

    num_generated: int = 340
    num_texts: int = 50_000
    num_walked: int = 400
    num_walked_own: int = 1_500
    num_races: int = 1_000
    num_engine: int = 400
    greedy_tokens: int = 64


DEEP = Effort(
    num_generated=3_400,
    num_texts=1_000_000,
    num_walked=4_000,
    num_walked_own=15_000,
    num_races=10_000,
    num_engine=4_000,
    greedy_tokens=192,
)

# A part reports what it is doing, now and then, and returns its checks.
Part: TypeAlias = Generator[str, None, tuple[Check, ...]]
