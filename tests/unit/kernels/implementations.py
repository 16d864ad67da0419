"""The kernels under test by name, and the row counts at which they must not change a bit."""

from __future__ import annotations

import ctypes
import functools
import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core import env
from outrider.kernels.native import build
from outrider.kernels.native import build as levels
from outrider.kernels.native.build import Built, built_kernels
from outrider.kernels.native.ops import NativeOps
from outrider.kernels.operators import Kernels
from outrider.kernels.registry import choose

CPU = torch.device("cpu")
IMPLEMENTATIONS = ("reference", "native-1", "native-2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the embedded target, with the nodes of their trees; 0 is a chain.
DRAFTERS = (
    *(("model", 0), ("ngram", 0), ("suffix", 0), ("lookup", 8), ("eagle", 0), ("eagle", 8)),
    *(("medusa", 0), ("mtp", 0), ("quantised-self", 0), ("layer-skip", 0)),
)
ROW_COUNTS = (*range(1, 18), 32, 64, 100)
IN_SOFTWARE = " ".join(
    f"-DOUTRIDER_{name}" for name in ("SOFTWARE_TILES", "SOFTWARE_PAIRS", "PLAIN_DOTS")
)


@functools.cache
def _chosen(name: str, dtype: torch.dtype) -> Kernels:
    kind, _, threads = name.partition("-")
    return choose(
        device=CPU, dtype=dtype, force_reference=kind == "reference", threads=int(threads or 0)
    )


def kernels_named(name: str, dtype: torch.dtype) -> Kernels:
    """Skips the test, with the reason, where no native kernels can be compiled."""
    kernels = _chosen(name, dtype)
    if name.startswith("native") and kernels.choices[0].name != "native":
        built = built_kernels(env.compiler(), env.cache_folder())
        assert built.library is None, kernels.choices[0].refusals
        pytest.skip(str(built.refusal))
    return kernels


def on_vectors(name: str, dtype: torch.dtype) -> Kernels:
    """`kernels_named` with attention on vectors, which any CPU has."""
    kernels = kernels_named(name, dtype)
    if not name.startswith("native"):
        return kernels
    library = library_of(built_kernels(env.compiler(), env.cache_folder()))
    ops = NativeOps(library, dtype, int(name.partition("-")[2]))
    return replace(kernels, attention=ops.attention)


def library_of(built: Built) -> ctypes.CDLL:
    """Without a compiler the test is skipped; sources that do not compile fail it."""
    if built.library is None and shutil.which((env.compiler() or "c++").split()[0]):
        pytest.fail(str(built.refusal))
    if built.library is None:
        pytest.skip(str(built.refusal))
    return built.library


@functools.cache
def software() -> ctypes.CDLL:
    """The kernels without instructions for tiles, pairs or dots; compiled once, in half the time,
    to be run a few seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*levels.FLAGS, "-O1"))
        return library_of(built_kernels(f"c++ {IN_SOFTWARE}", env.cache_folder()))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def row_choices(num_rows: int, seed: int = 0) -> list[Tensor]:
    """For every row count, that many of `num_rows` rows at random places, in random order."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randperm(num_rows, generator=generator)[:count]
        for count in ROW_COUNTS
        if count <= num_rows
    ]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Largest difference as a share of the largest exact value."""
    difference = (actual.double() - exact).abs().max()
    return float(difference / exact.abs().max().clamp_min(1e-30))
