"""The gated delta rule against its formula in float64, and what its runs keep.

Shapes:  N = tokens, C = channels, J = taps, G = key heads, H = value heads, K = key size, V = value
         size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.delta.plan import Run, StateShape
from outrider.kernels.delta.torch import (
    Cells,
    DeltaWeights,
    by_row,
    convolve,
    prepare,
    recur,
)

SHAPE = StateShape(
    num_layers=2,
    num_taps=4,
    num_channels=2 * 2 * 5 + 6 * 7,
    num_key_heads=2,
    num_heads=6,
    key_dim=5,
    value_dim=7,
)
LAYER = 1
HOST = torch.device("cpu")


def _weights(rng: torch.Generator) -> DeltaWeights:
    return DeltaWeights(
        conv_JC=torch.randn(SHAPE.num_taps, SHAPE.num_channels, generator=rng),
        rate_H=torch.rand(SHAPE.num_heads, generator=rng),
        dt_bias_H=torch.randn(SHAPE.num_heads, generator=rng),
        num_key_heads=SHAPE.num_key_heads,
        key_dim=SHAPE.key_dim,
    )


def _cells(count: int = 12) -> Cells:
    return Cells(
        [SHAPE.state_cell(HOST) for _ in range(count)],
        [SHAPE.input_cell(HOST) for _ in range(count)],
    )


def _layer(
    mixed_NC: Tensor, gates_N2H: Tensor, weights: DeltaWeights, runs: list[Run], cells: Cells
) -> Tensor:
    """out_NHV of what the model does between its first and its last product."""
    conv_NC = torch.empty_like(mixed_NC)
    convolve(mixed_NC, weights.conv_JC, runs, cells, LAYER, conv_NC)
    inputs = prepare(by_row(functional.silu, conv_NC), gates_N2H, weights)
    out_NHV = torch.empty(mixed_NC.shape[0], SHAPE.num_heads, SHAPE.value_dim)
    recur(inputs, runs, cells, LAYER, out_NHV)
    return out_NHV


def _formula(mixed_NC: Tensor, gates_N2H: Tensor, weights: DeltaWeights) -> Tensor:
    """The same in float64, head by head, as algorithms are written down."""
    x_NC, gates_N2H = mixed_NC.double(), gates_N2H.double()
    padded_TC = functional.pad(x_NC, (0, 0, SHAPE.num_taps - 1, 0))
    taps_JC = weights.conv_JC.double()
    conv_NC = sum(taps_JC[j] * padded_TC[j : j + len(x_NC)] for j in range(SHAPE.num_taps))
    y_NC = functional.silu(torch.as_tensor(conv_NC))
    size = SHAPE.num_key_heads * SHAPE.key_dim
    q_NGK, k_NGK = (
        y_NC[:, part * size : (part + 1) * size].view(len(x_NC), -1, SHAPE.key_dim)
        for part in (0, 1)
    )
    v_NHV = y_NC[:, 2 * size :].view(len(x_NC), -1, SHAPE.value_dim)
    b_NH, a_NH = torch.chunk(gates_N2H, 2, dim=1)
    shared = SHAPE.num_heads // SHAPE.num_key_heads
    out_NHV = torch.zeros_like(v_NHV)
    for head in range(SHAPE.num_heads):
        state_KV = torch.zeros(SHAPE.key_dim, SHAPE.value_dim, dtype=torch.float64)
        for n in range(len(x_NC)):
            q_K, k_K = (x[n, head // shared] for x in (q_NGK, k_NGK))
            q_K = q_K / (q_K @ q_K + 1e-6).sqrt() / SHAPE.key_dim**0.5
            k_K = k_K / (k_K @ k_K + 1e-6).sqrt()
            rate = weights.rate_H[head].double()
            step = functional.softplus(a_NH[n, head] + weights.dt_bias_H[head].double())
            state_KV = torch.exp(-rate * step) * state_KV
            change_V = torch.sigmoid(b_NH[n, head]) * (v_NHV[n, head] - k_K @ state_KV)
            state_KV = state_KV + torch.outer(k_K, change_V)
            out_NHV[n, head] = q_K @ state_KV
    return out_NHV


@pytest.fixture
def text() -> tuple[Tensor, Tensor, DeltaWeights]:
    rng = torch.Generator().manual_seed(3)
    mixed_NC = torch.randn(9, SHAPE.num_channels, generator=rng)
    return mixed_NC, torch.randn(9, 2 * SHAPE.num_heads, generator=rng), _weights(rng)


def _nothing(count: int) -> tuple[None, ...]:
    return (None,) * count


def test_it_is_the_formula(text: tuple[Tensor, Tensor, DeltaWeights]) -> None:
    mixed_NC, gates_N2H, weights = text
    got_NHV = _layer(mixed_NC, gates_N2H, weights, [Run(0, _nothing(9), _nothing(9))], _cells())
    assert float((got_NHV - _formula(mixed_NC, gates_N2H, weights)).abs().max()) < 1e-5


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_text_cut_in_two_has_the_same_bits(
    cut: int, text: tuple[Tensor, Tensor, DeltaWeights]
) -> None:
    mixed_NC, gates_N2H, weights = text
    whole_NHV = _layer(mixed_NC, gates_N2H, weights, [Run(0, _nothing(9), _nothing(9))], _cells())
    cells = _cells()
    first = Run(0, (*_nothing(cut - 1), 4), _nothing(cut))
    _layer(mixed_NC[:cut], gates_N2H[:cut], weights, [first], cells)
    rest = Run(0, _nothing(9 - cut), _nothing(9 - cut), source=4)
    got_NHV = _layer(mixed_NC[cut:], gates_N2H[cut:], weights, [rest], cells)
    assert torch.equal(got_NHV, whole_NHV[cut:])


@pytest.mark.parametrize("kept", range(7))
def test_replaying_inputs_gives_the_bits_of_the_state(
    kept: int, text: tuple[Tensor, Tensor, DeltaWeights]
) -> None:
    """Of 2 tokens with a state and 6 with inputs, go on after any of them, and fold on the way."""
    mixed_NC, gates_N2H, weights = text
    cells = _cells()
    states = (None, 0, *range(1, 7))
    run = Run(0, states, (None, None, *range(6)))
    _layer(mixed_NC[:8], gates_N2H[:8], weights, [run], cells)
    replayed = tuple(range(min(kept, 6)))
    more = Run(0, (None,), (None,), source=0, replayed=replayed, fold=9)
    got_NHV = _layer(mixed_NC[8:], gates_N2H[8:], weights, [more], cells)
    directly = Run(0, (None,), (None,), source=len(replayed))
    wanted_NHV = _layer(mixed_NC[8:], gates_N2H[8:], weights, [directly], cells)
    assert torch.equal(got_NHV, wanted_NHV)
    folded, known = cells.states[9], cells.states[len(replayed)]
    assert torch.equal(folded.state_LHKV[LAYER], known.state_LHKV[LAYER])
    assert torch.equal(folded.conv_LWC[LAYER], known.conv_LWC[LAYER])


def test_only_cells_that_runs_name_are_written(text: tuple[Tensor, Tensor, DeltaWeights]) -> None:
    mixed_NC, gates_N2H, weights = text
    cells = _cells()
    _layer(mixed_NC, gates_N2H, weights, [Run(0, (*_nothing(8), 2), (*_nothing(8), 3))], cells)
    written = [n for n, cell in enumerate(cells.states) if cell.state_LHKV.any()]
    noted = [n for n, cell in enumerate(cells.inputs) if cell.key_LGK.any()]
    assert (written, noted) == ([2], [3])
    assert not cells.states[2].state_LHKV[1 - LAYER].any()


def test_sizes_are_those_of_the_cells() -> None:
    state, inputs = SHAPE.state_cell(HOST), SHAPE.input_cell(HOST)
    assert state.conv_LWC.nbytes + state.state_LHKV.nbytes == SHAPE.state_bytes
    parts = (inputs.conv_LC, inputs.key_LGK, inputs.change_LHV, inputs.decay_LH)
    assert sum(part.nbytes for part in parts) == SHAPE.input_bytes
