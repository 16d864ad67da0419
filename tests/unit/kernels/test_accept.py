"""Greedy verification of chains: the tensor form against the walk, ties and padding included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.clock import host_ints, host_rows
from outrider.core.draft import Draft
from outrider.core.protocols import VerifyRow
from outrider.core.rng import KeyedRng
from outrider.core.sampling import Distributions
from outrider.kernels import registry
from outrider.kernels.reference.pointwise import argmax
from outrider.verify.exact import TokenRule

VOCAB = 5
Form = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def forms() -> dict[str, Form]:
    """As the registry hands them out: native where there is a compiler, else the reference."""
    cpu = torch.device("cpu")
    found = [
        registry.choose(device=cpu, dtype=torch.float32, force_reference=forced)
        for forced in (True, False)
    ]
    return {kernels.choices[-1].name: kernels.verify_prefix for kernels in found}


every_form = pytest.mark.parametrize("verify_prefix", forms().values(), ids=forms())


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[list[float]]], list[list[int]]]:
    """Logits with many ties, and drafts that follow them about half of the time."""
    num, length = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    level = st.sampled_from([-1.0, 0.0, 2.0])
    row = st.lists(level, min_size=VOCAB, max_size=VOCAB)
    logits = [[draw(row) for _ in range(length)] for _ in range(num)]
    best = [[levels.index(max(levels)) for levels in chain] for chain in logits]
    drafts = [[t if draw(st.booleans()) else draw(st.integers(0, 4)) for t in c] for c in best]
    return logits, drafts


@every_form
@given(batch=batches())
def test_a_chain_is_accepted_as_far_as_the_walk_goes(
    verify_prefix: Form, batch: tuple[list[list[list[float]]], list[list[int]]]
) -> None:
    logits, drafts = batch
    lengths_B, mask_BK = verify_prefix(torch.tensor(logits), torch.tensor(drafts))
    rule = TokenRule()
    for chain, draft, length, mask in zip(
        logits, drafts, host_ints(lengths_B), host_rows(mask_BK), strict=True
    ):
        # The distribution behind the last token does not matter to what is accepted.
        distributions = Distributions(tokens=(*argmax(torch.tensor(chain)), 0))
        (verdict,) = rule([VerifyRow(Draft.chain(draft), distributions, KeyedRng(0, 0, 0))])
        assert length == len(verdict.path)
        assert mask == [place < length for place in range(len(draft))]


@every_form
def test_the_first_of_equal_logits_wins(verify_prefix: Form) -> None:
    logits_BKV = torch.zeros(2, 1, 1000)
    lengths_B, _ = verify_prefix(logits_BKV, torch.tensor([[0], [999]]))
    assert host_ints(lengths_B) == [1, 0]


@every_form
def test_padding_ends_a_draft(verify_prefix: Form) -> None:
    logits_BKV = torch.nn.functional.one_hot(torch.tensor([[3, 1, 2]] * 3), VOCAB).float()
    drafts_BK = torch.tensor([[3, 1, 2], [3, -1, 2], [-1, -1, -1]])
    lengths_B, mask_BK = verify_prefix(logits_BKV, drafts_BK)
    assert host_ints(lengths_B) == [3, 1, 0]
    assert mask_BK.dtype == torch.bool
    assert host_ints(mask_BK.sum(-1)) == [3, 1, 0]


@every_form
def test_no_drafts_are_no_tokens(verify_prefix: Form) -> None:
    lengths_B, mask_BK = verify_prefix(torch.zeros(2, 0, VOCAB), torch.zeros(2, 0).long())
    assert host_ints(lengths_B) == [0, 0]
    assert mask_BK.shape == (2, 0)
