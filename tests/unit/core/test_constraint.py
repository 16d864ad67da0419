"""A callback in the place of a constraint."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.core.logits import CallbackConstraint, LogitsProcessor
from outrider.core.params import SamplingParams

VOCAB = 4


def only(*ids: int) -> Tensor:
    mask_V = torch.zeros(VOCAB, dtype=torch.bool)
    mask_V[list(ids)] = True
    return mask_V


def test_it_is_asked_for_each_node_and_none_allows_all() -> None:
    seen: list[list[int]] = []

    def allowed(text: Sequence[int]) -> Tensor | None:
        seen.append(list(text))
        return None if len(text) == 1 else only(len(text))

    constraint = CallbackConstraint(allowed)
    found_NV = constraint.masks([1], [(), (2,), (2, 3)], VOCAB)
    assert found_NV is not None
    assert seen == [[1], [1, 2], [1, 2, 3]]
    wanted_NV = torch.stack([torch.ones(VOCAB, dtype=torch.bool), only(2), only(3)])
    assert torch.equal(found_NV, wanted_NV)
    assert CallbackConstraint(lambda text: None).masks([1], [()], VOCAB) is None


def test_forced_tokens_are_followed_while_one_is_left() -> None:
    constraint = CallbackConstraint(lambda text: only(len(text)) if len(text) < 3 else only(0, 1))
    assert list(constraint.forced([], 9)) == [0, 1, 2]
    assert list(constraint.forced([0], 1)) == [1]
    assert not constraint.knows_forced


def test_what_is_no_mask_is_told() -> None:
    with pytest.raises(ConfigError, match="a tensor of 5 booleans, got shape"):
        CallbackConstraint(lambda text: only(1)).masks([], [()], 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stops", [frozenset[int](), frozenset([3])])
def test_rows_that_nothing_is_left_of_end_the_text(
    dtype: torch.dtype, stops: frozenset[int]
) -> None:
    """On the host by numpy, elsewhere by PyTorch; the last number format is not numpy's."""
    masks = [only(1), only(), only(2), torch.ones(VOCAB, dtype=torch.bool)]
    logits_NV = torch.arange(16.0).reshape(4, VOCAB).to(dtype)
    logits_NV[2, 2] = float("-inf")
    logits_NV[3, 0] = float("nan")
    shaper = LogitsProcessor(
        SamplingParams(), 0, stops, allowed=lambda text: masks[len(text)].clone()
    )
    found_NV = shaper.shape(logits_NV, [], [(), (9,), (9, 9), (9, 9, 9)])
    left = [
        {token for token in range(VOCAB) if float(row[token]) != float("-inf")} for row in found_NV
    ]
    ends = {3} if stops else {0, 1, 2, 3}
    assert left == [{1}, ends, ends - {2}, {0, 1, 2, 3}]
