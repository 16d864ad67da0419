"""Work before the first request: kernels are compiled, and a trial checks that rows are invariant.

The kernels are written to be row-invariant, but a compiler may arrange sums in any way. So
`Kernels.exact` is the result of a short trial of every binary that the model has for linears, of
attention with its heads and of its gated delta rule: each row alone against the same rows together.

Shapes:  N = rows, I = inputs, O = outputs, E = packed heads, G = key/value heads, S = slots,
         D = head size, P = outputs of a recurrent layer's first product.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from time import monotonic

import torch
from torch import Tensor

from outrider.core.errors import progress
from outrider.core.spec import DecoderConfig, StateShape
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.kernels.reference.delta import Cells, DeltaWeights, InputCell, StateCell, TokenRun
from outrider.plugins.gpu.kernels.delta_ops import TritonDelta
from outrider.plugins.gpu.kernels.eager import EagerProbs
from outrider.plugins.gpu.kernels.ops import TritonOps
from outrider.plugins.gpu.kernels.tiles import IS_INTERPRETED, Launch, current_device, noted

# More than two tiles of rows, the last of them not full.
_ROWS = 37
_PAGE, _COMMITTED = 16, 290
# Kernels that are compiled at once, each with an assembler in a process of its own.
_COMPILERS = min(8, os.cpu_count() or 1)
_PATIENCE_SECONDS = 2.0


def compile_launches(device: torch.device, work: Callable[[], object]) -> None:
    """Compile the kernels that `work` launches, several at a time; `work` is called, but launches
    nothing. The log reports progress. A kernel that does not compile fails at its first launch."""
    launches, began, said = noted(work), monotonic(), 0.0
    if IS_INTERPRETED or not launches:
        return
    with torch.cuda.device(device if device.type == "cuda" else -1):
        number = current_device()
        for one in launches:
            # A kernel's first use makes a table of its binaries; two threads would each make one.
            one.kernel.device_caches[number]
    pool = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="compiler")
    try:
        waited = as_completed([pool.submit(_compile, one, device) for one in launches])
        for count, _ in enumerate(waited, 1):
            seconds = monotonic() - began
            if seconds - said > _PATIENCE_SECONDS:
                said = seconds
                progress.info("Compiled %d of %d kernels in %.0f s.", count, len(launches), seconds)
    finally:
        # After an interrupt, kernels that are being compiled are finished and no others begun.
        pool.shutdown(cancel_futures=True)


def compile_ahead(
    device: torch.device, distributions: EagerProbs, work: Callable[[], object], size: int
) -> None:
    """Compile the kernels that `work` launches, and those of sampling from `size` tokens."""
    compile_launches(device, lambda: (work(), distributions.rehearse(size)))


def _compile(one: Launch, device: torch.device) -> None:
    with torch.cuda.device(device if device.type == "cuda" else -1):
        constants = one.constants | {"enable_fp_fusion": False}
        made = one.kernel.warmup(*one.arguments, grid=one.grid, **constants)
        # The launcher, and the device's copy of the binary, are made at the first access.
        getattr(made, "run", None)


def rows_alike(
    ops: TritonOps,
    delta: TritonDelta,
    device: torch.device,
    dtype: torch.dtype,
    config: DecoderConfig,
    state: StateShape | None,
) -> bool:
    """Run the trial of the weights that `ops` packed, of attention with heads of `config` over keys
    of `dtype`, and of recurrent layers of shape `state`. True if rows are invariant. Waits for the
    device."""

    layer = None if state is None else replace(state, num_layers=1)

    def alike() -> bool:
        linears = [_linear_alike(ops, packed, device) for packed in ops.forms.values()]
        attention = _attention_alike(ops, config, device, dtype)
        return all(linears) and attention and (layer is None or delta_alike(delta, device, layer))

    compile_launches(device, alike)
    return alike()


def _linear_alike(ops: TritonOps, packed: PackedLinear, device: torch.device) -> bool:
    out_NO, alone_NO = torch.zeros(2, _ROWS, packed.num_out, device=device)
    read = {torch.float32, torch.float32 if packed.scales is not None else packed.data.dtype}
    for accumulate, dtype in product((False, True), read):
        x_NI = _waves((_ROWS, packed.num_in), device, dtype)
        ops.linear(x_NI, packed, out_NO, accumulate)
        for row in range(_ROWS):
            at = slice(row, row + 1)
            ops.linear(x_NI[at], packed, alone_NO[at], accumulate)
    return torch.equal(out_NO, alone_NO)


def _attention_alike(
    ops: TritonOps, config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> bool:
    """True if attention is row-invariant: on a chain of new tokens after a context of more than one
    part, and on the same chain with its keys listed one by one, as a tree's are."""
    pages = -(-(_COMMITTED + _ROWS) // _PAGE)
    shape = (config.num_kv_heads, pages * _PAGE, config.head_dim)
    k_GSD, v_GSD = _waves(shape, device, dtype), _waves(shape, device, dtype).flip(1)
    qkv_NE = _waves((_ROWS, config.qkv_size), device, torch.float32)
    size = config.num_heads * config.head_dim
    whole_NO, listed_NO, alone_NO = torch.zeros(3, _ROWS, size, device=device)
    chain, tree = _plan(0, _ROWS, pages, device), _listed(_ROWS, pages, device)
    ops.attention(qkv_NE, k_GSD, v_GSD, chain, 0.125, whole_NO)
    ops.attention(qkv_NE, k_GSD, v_GSD, tree, 0.125, listed_NO)
    for row in range(_ROWS):
        plan, at = _plan(row, 1, pages, device), slice(row, row + 1)
        ops.attention(qkv_NE[at], k_GSD, v_GSD, plan, 0.125, alone_NO[at])
    return torch.equal(whole_NO, alone_NO) and torch.equal(listed_NO, alone_NO)


def delta_alike(
    delta: TritonDelta, device: torch.device, shape: StateShape, num_rows: int = _ROWS
) -> bool:
    """True if a text read at once has the bits of the same text read row by row: all rows but the
    last from state to state, the last from the first state and the inputs of all rows in between.
    """
    cells = Cells(
        [StateCell.zeros(shape, device) for _ in range(num_rows + 1)],
        [InputCell.zeros(shape, device) for _ in range(num_rows)],
    )
    heads, channels = shape.num_heads, shape.num_channels
    conv_JC = _waves((shape.num_taps, channels), device, torch.float32)
    gates_2H = _waves((2, heads), device, torch.float32)
    weights = DeltaWeights(
        conv_JC, gates_2H[0].abs(), gates_2H[1], shape.num_key_heads, shape.key_dim
    )
    first_NP = _waves((num_rows, channels + 2 * heads), device, torch.float32)
    out_NO, alone_NO = torch.zeros(2, num_rows, heads * shape.value_dim, device=device)
    nothing = (None,) * num_rows
    delta(first_NP, weights, (TokenRun(0, nothing, nothing),), cells, 0, out_NO)
    for row in range(num_rows - 1):
        source = None if row == 0 else row - 1
        run = TokenRun(0, (row,), (row,), source)
        delta(first_NP[row : row + 1], weights, (run,), cells, 0, alone_NO[row : row + 1])
    last = TokenRun(0, (None,), (None,), 0, tuple(range(1, num_rows - 1)), num_rows)
    delta(first_NP[-1:], weights, (last,), cells, 0, alone_NO[-1:])
    folded_LHKV, stepped_LHKV = (cells.states[n].state_LHKV for n in (num_rows, num_rows - 2))
    return torch.equal(out_NO, alone_NO) and torch.equal(folded_LHKV, stepped_LHKV)


def _plan(first: int, count: int, pages: int, device: torch.device) -> PackedPlan:
    """A plan for a chain; its pages are in reverse order."""
    position_N = torch.arange(first, first + count, dtype=torch.int32, device=device) + _COMMITTED
    nothing_N = torch.zeros_like(position_N)
    pages_BP = torch.arange(pages, dtype=torch.int32, device=device)[None].flip(1).contiguous()
    return PackedPlan(_PAGE, nothing_N, position_N, nothing_N, nothing_N, position_N + 1, pages_BP)


def _listed(count: int, pages: int, device: torch.device) -> PackedPlan:
    """A plan for a chain whose new keys are listed by their slots."""
    slots = [
        (pages - 1 - position // _PAGE) * _PAGE + position % _PAGE
        for position in range(_COMMITTED, _COMMITTED + count)
    ]
    listed = [slot for row in range(count) for slot in slots[: row + 1]]
    ends = [row * (row + 1) // 2 for row in range(count + 1)]
    plan = _plan(0, count, pages, device)
    return replace(
        plan,
        visible_N=torch.full_like(plan.visible_N, _COMMITTED),
        extra_offsets_N1=torch.tensor(ends, dtype=torch.int32, device=device),
        extra_slots_E=torch.tensor(listed, dtype=torch.int32, device=device),
    )


def _waves(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers of every size up to 1, the same each time and without a random generator."""
    index_N = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device=device)
    return (index_N * 0.7390851).sin_().view(shape).to(dtype)
