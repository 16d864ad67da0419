"""The kinds of native linear, which of them this machine can run, and which bfloat16 gets.

Vectors run anywhere. Dots multiply pairs of bfloat16 with one instruction (AVX512-BF16); tiles
multiply blocks of bfloat16 or of bytes (AMX). See csrc/linear.cpp and csrc/tiles.h.

In bfloat16 kinds sum in different orders, so that a near-tie may fall another way: there a rule on
the CPU decides, and machines of one make write one text. Integers have the same sums by any kind,
so for them the faster is measured (contests.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from outrider.kernels.tiles import tiles_refusal

VECTORS, DOTS, TILES = "vectors", "dots", "tiles"
# What the names of a kind's functions end in.
ENDINGS = {VECTORS: "", DOTS: "_dots", TILES: "_tiles"}

RULE = (
    "by rule, since kinds of bfloat16 differ in bits: tiles where they can be used, else dots on "
    "AMD's CPUs, else vectors"
)

# As in csrc/pairs.cpp.
_NO_DOTS = (
    None,
    "AVX512-BF16: this CPU has no dot products of bfloat16",
    "AVX512-BF16: the compiler does not know it",
)


def refused_kinds(library: ctypes.CDLL, dtype: torch.dtype, scheme: str) -> dict[str, str]:
    """By kind, why linears of `dtype`, or of a scheme of quantisation unless that is "none", cannot
    use it, in one sentence. Kinds that are not named can be used."""
    # Asked of every precision: permission must come before the first team of threads.
    no_tiles = tiles_refusal(library)
    missing: int = library.outrider_dots_missing()
    no_dots: str | None = _NO_DOTS[missing]
    if scheme != "none" or dtype != torch.bfloat16:
        no_dots = "they multiply bfloat16 only"
    if scheme == "none" and dtype != torch.bfloat16:
        no_tiles = "they multiply bfloat16 and integers only"
    return {kind: why for kind, why in ((DOTS, no_dots), (TILES, no_tiles)) if why}


def kind_by_rule(library: ctypes.CDLL, refused: Mapping[str, str]) -> str:
    """What RULE says, where `refused` kinds cannot be used."""
    if TILES not in refused:
        return TILES
    return DOTS if DOTS not in refused and library.outrider_dots_faster() else VECTORS
