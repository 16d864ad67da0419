"""What a block net is told of a text, by the drafter that asks it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from doubles.rig import SAMPLER
from doubles.toy_heads import ToyBlock, state_row, states_of
from outrider.core.draft import Budget
from outrider.plugins.heads.medusa import ParallelHeadSampler
from outrider.testing import GREEDY
from outrider_lab.models.block_net import BlockContext, BlockDrafter, Guess

TEXT = (1, 2, 0, 4, 3)


@dataclass(slots=True)
class Listening:
    """A net of `num_context` tokens that remembers what it was told."""

    num_context: int
    num_places: int = 2
    hidden_layers: tuple[int, ...] = ToyBlock.hidden_layers
    told: list[BlockContext] = field(default_factory=list[BlockContext])

    def guess(self, contexts: list[BlockContext], num_places: int) -> Guess:
        self.told += contexts
        return Guess(
            torch.zeros(len(contexts), num_places, 5), torch.ones(len(contexts), num_places)
        )


@pytest.mark.parametrize("num_context", [1, 3, 4, 9])
def test_each_state_comes_with_the_token_that_follows_it(num_context: int) -> None:
    net = Listening(num_context)
    drafter = BlockDrafter(net, ParallelHeadSampler(SAMPLER))
    drafter.propose([state_row(TEXT, Budget(2), GREEDY)])
    (context,) = net.told
    start = max(len(TEXT) - 1 - num_context, 0)
    assert context.next_ids == TEXT[start + 1 :]
    assert torch.equal(context.hidden_CLD, states_of(TEXT, start, len(TEXT) - 1))


def test_a_text_of_one_token_is_not_drafted_for() -> None:
    net = Listening(3)
    (draft,) = BlockDrafter(net, ParallelHeadSampler(SAMPLER)).propose(
        [state_row(TEXT[:1], Budget(2), GREEDY)]
    )
    assert not draft.tokens
    assert not net.told
