"""What a topic of `outrider explain` takes and gives: numbers in, a formula worked through out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What formulas are worked with. The defaults are those of docs/theory.md."""

    alpha: float = 0.8
    k: int = 4
    c: float = 0.1
    verify: float = 1.0
    batch: int = 1
    context: int = 0
    p_hit: float = 0.9
    branches: int = 24
    parameters: float = 7.0
    bandwidth: float = 900.0
    tflops: float = 300.0
    watts: float = 100.0


@dataclass(frozen=True, slots=True)
class Symbol:
    """How a number is written in formulas, and what it is."""

    sign: str
    meaning: str


SYMBOLS = {
    "alpha": Symbol("alpha", "chance that a drafted token is accepted after those before it"),
    "k": Symbol("K", "drafted tokens of a round"),
    "c": Symbol("c", "a pass of the drafter, in plain passes of the target"),
    "verify": Symbol("v", "the pass that verifies, in plain passes of the target"),
    "batch": Symbol("b", "sequences of a round"),
    "context": Symbol("n", "tokens that each sequence has already"),
    "p_hit": Symbol("p", "share of the verdicts that are foreseen"),
    "branches": Symbol("B", "verdicts that are drafted for, of one sequence and round"),
    "parameters": Symbol("N", "parameters of the target, in billions, of two bytes"),
    "bandwidth": Symbol("BW", "memory bandwidth, in GB/s"),
    "tflops": Symbol("F", "arithmetic, in TFLOP/s"),
    "watts": Symbol("P", "power that does not depend on the work, in watts"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """`name` = `worked` = `value` `unit`."""

    name: str
    worked: str
    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A title, the idea, the formula, the numbers put in, a table, what follows, where to read."""

    title: str
    idea: str
    formula: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    result: str = ""
    more: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Explain: TypeAlias = Callable[[Numbers], Explanation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """`takes` are the names of the numbers that it uses."""

    name: str
    text: str
    explain: Explain
    takes: tuple[str, ...] = ()


def fixed(*values: float, digits: int = 3) -> tuple[str, ...]:
    """Numbers of a row of a table."""
    return tuple(f"{value:.{digits}f}" for value in values)


def given(numbers: Numbers, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Rows of sign, value, flag and meaning."""
    return tuple(
        (
            SYMBOLS[name].sign,
            f"{getattr(numbers, name):g}",
            f"--{name.replace('_', '-')}",
            SYMBOLS[name].meaning,
        )
        for name in names
    )
