"""The gated delta rule against its formula in float64, and what its runs keep.

Shapes:  N = tokens, C = channels, J = taps, G = key heads, H = value heads, K = key size, V = value
         size.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.delta.plan import Run, StateShape
from outrider.kernels.delta.torch import Cells, DeltaWeights, torch_delta
from outrider.kernels.registry import Delta, choose

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


@dataclass(frozen=True, slots=True)
class Text:
    mixed_NC: Tensor
    gates_N2H: Tensor
    weights: DeltaWeights

    def part(self, start: int, stop: int) -> Text:
        return Text(self.mixed_NC[start:stop], self.gates_N2H[start:stop], self.weights)


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


def _layer(delta: Delta, text: Text, runs: list[Run], cells: Cells) -> Tensor:
    """out_NHV of what a layer does between its first product and its output norm."""
    first_NP = torch.cat([text.mixed_NC, text.gates_N2H], dim=1)
    out_NO = torch.empty(len(first_NP), SHAPE.num_heads * SHAPE.value_dim)
    delta(first_NP, text.weights, tuple(runs), cells, LAYER, out_NO)
    return out_NO.view(len(first_NP), SHAPE.num_heads, SHAPE.value_dim)


def _formula(text: Text) -> Tensor:
    """The same in float64, head by head, as algorithms are written down."""
    x_NC, gates_N2H, weights = text.mixed_NC.double(), text.gates_N2H.double(), text.weights
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
def text() -> Text:
    rng = torch.Generator().manual_seed(3)
    mixed_NC = torch.randn(9, SHAPE.num_channels, generator=rng)
    return Text(mixed_NC, torch.randn(9, 2 * SHAPE.num_heads, generator=rng), _weights(rng))


@pytest.fixture(params=["reference", "native"])
def delta(request: pytest.FixtureRequest) -> Delta:
    if request.param == "reference":
        return torch_delta
    kernels = choose(device=HOST, dtype=torch.float32)
    if next(choice for choice in kernels.choices if choice.op == "delta").name != "native":
        pytest.skip("no compiler")
    return kernels.delta


def _nothing(count: int) -> tuple[None, ...]:
    return (None,) * count


def _whole(delta: Delta, text: Text) -> Tensor:
    return _layer(delta, text, [Run(0, _nothing(9), _nothing(9))], _cells())


def test_it_is_the_formula(delta: Delta, text: Text) -> None:
    assert float((_whole(delta, text) - _formula(text)).abs().max()) < 1e-5


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_text_cut_in_two_has_the_same_bits(delta: Delta, cut: int, text: Text) -> None:
    cells = _cells()
    _layer(delta, text.part(0, cut), [Run(0, (*_nothing(cut - 1), 4), _nothing(cut))], cells)
    rest = Run(0, _nothing(9 - cut), _nothing(9 - cut), source=4)
    got_NHV = _layer(delta, text.part(cut, 9), [rest], cells)
    assert torch.equal(got_NHV, _whole(delta, text)[cut:])


@pytest.mark.parametrize("kept", range(7))
def test_replaying_inputs_gives_the_bits_of_the_state(delta: Delta, kept: int, text: Text) -> None:
    """Of 2 tokens with a state and 6 with inputs, go on after any of them, and fold on the way."""
    cells = _cells()
    states = (None, 0, *range(1, 7))
    _layer(delta, text.part(0, 8), [Run(0, states, (None, None, *range(6)))], cells)
    replayed = tuple(range(kept))
    more = Run(0, (None,), (None,), source=0, replayed=replayed, fold=9)
    got_NHV = _layer(delta, text.part(8, 9), [more], cells)
    directly = Run(0, (None,), (None,), source=kept)
    wanted_NHV = _layer(delta, text.part(8, 9), [directly], cells)
    assert torch.equal(got_NHV, wanted_NHV)
    folded, known = cells.states[9], cells.states[kept]
    assert torch.equal(folded.state_LHKV[LAYER], known.state_LHKV[LAYER])
    assert torch.equal(folded.conv_LWC[LAYER], known.conv_LWC[LAYER])


def test_siblings_start_where_their_parent_ended(delta: Delta, text: Text) -> None:
    """In one pass: a run reads what the run before it wrote."""
    cells = _cells()
    states: tuple[int | None, ...] = (None, 3, None, None)
    runs = [
        Run(0, states, _nothing(4)),
        Run(4, _nothing(5), _nothing(5), source=3),
    ]
    got_NHV = _layer(delta, text, runs, cells)
    other = Text(
        torch.cat([text.mixed_NC[:2], text.mixed_NC[4:]]),
        torch.cat([text.gates_N2H[:2], text.gates_N2H[4:]]),
        text.weights,
    )
    alone_NHV = _layer(delta, other, [Run(0, _nothing(7), _nothing(7))], _cells())
    assert torch.equal(got_NHV[4:], alone_NHV[2:])
    assert torch.equal(got_NHV[:4], _whole(delta, text)[:4])


def test_only_cells_that_runs_name_are_written(delta: Delta, text: Text) -> None:
    cells = _cells()
    _layer(delta, text, [Run(0, (*_nothing(8), 2), (*_nothing(8), 3))], cells)
    written = [n for n, cell in enumerate(cells.states) if cell.state_LHKV.any()]
    noted = [n for n, cell in enumerate(cells.inputs) if cell.key_LGK.any()]
    assert (written, noted) == ([2], [3])
    assert not cells.states[2].state_LHKV[1 - LAYER].any()


def test_native_cells_are_those_of_the_reference(text: Text) -> None:
    kernels = choose(device=HOST, dtype=torch.float32)
    ours, theirs = _cells(), _cells()
    run = Run(0, (*range(8), None), (*range(9),))
    _layer(torch_delta, text, [run], ours)
    _layer(kernels.delta, text, [run], theirs)
    for mine, other in zip(ours.states, theirs.states, strict=True):
        torch.testing.assert_close(mine.conv_LWC, other.conv_LWC)
        torch.testing.assert_close(mine.state_LHKV, other.state_LHKV, rtol=1e-4, atol=1e-5)
    for mine, other in zip(ours.inputs, theirs.inputs, strict=True):
        torch.testing.assert_close(mine.conv_LC, other.conv_LC)
        torch.testing.assert_close(mine.key_LGK, other.key_LGK, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.change_LHV, other.change_LHV, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.decay_LH, other.decay_LH)


def test_sizes_are_those_of_the_cells() -> None:
    state, inputs = SHAPE.state_cell(HOST), SHAPE.input_cell(HOST)
    assert state.conv_LWC.nbytes + state.state_LHKV.nbytes == SHAPE.state_bytes
    parts = (inputs.conv_LC, inputs.key_LGK, inputs.change_LHV, inputs.decay_LH)
    assert sum(part.nbytes for part in parts) == SHAPE.input_bytes
