"""Block drafters keep the target's distribution: whole generations, enumerated.

Shapes:  B = texts, S = size of a block, M = logits rows, D = width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from checks.distribution import assert_same_distribution
from checks.engine_distribution import PROMPT, VOCAB, engine_distribution, target_distribution
from doubles.rig import BRANCHING, SAMPLER, Rig
from doubles.toy_heads import LAYER, WithHidden
from doubles.toy_hybrid import ToyHybrid
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget, Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, DraftNeeds, DraftRow, StepRow
from outrider.core.rng import draw_for
from outrider.drafters.common.growth import DraftSampler, grown
from outrider.plugins.heads.block_drafts import BlockDrafter, Write
from outrider.plugins.heads.blocks import NewContext
from outrider.plugins.heads.medusa import ParallelHeadSampler
from outrider.plugins.heads.native_blocks import Written
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

WIDTH = 4
RULES: dict[str, AcceptanceRule] = {
    "block": BlockRule(),
    "token": TokenRule(),
    "match": MatchRule(),
    "coupled": CoupledRule(),
}
FOUR = SamplingParams(temperature=1.3, top_k=2, max_tokens=4)


@dataclass(frozen=True, slots=True)
class ToySizes:
    block_size: int = 2
    most: int = 2


class ToyBackbone:
    """A backbone whose context is read by a toy hybrid, in float64."""

    hidden_layers = (LAYER,)
    num_texts = 2
    config = ToySizes()

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(3)
        self._block = ToyHybrid(vocab_size=VOCAB, seed=7, num_slots=2048)
        self.state = self._block.state
        self._out_VSD = torch.randn(VOCAB, 2, WIDTH, generator=rng, dtype=torch.float64)

    def read(self, parts: Sequence[NewContext], *, writes: bool = True) -> Tensor:
        hidden: list[Tensor] = []
        for part in parts:
            tokens = part.row.tokens[part.start : part.stop]
            if writes:
                tokens = [*tokens, part.row.tokens[-1]]
            row = StepRow.chain(part.row.seq_id, tokens, logits_from=len(tokens) - 1)
            logits_MV = self._block.step([row], DraftNeeds()).logits_MV
            hidden.append(torch.einsum("v,vsd->sd", logits_MV[0], self._out_VSD).tanh())
        return torch.stack(hidden)

    def write(self, parts: Sequence[NewContext], depth: int) -> Written:
        del depth
        hidden_BSD = self.read(parts)
        return Written(hidden_BSD, hidden_BSD)


class ToyPath:
    """Logits that depend on state, depth and the token before."""

    def __init__(self, rows: Sequence[DraftRow], hidden_BSD: Tensor) -> None:
        rng = torch.Generator().manual_seed(5)
        self._out_DV = torch.randn(WIDTH, VOCAB, generator=rng, dtype=torch.float64)
        self._after_VV = torch.randn(VOCAB, VOCAB, generator=rng, dtype=torch.float64)
        self._hidden_BSD, self._text = hidden_BSD, list(range(len(rows)))
        self._pending = [row.tokens[-1] for row in rows]

    def first(self) -> Tensor:
        return self._logits(self._pending, 0)

    def next(self, above: Sequence[int], tokens: Sequence[int], depth: int) -> Tensor:
        self._text = [self._text[index] for index in above]
        return self._logits(tokens, depth)

    def _logits(self, tokens: Sequence[int], depth: int) -> Tensor:
        hidden_MD = self._hidden_BSD[self._text, depth]
        return hidden_MD @ self._out_DV + self._after_VV[list(tokens)]


def along_paths(sampler: DraftSampler) -> Write:
    return lambda rows, written: grown(sampler, rows, ToyPath(rows, written.hidden_BSD))


def at_once(sampler: DraftSampler) -> Write:
    parallel = ParallelHeadSampler(sampler)
    out_DV = torch.randn(WIDTH, VOCAB, generator=torch.Generator().manual_seed(9)).double()

    def write(rows: Sequence[DraftRow], written: Written) -> list[Draft]:
        return [
            parallel.draft(row, hidden_SD[: row.budget.depth] @ out_DV)
            for row, hidden_SD in zip(rows, written.hidden_BSD, strict=True)
        ]

    return write


WAYS = {"paths": along_paths, "at once": at_once}


def drafter(way: str, sampler: DraftSampler) -> BlockDrafter:
    toy = cast("Any", ToyBackbone())
    return BlockDrafter("dflash", toy, WAYS[way](sampler), chunk=2, window=100)


# Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", RULES)
def test_a_generation_follows_the_target(rule: str, way: str) -> None:
    sampler = replace(SAMPLER, draw=draw_for(rule))
    target = WithHidden(ToyHybrid(vocab_size=VOCAB, seed=0))
    rig = Rig(target, drafter(way, sampler), RULES[rule], k=2, chunk=3)
    found = engine_distribution(rig, PROMPT, FOUR)
    assert max(trace.num_drafted for trace in rig.traces) == 2
    assert_same_distribution(found, target_distribution(ToyHybrid, PROMPT, FOUR))


@pytest.mark.parametrize("way", WAYS)
def test_a_generation_of_trees_follows_the_target(way: str) -> None:
    target = WithHidden(ToyHybrid(vocab_size=VOCAB, seed=0))
    trees = FixedController(Budget(2, num_nodes=4))
    rig = Rig(target, drafter(way, BRANCHING), k=2, chunk=3, controller=trees)
    found = engine_distribution(rig, PROMPT, FOUR)
    assert max(trace.num_drafted for trace in rig.traces) > 2
    assert_same_distribution(found, target_distribution(ToyHybrid, PROMPT, FOUR))
