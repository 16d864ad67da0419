"""How fast the kernels here multiply: the ceiling of passes over many rows, as the bandwidth of
memory is that of passes over few."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.bench.gemm.pair import Make
from outrider.bench.gemm.roof import ProductTimer
from outrider.core.config import EngineConfig
from outrider.lab.gemm import Costs

_TURNS = 5


@dataclass(frozen=True, slots=True)
class ComputeCeiling:
    """Operations a second of the best of some turns; two a multiplication and its addition."""

    dtype: str
    threads: int
    gflops: float


def compute_ceiling(engine: EngineConfig) -> ComputeCeiling:
    """Of products with weights as `engine` holds them. A fraction of a second."""
    timer = ProductTimer(
        Make(
            costs=Costs(),
            device=engine.device,
            dtype=engine.dtype,
            quantise=engine.quantise,
            threads=engine.threads,
        )
    )
    timer.peak_flops()
    best = max(timer.peak_flops() for _ in range(_TURNS))
    scheme = str(timer.dtype).removeprefix("torch.")
    named = scheme if engine.quantise == "none" else engine.quantise
    return ComputeCeiling(named, timer.num_threads, round(best / 1e9, 1))
