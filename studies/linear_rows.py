"""What one linear takes by its rows, in every format and by every kind of kernel.

Shapes:  N = rows, I = inputs, O = outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from common import Report, in_turns, medians, note, repeated, study, timed
from options import Options
from torch import Tensor

from outrider.core import env
from outrider.core.errors import given
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.cpu import DOTS, TILES, VECTORS, hardware_threads
from outrider.kernels.native.ops import NativeGrouped, NativeInt8, NativeOps
from outrider.kernels.native.tuning import refused_kinds
from outrider.kernels.plan import BlockRows, PackedLinear
from outrider.plugins.doctor.ceilings import arithmetic_ceilings

ROWS, QUICK_ROWS = (1, 4, 8, 16, 32, 128, 512), (1, 16)
SHAPE_OI, QUICK_OI = (4096, 2048), (256, 512)
# GGUF's number of a type, its inputs and bytes of a block, and where that has float16 numbers.
BLOCKS = {
    "Q4_0": (2, 32, 18, (0,)),
    "Q4_1": (3, 32, 20, (0, 2)),
    "Q8_0": (8, 32, 34, (0,)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q5_K": (13, 256, 176, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
}
FORMATS = ("bfloat16", "int8", *BLOCKS)
# The arithmetic of `arithmetic_ceilings` that multiplies a format without tiles.
ARITHMETIC = {"bfloat16": "bfloat16 dots", "Q8_0": "int8", "int8": "int8"}
# A turn takes about so long at a quarter of the ceiling.
TURN_SECONDS = 0.01


@study(threads=0, repeats=9)
def linear_rows(options: Options, report: Report) -> None:
    """What does one linear take by its rows, and which share of the arithmetic ceiling is that?

    Kinds of kernels take turns on the same matrix of 4,096 outputs by 2,048 inputs, which a cache
    may hold, so that arithmetic counts and not memory. `share` is the time that the products alone
    would take, over what the linear took, quantising its rows included. The ceiling is that of the
    CPU's instructions for products of the format on vectors (`csrc/peak.cpp`), which tiles may
    exceed; `share_of_tiles` is that of the products of bytes on tiles.
    """
    threads = options.threads or len(hardware_threads())
    ceilings = arithmetic_ceilings([threads])
    found = {one.arithmetic: one.gflops for one in ceilings}
    report["arithmetic"] = [asdict(one) for one in ceilings]
    num_out, num_in = QUICK_OI if options.quick else SHAPE_OI
    report |= {"threads": threads, "num_out": num_out, "num_in": num_in}
    for name in FORMATS:
        calls = dict(kinds_of(name, threads, num_out, num_in))
        ceiling = found.get(ARITHMETIC.get(name, "int4"), found["bfloat16"])
        for rows in QUICK_ROWS if options.quick else ROWS:
            x_NI, out_NO = torch.randn(rows, num_in), torch.empty(rows, num_out)
            once = 2 * rows * num_out * num_in
            times = max(1, int(TURN_SECONDS * 1e9 * ceiling / once / 4))
            turns = {
                kind: timed(repeated(partial(call, x_NI, out_NO), times))
                for kind, call in calls.items()
            }
            seconds = medians(in_turns(turns, 1 if options.quick else options.repeats))
            for kind, spent in seconds.items():
                each = spent / (times + 1)
                rate = once / each / 1e9
                cell = {"format": name, "kind": kind, "rows": rows}
                cell |= {"us": round(1e6 * each, 2), "share": round(rate / ceiling, 3)}
                if (tiles := found.get("int8 tiles")) and kind == TILES and name != "bfloat16":
                    cell["share_of_tiles"] = round(rate / tiles, 3)
                note(report, **cell)


def kinds_of(
    name: str, threads: int, num_out: int, num_in: int
) -> Iterator[tuple[str, Callable[..., None]]]:
    """A linear of each kind that this machine has, over a matrix of the format `name`."""
    library = given(built_kernels(env.compiler(), env.cache_folder()).library, "native kernels")
    scheme = "none" if name == "bfloat16" else "int8"
    refused = refused_kinds(library, torch.bfloat16, scheme)
    weight_OI = torch.randn(num_out, num_in).bfloat16()
    for kind in (VECTORS, DOTS, TILES):
        if kind in refused:
            continue
        if name in BLOCKS:
            side = NativeGrouped(library, threads, kind=kind)
            packed = given(side.pack([random_rows(name, num_out, num_in)]), "layout of blocks")
        else:
            side = (
                NativeInt8(library, threads, kind=kind)
                if name == "int8"
                else NativeOps(library, torch.bfloat16, threads, kind=kind)
            )
            packed = side.pack(weight_OI)
        yield kind, partial(multiply, side, packed)


def multiply(
    side: NativeGrouped | NativeInt8 | NativeOps, packed: PackedLinear, x_NI: Tensor, out_NO: Tensor
) -> None:
    side.linear(x_NI, packed, out_NO)


def random_rows(name: str, num_out: int, num_in: int) -> BlockRows:
    number, inputs, num_bytes, halves = BLOCKS[name]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (num_out * num_in // inputs, num_bytes), np.uint8)
    for at in halves:
        raw[:, at : at + 2] = np.array([0.01], "<f2").view(np.uint8)
    return BlockRows(raw.reshape(-1), number, num_out, num_in)
