"""What a drafter's process makes of what it is told."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from doubles.tiny_hybrids import stored_hybrid
from outrider.core.spec import RecurrentCapacity
from outrider.drafters.process.child import build_inner
from outrider.drafters.process.options import ChildOptions
from outrider.models.qwen_hybrid import QwenHybridModel

STATES = RecurrentCapacity(rollback="ring", history=40, num_sequences=20, num_checkpoints=3)


def test_a_hybrid_has_the_room_for_states_that_the_engine_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More sequences than the default, and drafts that are longer: else most go without a draft."""
    models: list[QwenHybridModel] = []

    def keep(*args: object, **_: object) -> None:
        (model,) = (arg for arg in args if isinstance(arg, QwenHybridModel))
        models.append(model)

    monkeypatch.setattr("outrider.drafters.process.child.in_turns", keep)
    options = ChildOptions(
        folder=str(stored_hybrid("qwen3_5")),
        vocab_size=96,
        num_laws=1,
        num_slots=64,
        page_size=4,
        max_rows=16,
        max_logits=4,
        chunk=8,
        states=asdict(STATES),
    )
    build_inner(ChildOptions.from_json(options.to_json()))
    (model,) = models
    assert model.state.room == STATES
