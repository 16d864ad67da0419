"""How kernels are launched: with products and sums left apart.

A compiler may fuse a product and a sum into one rounding, and where it does so is its own affair.
Two kernels that share a formula, and a kernel and its definition, agree bit for bit only if none
is fused, so every launch forbids it.
"""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Puts one kernel on the current stream. An empty grid is no launch."""
    if 0 not in grid:
        kernel[grid](*arguments, **constants, enable_fp_fusion=False)


def cdiv(number: int, step: int) -> int:
    return -(-number // step)


def power_of_two(number: int) -> int:
    """The least that is not below `number`."""
    return 1 << (number - 1).bit_length()
