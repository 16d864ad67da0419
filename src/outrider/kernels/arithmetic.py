"""The speed of this machine's multiplications and additions of numbers in registers.

It limits a pass over many rows, which uses each weight so often that memory (bandwidth.py) does
not. For each precision of weights, only the instructions of products are timed (csrc/peak.cpp):
nothing is loaded, and no weight is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from outrider.kernels.native.build import needed_library
from outrider.kernels.native.ops import function, team

# In the order of `Kind` in csrc/peak.cpp.
ARITHMETIC = ("bfloat16", "bfloat16 dots", "int8", "int4")
# The best turn counts: in others, a thread of PyTorch or of another program interfered.
NUM_TURNS = 12
# So many that a turn takes some milliseconds.
STEPS = 1 << 17


@dataclass(frozen=True, slots=True)
class ArithmeticCeiling:
    """Billions of operations a second by `threads` threads; a multiplication with its addition is
    two. `arithmetic` is "bfloat16" (products in float32), "bfloat16 dots" (dot products of pairs,
    if the CPU has them), "int8" or "int4"."""

    arithmetic: str
    threads: int
    gflops: float


def arithmetic_ceilings(
    threads: Sequence[int], *, clock: Callable[[], float] = perf_counter
) -> tuple[ArithmeticCeiling, ...]:
    """Measure all arithmetics with each of `threads`, in half a second. Raises MachineError."""
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
