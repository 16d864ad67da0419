"""Triton basics: launches without fused roundings, packed weights, dot products, sizes of tiles.

    plain   [O, I], unchanged
    int8    [O, I'] of int8 and a float32 scale for each output: the reference's format, with the
            inputs padded to whole steps
    int4    [I' / 64][O][32] bytes, and float16 scales and minimums [2][G'][O]: the low halves of
            32 bytes hold the codes of one group, the high halves those of the next
    head    of int4: [I' / 32][O][32] codes of int8 and float16 scales [1][G'][O]

Factors of padding are 0.

Sizes of tiles are pure functions of the model's shapes, never of the number of rows, because tuning
at run time would give other sums on another machine or run. They were chosen for sm_90: at least 64
programs or so, and at least 20 kB of weights in flight to each multiprocessor.

Shapes:  O = outputs, I = inputs, G = groups, C = inputs of a group, J = pairs of groups,
         F = factors of a group, N = rows of a call, A = query heads, P = parts of the context,
         D = head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton import knobs
from triton.runtime.driver import driver

from outrider.kernels.plan import PackedLinear
from outrider.kernels.reference.linear import BITS, GROUP, HEAD_BITS, in_parts, quantise
from outrider.plugins.gpu.kernels.scratch import PART


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch one kernel on the current stream. An empty grid launches nothing.

    A compiler may fuse a product and a sum into one rounding. Two kernels that share a formula, and
    a kernel and its definition, agree bit for bit only if none is fused, so every launch forbids
    it.
    """
    if 0 in grid:
        return
    if (found := _NOTED.get()) is not None:
        one = Launch(kernel, grid, arguments, constants)
        found.setdefault(one.form, one)
        return
    # Triton takes the thread's current device, which need not be that of the tensors.
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **constants, enable_fp_fusion=False)


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of `launch`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def by_name(self) -> dict[str, Any]:
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False))

    @property
    def form(self) -> tuple[object, ...]:
        """Everything that makes another binary: types, constants, and multiples of 16 or ones."""
        # The interpreter has no such lists.
        plain = getattr(self.kernel, "do_not_specialize", ())
        anywhere = getattr(self.kernel, "do_not_specialize_on_alignment", ())
        parts = [_form(one, name in plain, name in anywhere) for name, one in self.by_name.items()]
        return (self.kernel.__name__, *parts, *sorted(self.constants.items()))


def _form(argument: Any, plain: bool, anywhere: bool) -> object:
    if isinstance(argument, Tensor):
        return argument.dtype, anywhere or argument.data_ptr() % _ALIGNMENT == 0
    if isinstance(argument, bool) or not isinstance(argument, int):
        return type(argument)
    is_wide = argument.bit_length() > 31
    return is_wide if plain else (is_wide, argument == 1, argument % _ALIGNMENT == 0)


_ALIGNMENT = 16
_NOTED: ContextVar[dict[object, Launch] | None] = ContextVar("_NOTED", default=None)


def noted(work: Callable[[], object]) -> Sequence[Launch]:
    """The launches of `work`, the first of each form. `work` is called, but nothing is launched."""
    token = _NOTED.set(found := {})
    try:
        work()
    finally:
        _NOTED.reset(token)
    return list(found.values())


def cdiv(number: int, step: int) -> int:
    return -(-number // step)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


# Inputs of one step of the kernels; they are padded to a multiple.
STEP = 256


def padded_inputs(num_in: int) -> int:
    return -(-num_in // STEP) * STEP


def pack(weight_OI: Tensor, scheme: str) -> PackedLinear:
    """Pack a weight on its own device, at load."""
    num_out, num_in = weight_OI.shape
    if scheme == "int4":
        return _grouped(weight_OI, BITS)
    if scheme == "none":
        return PackedLinear(num_out, num_in, weight_OI.detach().contiguous())
    parts = list(in_parts(weight_OI, 1))
    values_OI = torch.cat([values_OI for _, values_OI, _ in parts])
    scale_O = torch.cat([scale_O for _, _, scale_O in parts])
    values_OI = functional.pad(values_OI, (0, padded_inputs(num_in) - values_OI.shape[1]))
    return PackedLinear(num_out, num_in, values_OI.contiguous(), scales=scale_O)


def pack_head(weight_OI: Tensor, scheme: str) -> PackedLinear:
    """Pack an output head on its own device, at load."""
    return _grouped(weight_OI, HEAD_BITS) if scheme == "int4" else pack(weight_OI, scheme)


def _grouped(weight_OI: Tensor, bits: int) -> PackedLinear:
    num_out, num_in = weight_OI.shape
    groups, device = quantise(weight_OI, bits), weight_OI.device
    missing = padded_inputs(num_in) - groups.codes_OI.shape[1]
    codes_OI = functional.pad(groups.codes_OI, (0, missing))
    factors_FOG = functional.pad(groups.factors_FOG, (0, missing // GROUP))
    if bits == HEAD_BITS:
        data_GOC = codes_OI.view(num_out, -1, GROUP).transpose(0, 1)
    else:
        low_OJC, high_OJC = codes_OI.view(torch.uint8).view(num_out, -1, 2, GROUP).unbind(2)
        data_GOC = (low_OJC | high_OJC << 4).transpose(0, 1)
    factors_FGO = factors_FOG.transpose(1, 2).half().contiguous()
    data_GOC = data_GOC.contiguous().to(device)
    return PackedLinear(num_out, num_in, data_GOC, scales=factors_FGO.to(device))


# pyright: basic, reportGeneralTypeIssues=false


IS_INTERPRETED: bool = knobs.runtime.interpret
INTERPRETED = tl.constexpr(IS_INTERPRETED)


def current_device() -> int:
    """The number of this thread's device. Starts Triton, which may raise any exception."""
    active: Any = driver.active
    return active.get_current_device()


def why_not() -> str | None:
    """The reason why Triton does not start; None if it does."""
    try:
        current_device()
    except Exception as error:  # noqa: BLE001 whatever its start raises is the reason
        return f"it does not start, which takes a C compiler and Python's headers ({error})"
    return None


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """`x`, float32, to the nearest of `dtype`, ties to even.

    Triton's interpreter cuts numbers off where a GPU rounds to the nearest bfloat16, ties to even,
    and has no dot product of bfloat16. In the interpreter only, rounding is done on the bits and
    products in float32, which is exact for products of bfloat16.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def dot(a, b, acc):
    """acc + a b in float32, of a and b of one dtype."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tf32(x):
    """The float32 `x` cut off to the 11 significant bits of TF32."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def dot_whole(a, b, acc):
    """acc + a b with all bits of the float32 `a`, on the matrix units unless b is float32: `a` is a
    sum of three numbers of bfloat16, or of TF32, which holds any float16. Each product is exact."""
    if b.dtype == tl.float16:
        b = b.to(tl.float32)
        high = tf32(a)
        middle = tf32(a - high)
        acc = tl.dot(a - high - middle, b, acc, input_precision="tf32")
        acc = tl.dot(middle, b, acc, input_precision="tf32")
        acc = tl.dot(high, b, acc, input_precision="tf32")
    elif INTERPRETED or b.dtype == tl.float32:
        acc = tl.dot(a, b.to(tl.float32), acc, input_precision="ieee")
    else:
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(low, b, acc)
        acc = tl.dot(middle, b, acc)
        acc = tl.dot(high, b, acc)
    return acc


@triton.jit
def fused(a, b, c):
    """a * b + c, of float32, rounded once. The interpreter would round the product."""
    if INTERPRETED:
        wide = a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)
        c = wide.to(tl.float32)
    else:
        c = tl.fma(a, b, c)
    return c


# Bytes of shared memory for the steps of a linear of floats: less than any device has. A program
# that has a multiprocessor for itself needs 26 kB of weights in flight: its share of the memory
# bandwidth times the latency of a load (on an H200, 33 GB/s and 0.8 microseconds).
MOST_SHARED = 80 << 10
# Rows of every tile: the fewest that the matrix units of a GPU take, so 1 row costs as much as 16.
ROWS = 16


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The shape of a linear's tile: `outputs` outputs, over the inputs in steps of `inputs`."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def linear_shape(num_out: int, dtype: torch.dtype) -> LinearShape:
    """The shape for a packed weight of `dtype`; uint8 has two codes of 4 bits in a byte."""
    outputs = 64 if num_out >= 16_384 else 32 if num_out >= 2_048 else 16
    if dtype == torch.float32:
        return LinearShape(outputs, 32, 4, 3)
    if not dtype.is_floating_point:
        return LinearShape(outputs, 256, 2 if outputs == 16 and dtype == torch.uint8 else 4, 4)
    # Rows may be float32. One step is multiplied while the others are loaded.
    step = 128 * (outputs * dtype.itemsize + ROWS * 4)
    return LinearShape(outputs, 128, 4, 1 + MOST_SHARED // step)


# A bound for kernels of few warps: without one, ptxas spills to run more programs at once.
MOST_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of an attention's tile. `shared` query heads read one key head. A tile holds
    `heads_of_a_tile` of them, a power of two, for several tokens; `head_tiles` tiles hold them all.
    `dims` is the padded head size, `keys` the number of keys in a step, `merged` the number of
    parts that are merged at once."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dims: int
    keys: int
    num_stages: int
    num_warps: int
    most_registers: int
    part: int = PART
    merged: int = 32

    @property
    def shared(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def heads_of_a_tile(self) -> int:
        return min(ROWS, power_of_two(self.shared))

    @property
    def head_tiles(self) -> int:
        return cdiv(self.shared, self.heads_of_a_tile)

    def options(self) -> dict[str, int]:
        """Warps, stages and registers of a launch."""
        bound = {"maxnreg": self.most_registers} if self.most_registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **bound}

    def merge_options(self) -> dict[str, int]:
        """Warps and registers of a merge, whose sums are short if heads are small."""
        return {"num_warps": 4} | ({"maxnreg": MOST_REGISTERS} if self.dims <= 64 else {})

    def tokens_of_a_tile(self, num_tokens: int, num_seqs: int) -> int:
        """The number of tokens in a tile: the average of a sequence, rounded down to a power of
        two, so that tokens of one sequence read its keys together. A token's bits do not depend on
        it."""
        average = max(1, num_tokens // max(1, num_seqs))
        return min(ROWS // self.heads_of_a_tile, 1 << (average.bit_length() - 1))


def attention_shape(
    *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> AttentionShape:
    """The shape of attention over an arena of `dtype`."""
    dims = max(16, power_of_two(head_dim))
    is_whole = dtype == torch.float32
    most_dims = 64 if dtype == torch.float16 else 128
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dims=dims,
        keys=16 if is_whole else 64 if dims <= most_dims else 32,
        num_stages=2 if is_whole else 3,
        num_warps=8 if is_whole else 4,
        most_registers={torch.float32: MOST_REGISTERS, torch.float16: 255}.get(dtype, 0),
    )


def delta_columns(value_dim: int) -> int:
    """Columns of a recurrent state in one warp: 8 of 128 numbers are 32 registers a thread."""
    return min(8, power_of_two(value_dim))


def num_warps(size: int) -> int:
    """Warps of a program that holds a row of `size` numbers."""
    return min(16, max(1, power_of_two(size) // 512))
