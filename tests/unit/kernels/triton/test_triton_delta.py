"""The gated delta rule in the interpreter, against the definition and against itself cut in parts.

The tests of every implementation are in unit/kernels/test_delta.py; these are fewer, for time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from checks.memory import model_with
from checks.state import NEEDS
from outrider.core.protocols import StepRow
from outrider.core.tree import ROOT
from outrider.kernels.reference.delta import Cells, TokenRun, torch_delta
from outrider.plugins.gpu.kernels.delta_ops import TritonDelta
from outrider.plugins.gpu.kernels.delta_tables import delta_tables
from outrider.plugins.gpu.kernels.scratch import Workspace
from outrider.plugins.gpu.kernels.trial import delta_alike
from unit.kernels.delta_cases import (
    HOST,
    LAYER,
    SMALL,
    Text,
    assert_cells_close,
    formula,
    layer_of,
    nothing,
    some_cells,
    some_text,
    whole_layer,
)

pytestmark = pytest.mark.wide

DELTA = TritonDelta(Workspace(HOST))
NUM = 5


@pytest.fixture(scope="module")
def text() -> Text:
    return some_text(NUM, SMALL)


@pytest.fixture(scope="module")
def at_once(text: Text) -> Tensor:
    """What it computes of a text that is read at once."""
    return whole_layer(DELTA, text)


def _cells() -> Cells:
    return some_cells(SMALL)


def test_it_is_the_formula(text: Text, at_once: Tensor) -> None:
    assert float((at_once - formula(text)).abs().max()) < 1e-5


def test_gates_of_any_size_are_those_of_the_formula() -> None:
    """Where 1 + e^x keeps no digit of e^x, and where e^x has no place in float32."""
    text = some_text(4, SMALL)
    sizes = torch.tensor([-100.0, -25.0, 9.0, 100.0])
    text.gates_N2H[:, SMALL.num_heads :] = sizes[:, None]
    text.gates_N2H[:, : SMALL.num_heads] = sizes.flip(0)[:, None]
    cells = _cells()
    got_NHV = layer_of(DELTA, text, [TokenRun(0, nothing(4), (*range(4),))], cells)
    step_NH = functional.softplus(sizes[:, None].double() + text.weights.dt_bias_H)
    for token, cell in enumerate(cells.inputs[:4]):
        wanted_H = torch.exp(-text.weights.rate_H * step_NH[token]).float()
        torch.testing.assert_close(cell.decay_LH[LAYER], wanted_H, rtol=1e-5, atol=0)
    assert float((got_NHV - formula(text)).abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_text_cut_in_two_has_the_same_bits(cut: int, text: Text, at_once: Tensor) -> None:
    cells, left = _cells(), NUM - cut
    layer_of(DELTA, text.part(0, cut), [TokenRun(0, (*nothing(cut - 1), 4), nothing(cut))], cells)
    rest = TokenRun(0, nothing(left), nothing(left), source=4)
    got_NHV = layer_of(DELTA, text.part(cut, NUM), [rest], cells)
    assert torch.equal(got_NHV, at_once[cut:])


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1, 4])
def test_replaying_inputs_gives_the_bits_of_the_state(kept: int) -> None:
    """Fewer and more of them than the convolution remembers."""
    text, cells = some_text(6, SMALL), _cells()
    first = TokenRun(0, (0, 1, 2, 3, 4), (None, 0, 1, 2, 3))
    layer_of(DELTA, text.part(0, 5), [first], cells)
    one = text.part(5, 6)
    more = TokenRun(0, (None,), (None,), source=0, replayed=tuple(range(kept)), fold=9)
    got_NHV = layer_of(DELTA, one, [more], cells)
    directly = TokenRun(0, (None,), (None,), source=kept)
    assert torch.equal(got_NHV, layer_of(DELTA, one, [directly], cells))
    folded, known = cells.states[9], cells.states[kept]
    assert torch.equal(folded.state_LHKV[LAYER], known.state_LHKV[LAYER])
    assert torch.equal(folded.conv_LWC[LAYER], known.conv_LWC[LAYER])


# Runs of a tree behind the text of cell 11, by snapshots and by inputs; the path of each one's end.
TREE: tuple[tuple[TokenRun, tuple[int, ...]], ...] = (
    (TokenRun(0, (0, None), nothing(2), source=11, fold=2), (0, 1)),
    (TokenRun(2, (None,), nothing(1), source=0), (0, 2)),
    (TokenRun(3, nothing(1), (0,), source=2), (3,)),
    (TokenRun(4, nothing(1), (1,), source=11, replayed=(0,)), (3, 4)),
    (TokenRun(5, nothing(1), nothing(1), source=11, replayed=(0, 1)), (3, 4, 5)),
)


@pytest.mark.slow
def test_branches_go_on_from_what_the_same_pass_writes() -> None:
    cells, text = _cells(), some_text(6, SMALL)
    before = replace(some_text(2, SMALL, seed=5), weights=text.weights)
    layer_of(DELTA, before, [TokenRun(0, (None, 11), nothing(2))], cells)
    got_NHV = layer_of(DELTA, text, [run for run, _ in TREE], cells)
    paths = [path for _, path in TREE]
    stops = np.cumsum([0, *map(len, paths)]).tolist()
    alone = [
        TokenRun(start, nothing(len(path)), nothing(len(path)), source=11)
        for start, path in zip(stops, paths, strict=False)
    ]
    wanted_NHV = layer_of(DELTA, text.rows([node for path in paths for node in path]), alone, cells)
    ends = [stop - 1 for stop in stops[1:]]
    assert torch.equal(got_NHV[[path[-1] for path in paths]], wanted_NHV[ends])


@pytest.mark.slow
def test_cells_are_those_of_the_definition() -> None:
    text = some_text(5)
    runs = [
        TokenRun(0, (0, 1, None), (0, 1, 2)),
        TokenRun(3, (7,), (7,), source=0, replayed=(1, 2), fold=9),
        TokenRun(4, (10,), (None,)),
    ]
    ours, theirs = some_cells(), some_cells()
    got_NHV = layer_of(DELTA, text, runs, ours)
    wanted_NHV = layer_of(torch_delta, text, runs, theirs)
    torch.testing.assert_close(got_NHV, wanted_NHV, rtol=1e-4, atol=1e-5)
    assert_cells_close(ours, theirs)
    assert not any(cell.state_LHKV[1 - LAYER].any() for cell in ours.states)


@pytest.mark.slow
def test_neighbours_that_are_not_numbers_stay_alone(text: Text, at_once: Tensor) -> None:
    """Of three texts one row holds NaN, where a text reads its channels or its gates."""
    rows = [*range(NUM), 0, 1, 0, 1]
    three = text.rows(rows)
    three.mixed_NC[5] = torch.nan
    three.gates_N2H[7] = torch.nan
    runs = [
        TokenRun(start, nothing(num), nothing(num)) for start, num in ((0, NUM), (5, 2), (7, 2))
    ]
    got_NHV = layer_of(DELTA, three, runs, _cells())
    assert torch.equal(got_NHV[:NUM], at_once)
    assert got_NHV[NUM:].isnan().all()


RUNS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.booleans()), min_size=1)


@given(told=RUNS)
def test_runs_of_a_group_read_of_each_other_alone(told: list[tuple[int, int, bool]]) -> None:
    """Run i leaves its last state in cell i and its last inputs too; some go on from an earlier."""
    runs: list[TokenRun] = []
    for index, (count, back, by_input) in enumerate(told):
        earlier = index - back if 0 < back <= index else None
        runs.append(
            TokenRun(
                runs[-1].stop if runs else 0,
                (*nothing(count - 1), index),
                (*nothing(count - 1), index),
                source=None if by_input else earlier,
                replayed=(earlier,) if by_input and earlier is not None else (),
            )
        )
    tables = delta_tables(runs, some_cells(SMALL, len(runs)), SMALL.num_taps, HOST)
    numbers = {run.first: index for index, run in enumerate(runs)}
    taken = [numbers[int(row[0])] for row in tables.runs_R6]
    assert sorted(taken) == list(range(len(runs)))
    ends = tables.groups_U1.numpy()
    group_of = {run: int(np.searchsorted(ends, at, "right")) for at, run in enumerate(taken)}
    num_linked = 0
    for index, (_, back, _) in enumerate(told):
        if 0 < back <= index:
            num_linked += 1
            assert group_of[index] == group_of[index - back]
            assert taken.index(index) > taken.index(index - back)
    assert tables.num_groups == len(runs) - num_linked


@pytest.mark.slow
def test_a_hybrid_returns_to_what_it_kept() -> None:
    """A round of a tiny model that drafts a tree, and the one after."""
    theirs, ours = (model_with("replay", True, page_size=64) for _ in range(2))
    ours.kernels = replace(ours.kernels, delta=TritonDelta(Workspace(HOST)))
    ours.state.open(0, ())
    theirs.state.open(0, ())
    rounds = (((7, 8, 9), (ROOT, 0, 0), (0, 2)), ((5, 6), (ROOT, 0), (0,)))
    for tokens, parents, path in rounds:
        row = StepRow(0, tokens, parents)
        got_NV, wanted_NV = (model.step([row], NEEDS).logits_MV for model in (ours, theirs))
        torch.testing.assert_close(got_NV, wanted_NV, rtol=1e-4, atol=1e-4)
        for model in (ours, theirs):
            model.state.commit({0: path})


def test_a_pass_without_replays_has_empty_tables() -> None:
    tables = delta_tables([TokenRun(0, (None,), (None,))], Cells([], []), SMALL.num_taps, HOST)
    assert tables.replayed_I3.shape == (0, 3)
    assert torch.equal(tables.lines_NT2, torch.tensor([[[0, -1], [0, -1], [0, -1], [0, 0]]]))
    assert torch.equal(tables.groups_U1, torch.tensor([0, 1]))


@pytest.mark.slow
def test_the_trial_of_a_device_finds_rows_alike_and_a_kernel_that_is_not() -> None:
    assert delta_alike(DELTA, HOST, SMALL, 4)

    class Unlike(TritonDelta):
        """Rows of a longer pass are a little larger."""

        def __call__(self, first_NP: Tensor, *others: Any) -> None:
            super().__call__(first_NP, *others)
            if len(first_NP) > 1:
                others[-1][-1] *= 1.0001

    assert not delta_alike(Unlike(Workspace(HOST)), HOST, SMALL, 3)
