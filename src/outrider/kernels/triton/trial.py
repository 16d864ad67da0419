"""Trial of row-invariance on this device: are rows computed alike? Run when a model is loaded.

The kernels are written to be row-invariant, but a compiler lays out sums as it likes. So
`Kernels.exact` is the result of a short trial of every binary that the model has for linears, of
attention with its heads and of its gated delta rule: every row alone against the same rows
together.

Shapes:  N = rows, I = inputs, O = outputs, E = packed heads, G = key/value heads, S = slots,
         D = head size, P = outputs of a recurrent layer's first product.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from outrider.core.spec import DecoderConfig
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.kernels.reference.delta import Cells, DeltaWeights, StateShape, TokenRun
from outrider.kernels.triton.delta_ops import TritonDelta
from outrider.kernels.triton.ops import TritonOps

# More than two tiles of rows, the last of them not full.
_ROWS = 37
_PAGE, _COMMITTED = 16, 290


def rows_alike(
    ops: TritonOps,
    delta: TritonDelta,
    device: torch.device,
    dtype: torch.dtype,
    config: DecoderConfig,
    state: StateShape | None,
) -> bool:
    """The trial of the weights that `ops` packed, of attention with heads of `config` over keys of
    `dtype`, and of recurrent layers of shape `state`. Waits for the device."""

    if not all(_linear_alike(ops, packed, device) for packed in ops.forms.values()):
        return False
    layer = None if state is None else replace(state, num_layers=1)
    attention = _attention_alike(ops, config, device, dtype)
    return attention and (layer is None or delta_alike(delta, device, layer))


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
    """A chain of new tokens behind a context of more than one part, and the same named key by key,
    as a tree's would be."""
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
    """A text that is read at once, and the same row by row: all but the last from state to state,
    the last from the first state and the inputs of all that came between."""
    cells = Cells(
        [shape.state_cell(device) for _ in range(num_rows + 1)],
        [shape.input_cell(device) for _ in range(num_rows)],
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
    """The pages lie in reverse order."""
    position_N = torch.arange(first, first + count, dtype=torch.int32, device=device) + _COMMITTED
    nothing_N = torch.zeros_like(position_N)
    pages_BP = torch.arange(pages, dtype=torch.int32, device=device)[None].flip(1).contiguous()
    return PackedPlan(_PAGE, nothing_N, position_N, nothing_N, nothing_N, position_N + 1, pages_BP)


def _listed(count: int, pages: int, device: torch.device) -> PackedPlan:
    """A chain whose new keys are named by their slots."""
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
    """Numbers of every size up to 1, the same each time and drawn from nothing."""
    place = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device=device)
    return (place * 0.7390851).sin_().view(shape).to(dtype)
