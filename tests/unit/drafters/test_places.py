"""Drafters that guess several places at once: where their guesses stand, and what they keep to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from doubles.rig import SAMPLER
from doubles.toy_heads import LAYER, GivenStates, ToyBlock, ToyHeads, state_row
from outrider.core.clock import host_ints
from outrider.core.draft import Budget
from outrider.core.errors import NumericsError
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftRow, HiddenStates
from outrider.drafters.common.growth import DraftSampler
from outrider.plugins.heads.medusa import MedusaDrafter, ParallelHeadSampler, TreeKind
from outrider.plugins.proof.reports import SAMPLED
from outrider.testing import GREEDY, VOCAB, check_same, check_shape, fresh_draft, row
from outrider_lab.models.block_net import BlockDrafter, num_sure

TEXT = (1, 2, 0, 4, 3)


def places(trees: TreeKind = "confident") -> ParallelHeadSampler:
    return ParallelHeadSampler(SAMPLER, trees)


def medusa(trees: TreeKind = "confident") -> MedusaDrafter:
    return MedusaDrafter(ToyHeads(num_heads=3, vocab_size=VOCAB), places(trees))


def block(least: float = 0.0) -> BlockDrafter:
    return BlockDrafter(ToyBlock(num_places=3, vocab_size=VOCAB), places(), least=least)


MAKERS: dict[str, Callable[[], Drafter]] = {"medusa": medusa, "block": block}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
both_ways = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
nodes = pytest.mark.parametrize("num_nodes", [0, 9], ids=["chain", "tree"])


@both
@both_ways
@nodes
def test_drafts_keep_to_budget_and_vocabulary(
    make: Callable[[], Drafter], params: SamplingParams, num_nodes: int
) -> None:
    for depth in range(6):
        budget = Budget(depth, num_nodes=num_nodes)
        draft = make().propose([state_row(TEXT, budget, params)])[0]
        check_shape(draft, min(depth, 3), params)
        assert len(draft) <= budget.size
        if num_nodes and depth > 1:
            assert len(draft) > draft.max_depth


@both
@both_ways
def test_rows_are_drafted_independently(
    make: Callable[[], Drafter], params: SamplingParams
) -> None:
    drafter = GivenStates(make())
    asked = [((1, 2, 1), 3), ((0, 2), 1), ((3, 3, 3, 3, 3), 0), ((2, 0, 2, 0), 2)]
    rows = [row(i, text, depth=depth, params=params) for i, (text, depth) in enumerate(asked)]
    for draft, (text, depth) in zip(drafter.propose(rows), asked, strict=True):
        check_same(draft, fresh_draft(lambda: GivenStates(make()), text, depth, params))
    assert drafter.propose([]) == []


@both
def test_nothing_is_drafted_before_the_target_has_read_the_text(
    make: Callable[[], Drafter],
) -> None:
    """All but the pending token, that is; and a text of one token has nothing else."""
    known = state_row(TEXT, Budget(3), GREEDY)
    for length in (0, len(TEXT) - 2):
        early = DraftRow(0, TEXT, None, Budget(3), GREEDY, known.rng, hidden=_until(length))
        assert len(make().propose([early])[0]) == 0
    assert len(make().propose([state_row((2,), Budget(3), GREEDY)])[0]) == 0
    unasked = DraftRow(0, TEXT, None, Budget(3), GREEDY, known.rng)
    assert [len(d) for d in make().propose([known, unasked, known])] == [3, 0, 3]


def _until(length: int) -> HiddenStates:
    def refuse(start: int, stop: int) -> Tensor:
        raise AssertionError((start, stop))

    return HiddenStates(length, refuse)


class Knowing:
    """Heads that know the text: a state is its token's position, and head i names the token i + 2
    places behind it."""

    hidden_layers = (LAYER,)
    num_heads = 4

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def logits(self, hidden_BD: Tensor, num_heads: int) -> Tensor:
        logits_HBV = torch.zeros(num_heads, len(hidden_BD), VOCAB)
        for head in range(num_heads):
            for index, position in enumerate(host_ints(hidden_BD[:, 0].long())):
                logits_HBV[head, index, self._text[position + 2 + head]] = 5
        return logits_HBV


def test_the_first_head_guesses_the_token_after_the_pending_one() -> None:
    text = (1, 2, 0, 4, 3, 0, 1, 1, 2, 4, 0, 3)
    for end in range(2, 8):
        hidden = HiddenStates(end - 1, lambda a, b: torch.arange(a, b).float()[:, None, None])
        asked = state_row(text[:end], Budget(4), GREEDY)
        known = DraftRow(0, asked.tokens, None, asked.budget, GREEDY, asked.rng, hidden=hidden)
        draft = MedusaDrafter(Knowing(text), places()).propose([known])[0]
        assert draft.tokens == text[end : end + 4]


def test_a_confident_tree_follows_the_heads_own_distributions() -> None:
    """Whatever the shape, the worthiest path is the chain, and siblings fall in likelihood."""
    for kind in ("confident", "calibrated"):
        drafter = medusa(kind)
        chain = drafter.propose([state_row(TEXT, Budget(3), GREEDY)])[0]
        tree = drafter.propose([state_row(TEXT, Budget(3, num_nodes=12), GREEDY)])[0]
        path: list[int] = []
        node = -1
        while children := tree.children(node):
            assert len({tree.tokens[child] for child in children}) == len(children)
            node = children[0]
            path.append(tree.tokens[node])
        assert tuple(path) == chain.tokens[: len(path)]


def test_heads_that_give_no_numbers_are_named() -> None:
    class Broken(ToyHeads):
        def logits(self, hidden_BD: Tensor, num_heads: int) -> Tensor:
            return super().logits(hidden_BD, num_heads) * torch.nan

    drafter = MedusaDrafter(
        Broken(vocab_size=VOCAB),
        ParallelHeadSampler(DraftSampler(lambda logits_MV: [-1] * len(logits_MV), "the heads")),
    )
    for budget in (Budget(2), Budget(2, num_nodes=6)):
        with pytest.raises(NumericsError, match="the heads"):
            drafter.propose([state_row(TEXT, budget, GREEDY)])


def test_the_first_place_is_shaped_as_the_target_will_be() -> None:
    asked = state_row(TEXT, Budget(2), GREEDY)
    best = medusa().propose([asked])[0].tokens[0]
    params = SamplingParams(logit_bias={best: -100.0})
    shaper = LogitsProcessor(params, 1)
    shaped = DraftRow(
        0, TEXT, None, Budget(2), params, asked.rng, shaper=shaper, hidden=asked.hidden
    )
    assert medusa().propose([shaped])[0].tokens[0] != best


def test_a_tree_has_no_token_that_a_mask_forbids() -> None:
    def three(text: Sequence[int]) -> Tensor:
        del text
        return torch.arange(VOCAB) == 3

    for kind in ("confident", "calibrated"):
        asked = state_row(TEXT, Budget(2, num_nodes=8), GREEDY)
        free = medusa(kind).propose([asked])[0]
        assert len(free.children(-1)) > 1
        shaper = LogitsProcessor(GREEDY, 1, allowed=three)
        row = DraftRow(
            0, TEXT, None, asked.budget, GREEDY, asked.rng, shaper=shaper, hidden=asked.hidden
        )
        draft = medusa(kind).propose([row])[0]
        assert [draft.tokens[node] for node in draft.children(-1)] == [3]


def test_a_draft_ends_where_the_net_stops_being_sure() -> None:
    assert num_sure([0.9, 0.5, 0.9], 0.4) == 3
    assert num_sure([0.9, 0.4, 0.9], 0.4) == 1
    assert num_sure([0.1], 0.4) == 0
    assert num_sure([0.1, 0.1], 0.0) == 2
    for params in (GREEDY, SAMPLED):
        # Confidences .9, .5 and .3: products .9, .45 and .135.
        for least, depth in ((0.95, 0), (0.5, 1), (0.2, 2), (0.1, 3)):
            draft = block(least).propose([state_row(TEXT, Budget(3), params)])[0]
            assert len(draft) == depth
