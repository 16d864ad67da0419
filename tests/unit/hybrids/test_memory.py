"""Accounts of recurrent memory: cells, checkpoints, what is allocated, and what a round moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from doubles.tiny_attention import toy_spec
from doubles.tiny_hybrids import tiny_hybrid
from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ARENA_SHARE, ArenaSize, arena_slots, total_bytes
from outrider.core.errors import CapacityError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.core.spec import RecurrentCapacity, StateShape
from outrider.core.tree import ROOT
from outrider.kernels.reference.delta import StateCell
from outrider.models.decoder import ModelCapacity
from outrider.plugins.hybrids.memory import HybridState
from outrider.plugins.hybrids.model import HybridModel
from outrider.plugins.hybrids.states import CellPool, Checkpoints

NEEDS = DraftNeeds()
HOST = torch.device("cpu")
SHAPE = StateShape(
    num_layers=1,
    num_taps=4,
    num_channels=6,
    num_key_heads=1,
    num_heads=1,
    key_dim=2,
    value_dim=2,
)
# The recurrent layers of a 9B model: 24 of 32, with 32 value heads of 128.
LARGE = StateShape(
    num_layers=24,
    num_taps=4,
    num_channels=8192,
    num_key_heads=16,
    num_heads=32,
    key_dim=128,
    value_dim=128,
)


def _pool(capacity: int) -> CellPool[StateCell]:
    return CellPool(lambda: StateCell.zeros(SHAPE, HOST), capacity)


def _model(rollback: str, history: int = 8, num_sequences: int = 2) -> HybridModel:
    states = RecurrentCapacity(
        rollback=rollback, history=history, num_sequences=num_sequences, num_checkpoints=2
    )
    return tiny_hybrid(
        capacity=ModelCapacity(num_slots=512, page_size=64, max_rows=32, states=states)
    )


def test_cells_are_made_when_they_are_first_needed_and_used_again() -> None:
    pool = _pool(4)
    assert (len(pool.cells), pool.num_free) == (0, 4)
    first = pool.take(2)
    assert (len(pool.cells), pool.num_free) == (2, 2)
    pool.share(first[:1])
    pool.release(first)
    pool.check(first[:1])
    assert sorted(pool.take(3)) == sorted({*range(4)} - {first[0]})
    with pytest.raises(CapacityError, match="recurrent memory is full"):
        pool.take(1)


def test_on_a_device_all_cells_are_there_at_once() -> None:
    pool = CellPool(lambda: StateCell.zeros(SHAPE, HOST), 3, at_once=True)
    assert (len(pool.cells), pool.num_free) == (3, 3)


def test_a_device_with_little_memory_gets_less_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells are reserved at once there, so what does not fit is cut before weights are read."""
    device = torch.device("meta")
    capacity = RecurrentCapacity(rollback="ring", history=6, num_sequences=2, num_checkpoints=0)
    spec = toy_spec("toy", 5)

    def state(free: int) -> HybridState:
        def free_bytes(device: torch.device) -> int:
            del device
            return free

        monkeypatch.setattr("outrider.plugins.hybrids.memory.free_bytes", free_bytes)
        kv = PagedKV(spec, dtype=torch.float32, device=device, size=ArenaSize(16, 4))
        return HybridState(kv, SHAPE, capacity, device)

    assert state(capacity.num_bytes(SHAPE)).history == 6
    assert state(capacity.num_bytes(SHAPE) - 1).history == 5
    assert len(state(capacity.num_bytes(SHAPE)).cells.states) == capacity.num_states
    with pytest.raises(CapacityError, match="recurrent states of 2 sequences"):
        state(100)


def test_the_longest_known_beginning_is_found_and_the_oldest_goes_first() -> None:
    pool = _pool(6)
    found = Checkpoints(pool, 2)
    for beginning in ((1, 2), (1, 2, 3, 4), (5, 6)):
        cells = pool.take(1)
        found.add(beginning, cells[0])
        pool.release(cells)
    assert found.longest((1, 2, 9, 9), 4) == (0, None)
    length, cell = found.longest((1, 2, 3, 4, 5), 5)
    assert length == 4
    assert cell is not None
    assert found.longest((1, 2, 3, 4, 5), 3) == (0, None)
    pool.check([*found.held, cell])
    # It was used last, so the other one goes to make room.
    pool.release([cell])
    found.free_cells(5)
    assert found.longest((5, 6), 2) == (0, None)
    assert pool.num_free == 5
    found.free_cells(6)
    pool.check([])


@pytest.mark.parametrize("rollback", ["ring", "replay"])
def test_only_what_is_needed_is_allocated(rollback: str) -> None:
    """A host holds the states that were ever held at once; inputs are for replay alone."""
    model = _model(rollback)
    state = model.state
    assert (len(state.cells.states), len(state.cells.inputs)) == (0, 0)
    for seq_id in (0, 1):
        state.open(seq_id, ())
    for start in range(0, 30, 3):
        rows = [StepRow.chain(s, [start + 3 * s + n for n in range(3)]) for s in (0, 1)]
        model.step(rows, NEEDS)
        state.commit({0: range(2), 1: range(3)})
    # Three tokens a sequence and the state before them; or two states, and the inputs of three and
    # of those that the round before kept.
    wanted = (8, 0) if rollback == "ring" else (4, 11)
    assert (len(state.cells.states), len(state.cells.inputs)) == wanted


def test_more_sequences_than_there_is_room_for_are_refused() -> None:
    model = _model("ring", history=1, num_sequences=1)
    for seq_id in range(3):
        model.state.open(seq_id, ())
        model.step([StepRow.chain(seq_id, (1, 2))], NEEDS)
    model.state.open(3, ())
    with pytest.raises(CapacityError, match="recurrent memory is full") as caught:
        model.step([StepRow.chain(3, (1, 2))], NEEDS)
    assert "--state-history" in (caught.value.hint or "")
    model.state.check()
    assert model.state.num_staged(3) == 0


def _moved(model: HybridModel, rows: Sequence[StepRow]) -> int:
    """Bytes of recurrent memory that a pass of a large model with such a plan reads and writes."""
    with model.state.planning(rows) as plan:
        states = inputs = 0
        for run in plan.runs:
            states += (run.source is not None) + (run.fold is not None)
            states += sum(cell is not None for cell in run.states)
            inputs += len(run.replayed) + sum(cell is not None for cell in run.inputs)
    return states * LARGE.state_bytes + inputs * LARGE.input_bytes


def _per_round(rollback: str, k: int, kept: int) -> int:
    model = _model(rollback)
    model.state.open(0, ())
    moved = 0
    for _ in range(3):
        moved = _moved(model, [StepRow.chain(0, range(k + 1))])
        model.state.commit({0: range(kept)})
    return moved


def test_a_verification_with_replay_moves_little_more_than_plain_decoding() -> None:
    """At most 1.25 times as much at K = 8, whatever is kept; the ring moves several times more."""
    plain = _per_round("replay", 0, 1)
    assert all(_per_round("replay", 8, kept) <= 1.25 * plain for kept in range(1, 10))
    assert _per_round("ring", 8, 9) > 4 * plain


def test_a_tree_is_cut_into_runs_that_start_where_they_hang() -> None:
    model = _model("ring")
    model.state.open(0, ())
    row = StepRow(0, (1, 2, 3, 4, 5), (ROOT, 0, 1, 0, 3))
    with model.state.planning([row]) as plan:
        assert [(run.first, run.stop) for run in plan.runs] == [(0, 3), (3, 5)]
        assert plan.runs[0].source is None
        assert plan.runs[1].source == plan.runs[0].states[0]


def test_the_arena_leaves_room_for_states() -> None:
    spec = replace(toy_spec("toy", 5), state_bytes=1000, input_bytes=10)
    capacity = RecurrentCapacity(rollback="replay", history=3, num_sequences=2, num_checkpoints=4)
    taken = (2 * 5 + 4) * 1000 + 2 * 2 * 4 * 10
    assert capacity.num_bytes(spec) == taken
    share = int(total_bytes(HOST) * ARENA_SHARE)
    slots = arena_slots(spec, num_slots=1 << 50, device=HOST, states=capacity)
    assert slots == (share - taken) // spec.kv_bytes_per_token
    huge = replace(spec, state_bytes=1 << 50)
    with pytest.raises(CapacityError, match="the recurrent states take") as caught:
        arena_slots(huge, num_slots=1, device=HOST, states=capacity)
    assert "--state-rollback replay" in (caught.value.hint or "")
