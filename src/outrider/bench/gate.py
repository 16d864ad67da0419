"""Gates: ratios of two sides' speeds that must stay inside a stated band.

Seconds on a shared machine are noise, and a gate that fails by noise is soon ignored. So both sides
take turns in one process, each turn gives one ratio of their rates, and what counts is the median
of all turns. If it lies outside the band, more turns are taken and the median is that of all turns
so far: a slow minute passes, a slow side stays. A band has an upper edge too, since a side that is
too fast has left out work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

# Does the work of turn number n and says how much of it that was: tokens, or passes.
Side: TypeAlias = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Gate:
    """`low` <= rate of `ours` / rate of `other` <= `high`. `refusal` says why the ratio cannot be
    taken here; such a gate is shut for nobody."""

    name: str
    low: float
    high: float
    ours: Side
    other: Side
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """The median ratio of `num_turns` turns, None where the gate was refused."""

    gate: Gate
    ratio: float | None
    num_turns: int

    @property
    def holds(self) -> bool:
        return self.ratio is None or self.gate.low <= self.ratio <= self.gate.high

    def line(self) -> str:
        """For people."""
        gate = self.gate
        if self.ratio is None:
            return f"{gate.name}: refused, {gate.refusal}"
        mark = "ok" if self.holds else "OUTSIDE"
        return (
            f"{gate.name}: {self.ratio:.2f}, band {gate.low:g} to {gate.high:g}, "
            f"{self.num_turns} turns: {mark}"
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.gate.name,
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "low": self.gate.low,
            "high": self.gate.high,
            "num_turns": self.num_turns,
            "holds": self.holds,
            "refusal": self.gate.refusal,
        }


def judge(
    gate: Gate,
    *,
    num_turns: int,
    num_attempts: int = 3,
    clock: Callable[[], float] = perf_counter,
) -> Finding:
    """`num_turns` turns after one untimed, up to `num_attempts` times as many if it does not hold.

    `clock` gives seconds.
    """
    if gate.refusal is not None:
        return Finding(gate, None, 0)
    _turn(gate, 0, clock)
    ratios: list[float] = []
    finding = Finding(gate, None, 0)
    for _ in range(num_attempts):
        ratios += [_turn(gate, len(ratios) + i, clock) for i in range(num_turns)]
        finding = Finding(gate, statistics.median(ratios), len(ratios))
        if finding.holds:
            break
    return finding


def _turn(gate: Gate, number: int, clock: Callable[[], float]) -> float:
    """One ratio of rates; who begins changes from turn to turn."""
    sides = (gate.ours, gate.other)
    rates = [0.0, 0.0]
    for place in (0, 1) if number % 2 == 0 else (1, 0):
        started = clock()
        amount = sides[place](number)
        rates[place] = amount / (clock() - started)
    return rates[0] / rates[1]
