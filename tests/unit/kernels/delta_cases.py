"""Small recurrences, their formulas in float64, and calls of whatever computes them.

Shapes:  N = tokens, C = channels, J = taps, G = key heads, H = value heads, K = key size, V = value
         size, P = outputs of the first product, O = H x V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.spec import StateShape
from outrider.kernels.operators import Delta
from outrider.kernels.reference.delta import Cells, DeltaWeights, InputCell, StateCell, TokenRun

SHAPE = StateShape(
    num_layers=2,
    num_taps=4,
    num_channels=2 * 2 * 5 + 6 * 7,
    num_key_heads=2,
    num_heads=6,
    key_dim=5,
    value_dim=7,
)
# Two blocks of columns of a Triton program, few heads: its interpreter is slow.
SMALL = StateShape(
    num_layers=2,
    num_taps=4,
    num_channels=2 * 3 + 2 * 10,
    num_key_heads=1,
    num_heads=2,
    key_dim=3,
    value_dim=10,
)
# As published models have it, but for fewer heads.
WIDE = StateShape(
    num_layers=2,
    num_taps=4,
    num_channels=2 * 2 * 128 + 4 * 128,
    num_key_heads=2,
    num_heads=4,
    key_dim=128,
    value_dim=128,
)
# Mamba-2 with more heads than groups, and a convolution alone.
SCAN = StateShape(
    num_layers=2,
    num_taps=3,
    num_channels=2 * 2 * 5 + 6 * 7,
    num_key_heads=2,
    num_heads=6,
    key_dim=5,
    value_dim=7,
)
CONVOLUTION = StateShape(
    num_layers=2,
    num_taps=3,
    num_channels=150,
    num_key_heads=0,
    num_heads=0,
    key_dim=0,
    value_dim=0,
)
LAYER = 1
HOST = torch.device("cpu")
NUM_TOKENS = 9


@dataclass(frozen=True, slots=True)
class Text:
    mixed_NC: Tensor
    gates_N2H: Tensor
    weights: DeltaWeights
    shape: StateShape

    def part(self, start: int, stop: int) -> Text:
        return self.rows(range(start, stop))

    def rows(self, numbers: Sequence[int]) -> Text:
        some = list(numbers)
        return Text(self.mixed_NC[some], self.gates_N2H[some], self.weights, self.shape)


def some_text(num_tokens: int = NUM_TOKENS, shape: StateShape = SHAPE, seed: int = 3) -> Text:
    rng = torch.Generator().manual_seed(seed)
    mixed_NC = torch.randn(num_tokens, shape.num_channels, generator=rng)
    gates_N2H = torch.randn(num_tokens, 2 * shape.num_heads, generator=rng)
    weights = DeltaWeights(
        conv_JC=torch.randn(shape.num_taps, shape.num_channels, generator=rng),
        rate_H=torch.rand(shape.num_heads, generator=rng),
        dt_bias_H=torch.randn(shape.num_heads, generator=rng),
        num_key_heads=shape.num_key_heads,
        key_dim=shape.key_dim,
    )
    return Text(mixed_NC, gates_N2H, weights, shape)


def some_cells(shape: StateShape = SHAPE, count: int = 12) -> Cells:
    return Cells(
        [StateCell.zeros(shape, HOST) for _ in range(count)],
        [InputCell.zeros(shape, HOST) for _ in range(count)],
    )


def nothing(count: int) -> tuple[None, ...]:
    return (None,) * count


def scanned_text(shape: StateShape = SCAN, seed: int = 3) -> Text:
    """A text for Mamba-2, or for a convolution, with biases."""
    plain = some_text(shape=shape, seed=seed)
    rng = torch.Generator().manual_seed(seed + 1)
    bias_C = torch.randn(shape.num_channels, generator=rng)
    skip_H = torch.randn(shape.num_heads, generator=rng) if shape.num_heads else None
    weights = replace(plain.weights, conv_bias_C=bias_C, skip_H=skip_H)
    return Text(plain.mixed_NC, plain.gates_N2H[:, : shape.num_heads], weights, shape)


def layer_of(delta: Delta, text: Text, runs: Sequence[TokenRun], cells: Cells) -> Tensor:
    """out_NHV of what a layer does between its first product and its output norm."""
    first_NP = torch.cat([text.mixed_NC, text.gates_N2H], dim=1)
    shape = text.shape
    heads = (shape.num_heads, shape.value_dim) if shape.num_heads else (1, shape.num_channels)
    out_NO = torch.empty(len(first_NP), heads[0] * heads[1])
    delta(first_NP, text.weights, tuple(runs), cells, LAYER, out_NO)
    return out_NO.view(len(first_NP), *heads)


def whole_layer(delta: Delta, text: Text) -> Tensor:
    """The same of a text that is read at once."""
    count = len(text.mixed_NC)
    runs = [TokenRun(0, nothing(count), nothing(count))]
    return layer_of(delta, text, runs, some_cells(text.shape))


def formula(text: Text) -> Tensor:
    """The same in float64, head by head, as algorithms are written down."""
    shape = text.shape
    x_NC, gates_N2H, weights = text.mixed_NC.double(), text.gates_N2H.double(), text.weights
    padded_TC = functional.pad(x_NC, (0, 0, shape.num_taps - 1, 0))
    taps_JC = weights.conv_JC.double()
    conv_NC = sum(taps_JC[j] * padded_TC[j : j + len(x_NC)] for j in range(shape.num_taps))
    conv_NC = torch.as_tensor(conv_NC)
    if weights.conv_bias_C is not None:
        conv_NC = conv_NC + weights.conv_bias_C.double()
    if not shape.num_heads:
        return conv_NC[:, None]
    y_NC = functional.silu(conv_NC)
    if weights.skip_H is not None:
        return _scan(text, y_NC, weights.skip_H.double())
    size = shape.num_key_heads * shape.key_dim
    q_NGK, k_NGK = (
        y_NC[:, part * size : (part + 1) * size].view(len(x_NC), -1, shape.key_dim)
        for part in (0, 1)
    )
    v_NHV = y_NC[:, 2 * size :].view(len(x_NC), -1, shape.value_dim)
    b_NH, a_NH = torch.chunk(gates_N2H, 2, dim=1)
    shared = shape.num_heads // shape.num_key_heads
    out_NHV = torch.zeros_like(v_NHV)
    for head in range(shape.num_heads):
        state_KV = torch.zeros(shape.key_dim, shape.value_dim, dtype=torch.float64)
        for n in range(len(x_NC)):
            q_K, k_K = (x[n, head // shared] for x in (q_NGK, k_NGK))
            q_K = q_K / (q_K @ q_K + 1e-6).sqrt() / shape.key_dim**0.5
            k_K = k_K / (k_K @ k_K + 1e-6).sqrt()
            rate = weights.rate_H[head].double()
            step = functional.softplus(a_NH[n, head] + weights.dt_bias_H[head].double())
            state_KV = torch.exp(-rate * step) * state_KV
            change_V = torch.sigmoid(b_NH[n, head]) * (v_NHV[n, head] - k_K @ state_KV)
            state_KV = state_KV + torch.outer(k_K, change_V)
            out_NHV[n, head] = q_K @ state_KV
    return out_NHV


def _scan(text: Text, y_NC: Tensor, skip_H: Tensor) -> Tensor:
    """Mamba-2: S <- exp(-a dt) S + dt B x^T and o = S^T C + D x, per head."""
    shape, weights = text.shape, text.weights
    size = shape.num_key_heads * shape.key_dim
    x_NO, b_NO, c_NO = torch.split(y_NC, [y_NC.shape[1] - 2 * size, size, size], dim=1)
    x_NHV = x_NO.view(len(y_NC), shape.num_heads, shape.value_dim)
    b_NGK, c_NGK = (part.view(len(y_NC), -1, shape.key_dim) for part in (b_NO, c_NO))
    out_NHV = torch.zeros_like(x_NHV)
    for head in range(shape.num_heads):
        group = head // (shape.num_heads // shape.num_key_heads)
        state_KV = torch.zeros(shape.key_dim, shape.value_dim, dtype=torch.float64)
        for n in range(len(y_NC)):
            step = functional.softplus(
                text.gates_N2H[n, head].double() + weights.dt_bias_H[head].double()
            )
            decay = torch.exp(-weights.rate_H[head].double() * step)
            state_KV = decay * state_KV + step * torch.outer(b_NGK[n, group], x_NHV[n, head])
            out_NHV[n, head] = c_NGK[n, group] @ state_KV + skip_H[head] * x_NHV[n, head]
    return out_NHV


def assert_cells_close(ours: Cells, theirs: Cells) -> None:
    """What both left in cells, as far as two orders of sums agree."""
    for mine, other in zip(ours.states, theirs.states, strict=True):
        torch.testing.assert_close(mine.conv_LWC, other.conv_LWC)
        torch.testing.assert_close(mine.state_LHKV, other.state_LHKV, rtol=1e-4, atol=1e-5)
    for mine, other in zip(ours.inputs, theirs.inputs, strict=True):
        torch.testing.assert_close(mine.conv_LC, other.conv_LC)
        torch.testing.assert_close(mine.key_LGK, other.key_LGK, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.change_LHV, other.change_LHV, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.decay_LH, other.decay_LH)
