"""Commits in flat form are commits."""

from __future__ import annotations

import torch

from doubles.tiny_attention import TinyAttentionLM
from outrider.core.noise import ROOT
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.state.packed import commit_packed


def test_a_packed_commit_keeps_each_path_up_to_its_length() -> None:
    model = TinyAttentionLM()
    for seq_id in (3, 5, 6):
        model.state.open(seq_id, ())
    rows = [
        StepRow(3, (1, 2, 4), (ROOT, ROOT, 1)),
        StepRow.chain(5, (1, 2, 3)),
        StepRow.chain(6, (1,)),
    ]
    model.step(rows, DraftNeeds())
    paths_BW = torch.tensor([[1, 2, -1], [0, 1, 2], [0, -1, -1]])
    assert commit_packed(model.state, [3, 5, 6], paths_BW, torch.tensor([2, 3, 0])) == 2
    assert [model.state.length(seq_id) for seq_id in (3, 5, 6)] == [2, 3, 0]
    assert [model.state.num_staged(seq_id) for seq_id in (3, 5, 6)] == [0, 0, 0]
