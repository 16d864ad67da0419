"""Recurrences against their formulas in float64, and what their runs keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.kernels.operators import Delta
from outrider.kernels.reference.delta import InputCell, StateCell, TokenRun, torch_delta
from outrider.kernels.registry import choose
from unit.kernels.delta_cases import (
    CONVOLUTION,
    HOST,
    LAYER,
    SCAN,
    SHAPE,
    WIDE,
    Text,
    assert_cells_close,
    formula,
    layer_of,
    nothing,
    scanned_text,
    some_cells,
    some_text,
    whole_layer,
)


@pytest.fixture(params=["rule", "scan", "convolution"])
def text(request: pytest.FixtureRequest) -> Text:
    if request.param == "rule":
        return some_text()
    return scanned_text(SCAN if request.param == "scan" else CONVOLUTION)


@pytest.fixture(params=["reference", "native"])
def delta(request: pytest.FixtureRequest) -> Delta:
    if request.param == "reference":
        return torch_delta
    kernels = choose(device=HOST, dtype=torch.float32)
    if next(choice for choice in kernels.choices if choice.op == "delta").name != "native":
        pytest.skip("no compiler")
    return kernels.delta


def test_it_is_the_formula(delta: Delta, text: Text) -> None:
    assert float((whole_layer(delta, text) - formula(text)).abs().max()) < 1e-5


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_text_cut_in_two_has_the_same_bits(delta: Delta, cut: int, text: Text) -> None:
    cells = some_cells(text.shape)
    layer_of(delta, text.part(0, cut), [TokenRun(0, (*nothing(cut - 1), 4), nothing(cut))], cells)
    rest = TokenRun(0, nothing(9 - cut), nothing(9 - cut), source=4)
    got_NHV = layer_of(delta, text.part(cut, 9), [rest], cells)
    assert torch.equal(got_NHV, whole_layer(delta, text)[cut:])


@pytest.mark.parametrize("kept", range(7))
def test_replaying_inputs_gives_the_bits_of_the_state(delta: Delta, kept: int, text: Text) -> None:
    """Of 2 tokens with a state and 6 with inputs, go on after any of them, and fold on the way."""
    cells = some_cells(text.shape)
    states = (None, 0, *range(1, 7))
    layer_of(delta, text.part(0, 8), [TokenRun(0, states, (None, None, *range(6)))], cells)
    replayed = tuple(range(kept))
    more = TokenRun(0, (None,), (None,), source=0, replayed=replayed, fold=9)
    got_NHV = layer_of(delta, text.part(8, 9), [more], cells)
    directly = TokenRun(0, (None,), (None,), source=kept)
    wanted_NHV = layer_of(delta, text.part(8, 9), [directly], cells)
    assert torch.equal(got_NHV, wanted_NHV)
    folded, known = cells.states[9], cells.states[kept]
    assert torch.equal(folded.state_LHKV[LAYER], known.state_LHKV[LAYER])
    assert torch.equal(folded.conv_LWC[LAYER], known.conv_LWC[LAYER])


def test_siblings_start_where_their_parent_ended(delta: Delta, text: Text) -> None:
    """In one pass: a run reads what the run before it wrote."""
    cells = some_cells(text.shape)
    states: tuple[int | None, ...] = (None, 3, None, None)
    runs = [
        TokenRun(0, states, nothing(4)),
        TokenRun(4, nothing(5), nothing(5), source=3),
    ]
    got_NHV = layer_of(delta, text, runs, cells)
    other = text.rows([0, 1, *range(4, 9)])
    cells = some_cells(text.shape)
    alone_NHV = layer_of(delta, other, [TokenRun(0, nothing(7), nothing(7))], cells)
    assert torch.equal(got_NHV[4:], alone_NHV[2:])
    assert torch.equal(got_NHV[:4], whole_layer(delta, text)[:4])


def test_siblings_of_one_group_wait_for_their_parent() -> None:
    """Threads share the heads of a group; keys that a run leaves in cells are read by the next."""
    kernels = choose(device=HOST, dtype=torch.float32, threads=3)
    shape = replace(SCAN, num_key_heads=1, num_heads=32, num_channels=2 * 5 + 32 * 7)
    text = scanned_text(shape)
    states: tuple[int | None, ...] = (None, 3, *nothing(2))
    inputs: tuple[int | None, ...] = (*nothing(2), 4, 5)
    runs = [
        TokenRun(0, states, inputs),
        TokenRun(4, nothing(3), nothing(3), source=3),
        TokenRun(7, nothing(2), nothing(2), source=3, replayed=(4,)),
    ]
    wanted_NHV = layer_of(torch_delta, text, runs, some_cells(shape))
    for _ in range(20):
        got_NHV = layer_of(kernels.delta, text, runs, some_cells(shape))
        torch.testing.assert_close(got_NHV, wanted_NHV, rtol=1e-4, atol=1e-5)


def test_only_cells_that_runs_name_are_written(delta: Delta, text: Text) -> None:
    cells = some_cells(text.shape)
    layer_of(delta, text, [TokenRun(0, (*nothing(8), 2), (*nothing(8), 3))], cells)
    written = [n for n, cell in enumerate(cells.states) if cell.conv_LWC.any()]
    noted = [n for n, cell in enumerate(cells.inputs) if cell.conv_LC.any()]
    assert (written, noted) == ([2], [3])
    assert not cells.states[2].conv_LWC[1 - LAYER].any()
    if text.shape.num_heads:
        written = [n for n, cell in enumerate(cells.states) if cell.state_LHKV.any()]
        noted = [n for n, cell in enumerate(cells.inputs) if cell.key_LGK.any()]
        assert (written, noted) == ([2], [3])
        assert not cells.states[2].state_LHKV[1 - LAYER].any()


def test_native_cells_are_those_of_the_reference(text: Text) -> None:
    kernels = choose(device=HOST, dtype=torch.float32)
    ours, theirs = some_cells(text.shape), some_cells(text.shape)
    run = TokenRun(0, (*range(8), None), (*range(9),))
    layer_of(torch_delta, text, [run], ours)
    layer_of(kernels.delta, text, [run], theirs)
    assert_cells_close(ours, theirs)


def test_few_groups_are_shared_by_threads(delta: Delta) -> None:
    """One group of many heads, as in Granite 4 and Falcon H1, and more groups than parts."""
    for groups, heads in ((1, 24), (20, 40)):
        shape = replace(SCAN, num_key_heads=groups, num_heads=heads)
        shape = replace(shape, num_channels=2 * groups * 5 + heads * 7)
        text = scanned_text(shape)
        assert float((whole_layer(delta, text) - formula(text)).abs().max()) < 1e-4


def test_states_too_large_for_caches_are_the_same(delta: Delta) -> None:
    """Native code then writes past the caches, and whole vectors."""
    heads, size = 8, 128
    shape = replace(WIDE, num_heads=heads, num_channels=(2 * WIDE.num_key_heads + heads) * size)
    text, ours, theirs = some_text(3, shape), some_cells(shape, 3), some_cells(shape, 3)
    for rule, cells in ((delta, ours), (torch_delta, theirs)):
        layer_of(rule, text.part(0, 2), [TokenRun(0, (None, 0), (None, None))], cells)
        layer_of(rule, text.part(2, 3), [TokenRun(0, (1,), (0,), source=0)], cells)
        layer_of(rule, text.part(2, 3), [TokenRun(0, (None,), (None,), 0, (0,), 2)], cells)
    assert_cells_close(ours, theirs)
    assert torch.equal(ours.states[1].state_LHKV, ours.states[2].state_LHKV)


def test_sizes_are_those_of_the_cells() -> None:
    state, inputs = StateCell.zeros(SHAPE, HOST), InputCell.zeros(SHAPE, HOST)
    assert state.conv_LWC.nbytes + state.state_LHKV.nbytes == SHAPE.state_bytes
    parts = (inputs.conv_LC, inputs.key_LGK, inputs.change_LHV, inputs.decay_LH)
    assert sum(part.nbytes for part in parts) == SHAPE.input_bytes
