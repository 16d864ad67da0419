"""Where a draft begins, and when it learns from its own text."""

from __future__ import annotations

from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider_lab.train.draft_model import begin_like, writes_itself


def embedding(rows: int, size: int) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(3))


@given(st.integers(4, 40), st.integers(2, 12), st.integers(2, 16))
def test_a_start_keeps_as_much_of_the_targets_embeddings_as_fits(
    rows: int, theirs: int, ours: int
) -> None:
    embedding_VD, weight_VE = embedding(rows, theirs), torch.full((rows, ours), 7.0)
    begin_like(weight_VE, embedding_VD)
    size = min(theirs, ours)
    assert bool((weight_VE[:, size:] == 7).all())
    centred_VD = embedding_VD - embedding_VD.mean(0)
    linalg = cast("Any", torch.linalg)
    best: Tensor = linalg.svdvals(centred_VD)[:size]
    found: Tensor = linalg.svdvals(weight_VE[:, :size])
    torch.testing.assert_close(found / found[0], best / best[0], atol=1e-3, rtol=1e-2)


@given(st.floats(0, 1), st.integers(1, 300))
def test_steps_on_its_own_text_are_spread_evenly(share: float, num_steps: int) -> None:
    own = [writes_itself(step, share) for step in range(num_steps)]
    for step in range(num_steps):
        assert abs(sum(own[: step + 1]) - (step + 1) * share) <= 1 + 1e-6
