"""What captured rounds leave in memory, and what they tell when there is no room."""

from __future__ import annotations

import pytest
import torch

from doubles.graphs import GraphRig, requests, rig, tiny
from doubles.rig import live, round_of
from outrider.core.config import EngineConfig
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.engine.cuda_graph.round import GraphRound


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
