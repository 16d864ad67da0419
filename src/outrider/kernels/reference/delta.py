"""Recurrences of hybrids in PyTorch, token by token, and the plan of a pass over them.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024. For each value head, with its key head's
query q and key k of length 1 (q divided by sqrt(K) besides), a decay and a rate b per token:

    S <- decay S;   d = b (v - S^T k);   S <- S + k d^T;   o = S^T q.

q, k and v come from a causal depth-wise convolution over the joint channels, then SiLU.

Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024) is the rule without its correction, d = b v,
with k and q as they are, and o has a part D v that goes past the state. A convolution alone (LFM2)
is the layer without heads, and without SiLU: its state is its window. Every token
takes the same calls on tensors of the same shapes, so its bits do not depend on how a text was cut
into passes; a form that reads chunks at once would round differently.

Shapes:  L = recurrent layers, W = earlier rows that the convolution reads or J - 1, C = channels,
         G = key heads, H = value heads, K = key size, V = value size, N = packed tokens, n = tokens
         of a run, T = earlier rows and rows of a run, J = taps of the convolution, P = outputs
         of a layer's first product, O = H x V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.spec import StateShape


@dataclass(frozen=True, slots=True)
class StateCell:
    """States of recurrent layers after a token, float32; `conv_LWC` has inputs, oldest first."""

    conv_LWC: Tensor
    state_LHKV: Tensor

    # Cells outlive the pass that first needs them.
    @classmethod
    @torch.inference_mode(False)
    def zeros(cls, shape: StateShape, device: torch.device) -> StateCell:
        window = (shape.num_layers, shape.num_taps - 1, shape.num_channels)
        state = (shape.num_layers, shape.num_heads, shape.key_dim, shape.value_dim)
        return cls(torch.zeros(window, device=device), torch.zeros(state, device=device))


@dataclass(frozen=True, slots=True)
class InputCell:
    """The effect of one token on all recurrent states, float32: S becomes decay S + key change^T,
    and `conv_LC` are the token's inputs of the convolution."""

    conv_LC: Tensor
    key_LGK: Tensor
    change_LHV: Tensor
    decay_LH: Tensor

    @classmethod
    @torch.inference_mode(False)
    def zeros(cls, shape: StateShape, device: torch.device) -> InputCell:
        layers, heads = shape.num_layers, shape.num_heads
        return cls(
            torch.zeros(layers, shape.num_channels, device=device),
            torch.zeros(layers, shape.num_key_heads, shape.key_dim, device=device),
            torch.zeros(layers, heads, shape.value_dim, device=device),
            torch.zeros(layers, heads, device=device),
        )


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Packed tokens from `first` on, each the parent of the next.

    The state before them is that of cell `source` (None: nothing was read yet) after the inputs in
    the cells `replayed`; it is also stored in the cell `fold`, if any. Entry i of `states` is the
    cell for the state after token i, and entry i of `inputs` the cell for the token's effect; None
    stores nothing.

    A recurrence reads its sequence token by token, so a plan cuts a pass into runs of consecutive
    packed tokens. A run starts from a cell with the state after some token, and may store the state
    after any of its tokens in other cells. If whole states take too much memory, inputs are stored
    instead (a token changes the state by a product of two vectors), and a run may replay them.
    """

    first: int
    states: tuple[int | None, ...]
    inputs: tuple[int | None, ...]
    source: int | None = None
    replayed: tuple[int, ...] = ()
    fold: int | None = None

    @property
    def stop(self) -> int:
        return self.first + len(self.states)


# The value with which the published checkpoints were trained.
NORM_EPS = 1e-6
# Functions that map each number by itself.
_OF_ONE_NUMBER = (torch.sigmoid, functional.silu)


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of one layer, float32. `rate_H` is exp(A_log), `skip_H` the D of Mamba-2, whose
    channels are v, k and q, and whose rate b is the step itself: it has no gate of its own."""

    conv_JC: Tensor
    rate_H: Tensor
    dt_bias_H: Tensor
    num_key_heads: int
    key_dim: int
    conv_bias_C: Tensor | None = None
    skip_H: Tensor | None = None

    @property
    def num_heads(self) -> int:
        return self.rate_H.shape[0]

    @property
    def num_gates(self) -> int:
        """Number of the last columns of a layer's first product, which set rate and decay."""
        return self.num_heads * (2 if self.skip_H is None else 1)


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells that runs read and write, by number."""

    states: Sequence[StateCell]
    inputs: Sequence[InputCell]


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Inputs of the recurrence for packed tokens. Keys and queries are normed and scaled, but those
    of Mamba-2, for which the state is not subtracted (`corrects`)."""

    q_NGK: Tensor
    k_NGK: Tensor
    v_NHV: Tensor
    rate_NH: Tensor
    decay_NH: Tensor
    corrects: bool = True


def torch_delta(
    first_NP: Tensor,
    weights: DeltaWeights,
    runs: Sequence[TokenRun],
    cells: Cells,
    layer: int,
    out_NO: Tensor,
) -> None:
    """The operator `delta`: from a layer's first product to the input of its output norm.

    The convolution's channels are the first columns of `first_NP`, the gates of every value head
    the last: b and a, or the step of Mamba-2. Writes `out_NO` and, of recurrent layer `layer`, the
    cells that `runs` name. Without heads `out_NO` is the convolution.
    """
    mixed_NC = first_NP[:, : weights.conv_JC.shape[1]]
    conv_NC = torch.empty(mixed_NC.shape, device=mixed_NC.device) if weights.num_heads else out_NO
    convolve(mixed_NC, weights.conv_JC, runs, cells, layer, conv_NC)
    if weights.conv_bias_C is not None:
        conv_NC.add_(weights.conv_bias_C)
    if not weights.num_heads:
        return
    inputs = prepare(by_row(functional.silu, conv_NC), first_NP[:, -weights.num_gates :], weights)
    out_NHV = out_NO.view(out_NO.shape[0], weights.num_heads, -1)
    recur(inputs, runs, cells, layer, out_NHV)
    if weights.skip_H is not None:
        out_NHV.add_(inputs.v_NHV * weights.skip_H[:, None])


def convolve(
    mixed_NC: Tensor,
    conv_JC: Tensor,
    runs: Sequence[TokenRun],
    cells: Cells,
    layer: int,
    out_NC: Tensor,
) -> None:
    """The convolution, before bias and SiLU. Writes its part of the cells that `runs` name."""
    taps = conv_JC.shape[0]
    for run in runs:
        rows_TC = torch.cat([*_remembered(run, cells, layer, mixed_NC, taps - 1)])
        if run.fold is not None:
            cells.states[run.fold].conv_LWC[layer].copy_(rows_TC)
        rows_TC = torch.cat([rows_TC, mixed_NC[run.first : run.stop]])
        count = run.stop - run.first
        out_nC = out_NC[run.first : run.stop]
        torch.mul(rows_TC[:count], conv_JC[0], out=out_nC)
        for tap in range(1, taps):
            out_nC.add_(rows_TC[tap : tap + count] * conv_JC[tap])
        for token, (state, kept) in enumerate(zip(run.states, run.inputs, strict=True)):
            if state is not None:
                window_WC = rows_TC[token + 1 : token + taps]
                cells.states[state].conv_LWC[layer].copy_(window_WC)
            if kept is not None:
                cells.inputs[kept].conv_LC[layer].copy_(mixed_NC[run.first + token])


def _remembered(
    run: TokenRun, cells: Cells, layer: int, mixed_NC: Tensor, num_rows: int
) -> Sequence[Tensor]:
    """The last `num_rows` inputs before a run, oldest first, as parts to put together."""
    num_replayed = min(len(run.replayed), num_rows)
    replayed = run.replayed[len(run.replayed) - num_replayed :]
    if run.source is None:
        old_WC = mixed_NC.new_zeros(num_rows, mixed_NC.shape[1])
    else:
        old_WC = cells.states[run.source].conv_LWC[layer]
    return [old_WC[num_replayed:], *(cells.inputs[cell].conv_LC[layer][None] for cell in replayed)]


def prepare(mixed_NC: Tensor, gates_N2H: Tensor, weights: DeltaWeights) -> DeltaInputs:
    """Inputs of the recurrence, from the convolution after SiLU and the heads' gates."""
    num_rows, num_heads = mixed_NC.shape[0], weights.rate_H.shape[0]
    key_size = weights.num_key_heads * weights.key_dim
    if weights.skip_H is not None:
        return _scanned(mixed_NC, gates_N2H, weights)
    q_NO, k_NO, v_NO = torch.split(
        mixed_NC, [key_size, key_size, mixed_NC.shape[1] - 2 * key_size], dim=1
    )
    heads = (num_rows, weights.num_key_heads, weights.key_dim)
    b_NH, a_NH = torch.chunk(gates_N2H, 2, dim=1)
    return DeltaInputs(
        q_NGK=_unit(q_NO.reshape(heads)) / weights.key_dim**0.5,
        k_NGK=_unit(k_NO.reshape(heads)),
        v_NHV=v_NO.reshape(num_rows, num_heads, -1),
        rate_NH=by_row(torch.sigmoid, b_NH),
        decay_NH=by_row(
            lambda a_H: torch.exp(-weights.rate_H * functional.softplus(a_H + weights.dt_bias_H)),
            a_NH,
        ),
    )


def _scanned(mixed_NC: Tensor, steps_NH: Tensor, weights: DeltaWeights) -> DeltaInputs:
    num_rows, num_heads = steps_NH.shape
    key_size = weights.num_key_heads * weights.key_dim
    v_NO, k_NO, q_NO = torch.split(
        mixed_NC, [mixed_NC.shape[1] - 2 * key_size, key_size, key_size], dim=1
    )
    heads = (num_rows, weights.num_key_heads, weights.key_dim)
    rate_NH = by_row(lambda step_H: functional.softplus(step_H + weights.dt_bias_H), steps_NH)
    return DeltaInputs(
        q_NGK=q_NO.reshape(heads),
        k_NGK=k_NO.reshape(heads),
        v_NHV=v_NO.reshape(num_rows, num_heads, -1),
        rate_NH=rate_NH,
        decay_NH=by_row(lambda rate_H: torch.exp(-weights.rate_H * rate_H), rate_NH),
        corrects=False,
    )


def _unit(x_NGK: Tensor) -> Tensor:
    return x_NGK / ((x_NGK * x_NGK).sum(-1, keepdim=True) + NORM_EPS).sqrt_()


def by_row(function: Callable[[Tensor], Tensor], x_NF: Tensor) -> Tensor:
    """Apply `function` by one identical call for each row: on a CPU, exponentials differ in the
    last bit between the loops that PyTorch uses for the middle and for the end of a tensor."""
    if x_NF.device.type != "cpu" and function in _OF_ONE_NUMBER:
        return function(x_NF)
    return torch.stack([function(row_F) for row_F in x_NF.contiguous()])


def recur(
    inputs: DeltaInputs, runs: Sequence[TokenRun], cells: Cells, layer: int, out_NHV: Tensor
) -> None:
    """The recurrence. Writes its part of the cells that `runs` name."""
    shared = inputs.v_NHV.shape[1] // inputs.k_NGK.shape[1]
    q_NHK = inputs.q_NGK.repeat_interleave(shared, dim=1)
    k_NHK = inputs.k_NGK.repeat_interleave(shared, dim=1)
    for run in runs:
        state_HKV = _started(run, cells, layer, k_NHK, inputs.v_NHV)
        for token, (state, kept) in enumerate(zip(run.states, run.inputs, strict=True), run.first):
            k_HK, decay_H = k_NHK[token], inputs.decay_NH[token]
            state_HKV.mul_(decay_H[:, None, None])
            change_HV = inputs.v_NHV[token]
            if inputs.corrects:
                change_HV = change_HV - (state_HKV * k_HK[:, :, None]).sum(1)
            change_HV = inputs.rate_NH[token][:, None] * change_HV
            state_HKV.add_(k_HK[:, :, None] * change_HV[:, None])
            out_NHV[token] = (state_HKV * q_NHK[token][:, :, None]).sum(1)
            if state is not None:
                cells.states[state].state_LHKV[layer].copy_(state_HKV)
            if kept is not None:
                cell = cells.inputs[kept]
                cell.key_LGK[layer].copy_(inputs.k_NGK[token])
                cell.change_LHV[layer].copy_(change_HV)
                cell.decay_LH[layer].copy_(decay_H)


def _started(run: TokenRun, cells: Cells, layer: int, k_NHK: Tensor, v_NHV: Tensor) -> Tensor:
    """The state before the first token of a run, in memory of its own."""
    if run.source is None:
        state_HKV = v_NHV.new_zeros(*k_NHK.shape[1:], v_NHV.shape[2])
    else:
        state_HKV = cells.states[run.source].state_LHKV[layer].clone()
    for number in run.replayed:
        replay(state_HKV, cells.inputs[number], layer)
    if run.fold is not None:
        cells.states[run.fold].state_LHKV[layer].copy_(state_HKV)
    return state_HKV


def replay(state_HKV: Tensor, cell: InputCell, layer: int) -> None:
    """Apply a stored token's effect to `state_HKV`, in place: the same bits, without its query."""
    key_GK, change_HV = cell.key_LGK[layer], cell.change_LHV[layer]
    key_HK = key_GK.repeat_interleave(change_HV.shape[0] // key_GK.shape[0], dim=0)
    state_HKV.mul_(cell.decay_LH[layer][:, None, None])
    state_HKV.add_(key_HK[:, :, None] * change_HV[:, None])
