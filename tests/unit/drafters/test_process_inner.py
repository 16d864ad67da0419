"""What a drafter's process makes of what it is told."""

from __future__ import annotations

from dataclasses import asdict

from doubles.tiny_hybrids import stored_hybrid
from outrider.core.spec import RecurrentCapacity
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.plugins.hybrids.model import HybridModel
from outrider.plugins.lanes.process.child import build_inner
from outrider.plugins.lanes.process.options import ChildOptions

STATES = RecurrentCapacity(rollback="ring", history=40, num_sequences=20, num_checkpoints=3)


def test_a_hybrid_has_the_room_for_states_that_the_engine_decided() -> None:
    """More sequences than the default, and drafts that are longer: else most go without a draft."""
    options = ChildOptions(
        folder=str(stored_hybrid("qwen3_5")),
        vocab_size=96,
        num_distributions=1,
        num_slots=64,
        page_size=4,
        max_rows=16,
        max_logits=4,
        chunk=8,
        batch_size=4,
        states=asdict(STATES),
    )
    drafter = build_inner(ChildOptions.from_json(options.to_json())).drafter
    assert isinstance(drafter, ModelDrafter)
    assert isinstance(drafter.model, HybridModel)
    assert drafter.model.state.capacity == STATES
