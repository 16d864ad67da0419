"""Rollback of recurrent memory: after any history, the very bits of never having speculated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checks.effort import examples
from checks.state import NEEDS, PROBE, Rollback, check, check_rollback, fresh_logits, path_to
from doubles.tiny_hybrids import hybrid_kind, tiny_hybrid
from outrider.core.errors import CapacityError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.core.spec import RecurrentCapacity
from outrider.core.tree import ROOT
from outrider.models.decoder import ModelCapacity
from outrider.plugins.hybrids.model import HybridModel

# Models by the way in which their states return.
ROLLBACKS = (
    "ring qwen3_5",
    "replay qwen3_5",
    "ring lfm2_moe",
    "replay lfm2_odd",
    "ring falcon_h1",
    "replay granite_h_moe",
    "replay nemotron_h_moe",
)
# Models whose pass is one native call.
IN_ONE_CALL = (
    "ring qwen3_5",
    "replay qwen3_5_moe",
    "replay qwen3_next",
    "ring lfm2_odd",
    "replay lfm2_moe",
    "ring granite_h",
    "replay granite_h_moe",
    "replay bamba",
)
TEXT = (1, 4, 2, 2, 0, 3, 1, 3, 2, 4, 0)


class RingRollback(Rollback):
    kind = staticmethod(hybrid_kind("qwen3_5", "ring"))


class ReplayRollback(Rollback):
    kind = staticmethod(hybrid_kind("qwen3_5", "replay"))


class MixtureRollback(Rollback):
    kind = staticmethod(hybrid_kind("qwen3_next", "replay"))


class ConvolutionRollback(Rollback):
    kind = staticmethod(hybrid_kind("lfm2_moe", "replay"))


class ScanRollback(Rollback):
    kind = staticmethod(hybrid_kind("falcon_h1_norm", "replay"))


class LayersOfOneKindRollback(Rollback):
    kind = staticmethod(hybrid_kind("nemotron_h_moe", "ring"))


MACHINES = (
    RingRollback,
    ReplayRollback,
    MixtureRollback,
    ConvolutionRollback,
    ScanRollback,
    LayersOfOneKindRollback,
)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_any_interleaving_equals_feeding_only_what_was_kept(machine: type[Rollback]) -> None:
    check_rollback(machine, percent=5)


def _model(
    way: str, *, history: int = 6, num_slots: int = 256, hidden_layers: tuple[int, ...] = ()
) -> HybridModel:
    rollback, name = way.split()
    states = RecurrentCapacity(
        rollback=rollback, history=history, num_sequences=4, num_checkpoints=4
    )
    capacity = ModelCapacity(
        num_slots=num_slots, page_size=4, max_rows=16, states=states, hidden_layers=hidden_layers
    )
    return tiny_hybrid(name, capacity=capacity)


def _step(model: HybridModel, *rows: StepRow) -> Tensor:
    return model.step(rows, NEEDS).logits_MV.clone()


def _read(model: HybridModel, seq_id: int, text: Sequence[int]) -> None:
    model.step([StepRow.chain(seq_id, text, logits_from=len(text))], NEEDS)
    model.state.commit({seq_id: range(len(text))})


_KINDS = {way: staticmethod(hybrid_kind(way.split()[1], "ring")) for way in ROLLBACKS}


def _wanted(way: str, text: Sequence[int]) -> Tensor:
    return fresh_logits(_KINDS[way], text, 96)


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[list[int], list[int], int]]:
    """Rounds of (tokens, parents, last node kept): chains and trees of at most 7 nodes."""
    made: list[tuple[list[int], list[int], int]] = []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 7))
        chain = draw(st.booleans())
        parents = [n - 1 if chain else draw(st.integers(ROOT, n - 1)) for n in range(count)]
        tokens = [draw(st.integers(0, 95)) for _ in parents]
        made.append((tokens, parents, draw(st.integers(ROOT, count - 1))))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("way", ROLLBACKS)
@examples(8)
@given(history=rounds())
def test_rounds_have_the_bits_of_plain_decoding(
    way: str, history: list[tuple[list[int], list[int], int]]
) -> None:
    model = _model(way)
    model.state.open(0, ())
    kept: list[int] = []
    for tokens, parents, last in history:
        logits_NV = _step(model, StepRow(0, tuple(tokens), tuple(parents)))
        for node, logits_V in enumerate(logits_NV):
            path = [tokens[n] for n in path_to(parents, node)]
            assert torch.equal(logits_V, _wanted(way, [*kept, *path]))
        path = path_to(parents, last)
        model.state.commit({0: path})
        kept += [tokens[n] for n in path]
        check(model.state)
    assert torch.equal(_step(model, StepRow.chain(0, (PROBE,)))[0], _wanted(way, [*kept, PROBE]))


@pytest.mark.parametrize("way", IN_ONE_CALL)
def test_a_pass_in_one_call_has_the_bits_of_its_operators(way: str) -> None:
    """Chains, trees and a text that is read again, with the states that heads read."""
    needs = DraftNeeds(hidden_layers=(0, 3, 4))
    native, plain = (_model(way, hidden_layers=needs.hidden_layers) for _ in range(2))
    if native.kernels.forward is None:
        pytest.skip("there are no native kernels here")
    plain.kernels = replace(plain.kernels, forward=None)
    assert native.native_pass() is not None
    assert plain.native_pass() is None
    passes = (
        ((StepRow.chain(0, TEXT), StepRow.chain(1, TEXT[6:], logits_from=2)), (11, 5)),
        ((StepRow(0, (3, 1, 4, 1, 5), (ROOT, 0, 0, 1, ROOT)), StepRow.chain(1, (9,))), (0, 1)),
        ((StepRow.chain(0, TEXT), StepRow.chain(1, (2, 7))), (2, 0)),
        ((StepRow.chain(0, (6, 6)), StepRow.chain(1, (2, 8))), (2, 2)),
    )
    for seq_id in (0, 1):
        native.state.open(seq_id, ())
        plain.state.open(seq_id, ())
    for rows, kept in passes:
        found, wanted = (model.step(rows, needs) for model in (native, plain))
        assert torch.equal(found.logits_MV, wanted.logits_MV)
        assert found.num_passes == wanted.num_passes
        for model in (native, plain):
            model.state.commit({seq_id: range(count) for seq_id, count in enumerate(kept)})
    for seq_id in (0, 1):
        length = native.state.length(seq_id)
        found, wanted = (m.state.hidden(seq_id, 0, length) for m in (native, plain))
        assert torch.equal(found, wanted)
    native.state.check()


@pytest.mark.parametrize("way", ROLLBACKS)
def test_a_chain_longer_than_the_history_can_still_be_cut_anywhere(way: str) -> None:
    """What was not kept is read again from what was."""
    for kept in range(len(TEXT) + 1):
        model = _model(way, history=2)
        model.state.open(0, ())
        _step(model, StepRow.chain(0, TEXT))
        model.state.commit({0: range(kept)})
        check(model.state)
        out = model.step([StepRow.chain(0, (PROBE,))], NEEDS)
        assert torch.equal(out.logits_MV[0], _wanted(way, [*TEXT[:kept], PROBE]))
        # States were kept of the last tokens and where a page ends.
        assert out.num_passes == (1 if kept == 0 or kept >= 8 else 2)


@pytest.mark.parametrize("way", ROLLBACKS)
def test_tokens_staged_one_by_one_past_the_history(way: str) -> None:
    model = _model(way, history=2)
    model.state.open(0, ())
    for node, token in enumerate(TEXT):
        _step(model, StepRow.chain(0, (token,), parent=node - 1))
        check(model.state)
    model.state.commit({0: range(5)})
    assert torch.equal(
        _step(model, StepRow.chain(0, (PROBE,)))[0], _wanted(way, [*TEXT[:5], PROBE])
    )


@pytest.mark.parametrize("way", ROLLBACKS)
def test_a_tree_past_the_history_is_refused_and_changes_nothing(way: str) -> None:
    model = _model(way, history=2)
    model.state.open(0, ())
    _read(model, 0, TEXT)
    with pytest.raises(CapacityError, match="history of 2"):
        model.step([StepRow(0, (1, 2, 3, 4), (ROOT, ROOT, ROOT, ROOT))], NEEDS)
    assert model.state.num_staged(0) == 0
    check(model.state)
    assert torch.equal(_step(model, StepRow.chain(0, (PROBE,)))[0], _wanted(way, [*TEXT, PROBE]))


@pytest.mark.parametrize("way", ROLLBACKS)
def test_a_fork_may_be_cut_anywhere(way: str) -> None:
    model = _model(way)
    model.state.open(0, ())
    _read(model, 0, TEXT[:6])
    _read(model, 0, TEXT[6:])
    for length in range(len(TEXT) + 1):
        model.state.fork(0, 1, length)
        got_V = _step(model, StepRow.chain(1, (PROBE,)))[0]
        assert torch.equal(got_V, _wanted(way, [*TEXT[:length], PROBE]))
        check(model.state)
        model.state.close(1)
    assert torch.equal(_step(model, StepRow.chain(0, (PROBE,)))[0], _wanted(way, [*TEXT, PROBE]))


@pytest.mark.parametrize("way", ROLLBACKS)
def test_reading_again_leaves_shared_pages_as_they_are(way: str) -> None:
    model = _model(way)
    model.state.open(0, ())
    _read(model, 0, TEXT)
    before = model.state.read(0).clone()
    model.state.fork(0, 1, 9)
    _step(model, StepRow.chain(1, (PROBE,)))
    assert torch.equal(model.state.read(0), before)


@pytest.mark.parametrize("way", ROLLBACKS)
def test_beginnings_are_shared_up_to_a_state_that_was_kept(way: str) -> None:
    """The open defect elsewhere: pages of a prompt found again, the recurrent state not."""
    model = _model(way)
    model.state.open(0, TEXT)
    _read(model, 0, TEXT)
    reused = model.state.open(1, (*TEXT[:9], 7, 7, 7))
    assert reused == 8, "two pages of 4, at whose end the chunk left a state"
    rest = (*TEXT[8:9], 7, 7, 7)
    assert torch.equal(_step(model, StepRow.chain(1, rest))[-1], _wanted(way, [*TEXT[:8], *rest]))
    # Only the first page is the same, and no state was kept there.
    assert model.state.open(2, (*TEXT[:5], 7, 7, 7)) == 0
    check(model.state)


@pytest.mark.parametrize("way", ROLLBACKS)
def test_what_a_sequence_wrote_is_found_by_the_next_turn(way: str) -> None:
    model = _model(way)
    model.state.open(0, TEXT[:3])
    _read(model, 0, TEXT[:3])
    for token in TEXT[3:]:
        _step(model, StepRow.chain(0, (token, 9, 9)))
        model.state.commit({0: range(1)})
    model.state.close(0)
    assert model.state.open(1, (*TEXT, 7)) == 8
    got_V = _step(model, StepRow.chain(1, (*TEXT[8:], 7)))[-1]
    assert torch.equal(got_V, _wanted(way, [*TEXT, 7]))


@pytest.mark.parametrize("way", ROLLBACKS)
def test_a_state_whose_pages_are_gone_is_not_gone_on_from(way: str) -> None:
    model = _model(way, num_slots=16)
    model.state.open(0, TEXT)
    _read(model, 0, TEXT)
    model.state.close(0)
    model.state.open(1, ())
    _read(model, 1, (7,) * 16)
    model.state.close(1)
    assert model.state.open(2, TEXT) == 0
    _read(model, 2, TEXT)
    check(model.state)
    assert torch.equal(_step(model, StepRow.chain(2, (PROBE,)))[0], _wanted(way, [*TEXT, PROBE]))


@pytest.mark.parametrize("way", ROLLBACKS)
def test_a_pass_that_fails_leaves_what_was_committed(way: str) -> None:
    model = _model(way)
    model.state.open(0, ())
    _read(model, 0, TEXT)
    for rows in (StepRow.chain(0, (1, 2, 999)), StepRow(0, (1, 999), (ROOT, ROOT))):
        with pytest.raises(IndexError):
            model.step([rows], NEEDS)
        model.state.commit({0: ()})
        check(model.state)
        assert torch.equal(
            _step(model, StepRow.chain(0, (PROBE,)))[0], _wanted(way, [*TEXT, PROBE])
        )
        model.state.commit({0: ()})


@pytest.mark.parametrize("way", ROLLBACKS)
def test_mates_and_lane_twins_do_not_matter(way: str) -> None:
    model = _model(way)
    twin = model.twin()
    assert twin is not None
    for seq_id in (0, 1):
        model.state.open(seq_id, ())
    _step(twin, StepRow.chain(0, TEXT), StepRow(1, (3, 3, 1), (ROOT, ROOT, 0)))
    twin.state.commit({0: range(len(TEXT)), 1: (0, 2)})
    both = _step(model, StepRow.chain(1, (PROBE,)), StepRow.chain(0, (PROBE,)))
    assert torch.equal(both[0], _wanted(way, [3, 1, PROBE]))
    assert torch.equal(both[1], _wanted(way, [*TEXT, PROBE]))


@pytest.mark.parametrize("page_size", [1, 2, 32])
@pytest.mark.parametrize("history", [2, 8])
@pytest.mark.parametrize("way", ROLLBACKS)
def test_chains_staged_token_by_token_stay_within_the_room(
    way: str, history: int, page_size: int
) -> None:
    """As a draft model stages them, of every sequence that there is room for, and no checkpoints
    that could give way."""
    rollback, name = way.split()
    states = RecurrentCapacity(
        rollback=rollback, history=history, num_sequences=2, num_checkpoints=1
    )
    model = tiny_hybrid(
        name, capacity=ModelCapacity(num_slots=256, page_size=page_size, max_rows=16, states=states)
    )
    for seq_id in range(2):
        model.state.open(seq_id, ())
        _read(model, seq_id, TEXT[:3])
    for _ in range(2):
        for node, token in enumerate(TEXT[3:]):
            _step(model, *(StepRow.chain(n, (token,), parent=node - 1) for n in range(2)))
            check(model.state)
        model.state.commit({0: range(2), 1: range(7)})
    kept = [*TEXT[:3], *TEXT[3:5], *TEXT[3:5]], [*TEXT[:3], *TEXT[3:10], *TEXT[3:10]]
    probes_2V = _step(model, *(StepRow.chain(n, (PROBE,)) for n in range(2)))
    for text, probe_V in zip(kept, probes_2V, strict=True):
        assert torch.equal(probe_V, _wanted(way, [*text, PROBE]))


@pytest.mark.parametrize("way", ROLLBACKS)
def test_what_one_text_goes_on_to_write_does_not_crowd_out_prompts(way: str) -> None:
    """Of its own writing a sequence keeps the newest state: there is room for 4."""
    model = _model(way)
    model.state.open(0, TEXT)
    _read(model, 0, TEXT)
    for _ in range(6 * model.state.page_size):
        _step(model, StepRow.chain(0, (5,)))
        model.state.commit({0: range(1)})
    assert model.state.open(1, TEXT) == 8
