"""How fast this machine multiplies and adds numbers that stay in registers.

A pass over many rows does so much with each weight that this bounds it, not memory (bandwidth.py).
For weights of each precision it is the instructions of their products alone (csrc/peak.cpp):
nothing is loaded, and nothing is done to make numbers of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from outrider.kernels.native.build import needed_library
from outrider.kernels.native.ops import function, team

# In the order of `Kind` in csrc/peak.cpp.
ARITHMETIC = ("bfloat16", "bfloat16 dots", "int8", "int4")
# The best turn counts: in others a thread of somebody else's, or of PyTorch's, was in the way.
NUM_TURNS = 12
# Some milliseconds.
STEPS = 1 << 17


@dataclass(frozen=True, slots=True)
class ArithmeticCeiling:
    """Operations a second by `threads` threads; two a multiplication and its addition. `arithmetic`
    is "bfloat16" (products in float32), "bfloat16 dots" (pairs by dot products, where the CPU has
    them), "int8" or "int4"."""

    arithmetic: str
    threads: int
    gflops: float


def arithmetic_ceilings(
    threads: Sequence[int], *, clock: Callable[[], float] = perf_counter
) -> tuple[ArithmeticCeiling, ...]:
    """One for each arithmetic that this CPU has and each of `threads`, in less than half a
    second. Raises MachineError without a compiler."""
    library = needed_library("arithmetic cannot be timed")
    peak = function(library, "peak")
    found: list[ArithmeticCeiling] = []
    for kind, name in enumerate(ARITHMETIC):
        for number in dict.fromkeys(threads):
            address = team(library, number)
            rates: list[float] = []
            for _ in range(NUM_TURNS):
                before = clock()
                num_operations = peak(address, kind, STEPS)
                rates.append(num_operations / (clock() - before))
            if any(rates):
                found.append(ArithmeticCeiling(name, number, round(max(rates) / 1e9, 1)))
    return tuple(found)
