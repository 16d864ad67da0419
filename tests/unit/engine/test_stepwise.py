"""Feeding a draft token by token: the same logits, one token with logits a row and pass."""

from __future__ import annotations

import pytest
import torch

from doubles.counting import CountingLM
from doubles.kinds import KINDS, Kind, close_to
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.core.tree import ROOT
from outrider.engine.round import StepwiseLM

NEEDS = DraftNeeds()
ROWS = (
    StepRow(0, (1, 2, 3, 4, 0), (ROOT, 0, 1, 1, 2), logits_from=1),
    StepRow.chain(1, (4, 4, 4), logits_from=3),
    StepRow.chain(2, (2,)),
)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_logits_are_those_of_one_pass(kind: Kind) -> None:
    whole, inner = kind(), CountingLM(kind())
    stepwise = StepwiseLM(inner)
    for model in (whole, stepwise):
        for seq_id in range(3):
            model.state.open(seq_id, ())
    wanted = whole.step(ROWS, NEEDS).logits_MV
    out = stepwise.step(ROWS, NEEDS)
    close_to(out.logits_MV, wanted)
    assert out.num_passes == len(inner.steps) == 4
    for rows in inner.steps:
        assert max(row.num_logits for row in rows) <= 1
    assert [stepwise.state.num_staged(seq_id) for seq_id in range(3)] == [5, 3, 1]


def test_a_pass_that_only_reads_stays_one_pass() -> None:
    inner = CountingLM(KINDS["attention"]())
    stepwise = StepwiseLM(inner)
    stepwise.state.open(0, ())
    out = stepwise.step([StepRow.chain(0, (1, 2), logits_from=2)], NEEDS)
    assert out.logits_MV.shape == torch.Size([0, stepwise.spec.vocab_size])
    assert out.num_passes == len(inner.steps) == 1
