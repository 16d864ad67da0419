"""What captured rounds leave in memory, and what they tell when there is no room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from doubles.graphs import GraphRig, requests, rig, tiny
from doubles.rig import live, round_of
from outrider.core.config import EngineConfig
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.plugins.gpu.rounds.memory import Entry, RoundBuffers
from outrider.plugins.gpu.rounds.round import GraphRound


@pytest.mark.parametrize("same", [True, False])
def test_memory_is_that_of_models_that_read_the_kept_tokens(same: bool) -> None:
    """Bit for bit, after every call, whether drafts are all accepted or mostly refused."""
    config = EngineConfig(k=3, batch_size=3, drafter="model")
    draft = tiny("llama2", 3 if same else 4, "draft")
    rigged = GraphRig(tiny("llama2", 3), draft, config)
    engine = rigged.engine(captured=True)
    wanted = requests((0, 0.9, 0), max_tokens=40)
    *seqs, late = (live(index, request) for index, request in enumerate(wanted))
    for seq in seqs:
        engine.submit(seq)
    engine.step()
    for job in range(4):
        if job == 2:
            engine.submit(late)  # rows are written anew, from what the host knows
        engine.step()
        for seq in seqs:
            for model in (rigged.target, draft):
                length = model.state.length(seq.seq_id)
                model.state.open(77, ())
                row = StepRow.chain(77, seq.tokens[:length], logits_from=length)
                model.step([row], DraftNeeds())
                model.state.commit({77: range(length)})
                assert torch.equal(model.state.read(77), model.state.read(seq.seq_id))
                model.state.close(77)
            assert rigged.target.state.length(seq.seq_id) == len(seq.tokens) - 1
            assert draft.state.length(seq.seq_id) >= len(seq.tokens) - 2
    for seq in (*seqs, late):
        engine.cancel(seq.seq_id)


class Arrivals(TorchDispatchMode):
    """For each copy from the host to the device, whether the host goes on at once."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.seen: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self.seen.append((len(args) > 2 and bool(args[2])) or bool(named.get("non_blocking")))
        elif func is torch.ops.aten._to_copy.default and not args[0].is_meta:
            self.seen.append(bool(named.get("non_blocking")))
        return func(*args, **named)


def test_a_change_of_the_batch_does_not_wait_for_the_running_round() -> None:
    meta = torch.device("meta")
    made = RoundBuffers.allocate(meta, num_rows=4, num_pages=8, page_size=4, num_stops=16, k=2)
    seqs = [live(index, request) for index, request in enumerate(requests((0, 0.9)))]
    entries = [Entry(seq, 2, 0, (3, 1, 2), (0,)) for seq in seqs]
    with Arrivals() as arrivals:
        buffers = made.first(4, 2)
        buffers.write(entries)
        buffers.write_budgets([1, 2])
    assert len(arrivals.seen) > 10
    assert all(arrivals.seen)


def test_a_full_arena_loses_no_text() -> None:
    """A sequence that finds no room waits again, and what was decided before has been told."""
    rigged = rig(2, batch_size=2)
    wanted = requests((0, 0.8))
    expected = rigged.run(wanted, captured=False)
    engine = rigged.engine(captured=True)
    assert isinstance(round_of(engine), GraphRound)
    first, second = (live(index, request) for index, request in enumerate(wanted))
    engine.submit(first)
    told: list[int] = []
    while len(told) < 4:
        told += [token for outcome in engine.step() for token in outcome.tokens]
    rigged.target.state.open(99, ())
    rigged.target.state.reserve({99: rigged.target.state.num_free_tokens})
    engine.submit(second)
    for _ in range(8):
        told += [token for outcome in engine.step() for token in outcome.tokens]
    assert second.num_preempted
    rigged.target.state.close(99)
    while engine.has_work:
        told += [t for o in engine.step() if o.seq_id == 0 for t in o.tokens]
    assert told == expected[0]
    assert [seq.tokens[seq.prompt_length :] for seq in (first, second)] == expected
