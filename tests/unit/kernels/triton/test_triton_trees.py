"""Kernels judge trees, and chains, as the rules in verify/ judge each, given the same numbers.

Shapes:  B = trees, K = nodes, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.core.draft import Draft, Verdict
from outrider.core.params import SamplingParams
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.rng import KeyedRng, RoundKeys
from outrider.core.sampling import Distributions, processed_probs
from outrider.plugins.gpu.kernels import launchers
from outrider.plugins.gpu.rounds.sampling import Filters, Rows
from outrider.plugins.gpu.rounds.trees import TorchTreeProbs, TreeProbs, Way
from outrider.plugins.gpu.rounds.triton import RoundKernels, TritonTreeProbs
from outrider.plugins.gpu.rounds.verdicts import TreeDrafts, follow_trees
from outrider.verify.exact import BlockRule, MatchRule, TokenRule
from unit.kernels.implementations import randn

pytestmark = pytest.mark.wide

VOCAB, CPU = 11, torch.device("cpu")
# A broad tree, a chain, and a tree of which two nodes are missing.
PARENTS = ((-1, -1, -1, 0, 0, 2), (-1, 0, 1, 2, 3, 4), (-1, -1, 1, 1))
CHAINS = ((-1, 0, 1, 2), (), (-1, 0))
TEMPERATURES = (0.8, 0.0, 2.5)
RULES: dict[Way, AcceptanceRule] = {
    "greedy": TokenRule(),
    "match": MatchRule(),
    "token": TokenRule(),
    "block": BlockRule(),
}


class Case:
    """Trees over few tokens, so that some are accepted. Siblings are drawn as drafters draw
    them: what a node is drawn from has none of its elder siblings."""

    def __init__(self, way: Way, seed: int, *, filtered: bool) -> None:
        self.filtered, self.parents = filtered, CHAINS if way == "block" else PARENTS
        self.k = max(map(len, self.parents))
        self.temperatures = (0.0,) * 3 if way == "greedy" else TEMPERATURES
        self.logits_BWV = 2 * randn(3, self.k + 1, VOCAB, seed=seed)
        self.seeds, self.starts = (seed + 5, seed + 9, 77), (7, 30, 12)
        self.params = [SamplingParams(temperature=t) for t in self.temperatures]
        if filtered:
            self.params[0] = replace(self.params[0], top_k=6, top_p=0.9)
            self.params[2] = replace(self.params[2], min_p=0.1)
        drawn = way in ("token", "block")
        self.drafts = [
            self._draft(row, torch.Generator().manual_seed(seed + row), drawn=drawn and row != 1)
            for row in range(3)
        ]

    def _draft(self, row: int, rng: torch.Generator, *, drawn: bool) -> Draft:
        parents = self.parents[row]
        tokens: list[int] = []
        probs: list[Tensor] = []
        for node, parent in enumerate(parents):
            near_V = self.logits_BWV[row, parent + 1] + torch.randn(VOCAB, generator=rng)
            probs_V = torch.softmax(near_V, -1)
            elder = [tokens[n] for n in range(node) if parents[n] == parent]
            probs_V[elder] = 0
            probs_V /= probs_V.sum()
            tokens.append(int(torch.multinomial(probs_V, 1, generator=rng)))
            probs.append(probs_V)
        probs_NV = torch.stack(probs) if drawn and probs else None
        return Draft(tuple(tokens), parents, probs_NV)

    def found(self, judge: TreeProbs, way: Way) -> list[Verdict]:
        num = len(self.drafts)
        tokens_BK = torch.zeros(num, self.k, dtype=torch.int64)
        parents_BK = torch.full_like(tokens_BK, -2)
        depths_BW = torch.zeros(num, self.k + 1, dtype=torch.int64)
        q_BKV = torch.full((num, self.k, VOCAB), 0.5)
        for row, draft in enumerate(self.drafts):
            size = len(draft)
            tokens_BK[row, :size] = torch.tensor(draft.tokens, dtype=torch.int64)
            parents_BK[row, :size] = torch.tensor(draft.parents, dtype=torch.int64)
            for node, parent in enumerate(draft.parents):
                depths_BW[row, node + 1] = depths_BW[row, parent + 1] + 1
            if draft.probs_NV is not None:
                q_BKV[row, :size] = draft.probs_NV
        drawn_B = torch.tensor([draft.probs_NV is not None for draft in self.drafts])
        q = q_BKV if drawn_B.any() else None
        keys = RoundKeys(torch.tensor(self.seeds), torch.arange(num), torch.tensor(self.starts))
        filters = Filters(
            torch.tensor([one.top_k for one in self.params]),
            torch.tensor([one.top_p for one in self.params], dtype=torch.float64),
            torch.tensor([one.min_p for one in self.params]),
        )
        sizes_B = torch.tensor([len(draft) for draft in self.drafts])
        rows = Rows(torch.tensor(self.temperatures), sizes_B, keys, filters)
        if way == "greedy" or all(
            one == SamplingParams(temperature=one.temperature) for one in self.params
        ):
            rows = replace(rows, filters=None)
        drafts = TreeDrafts(tokens_BK, parents_BK, drawn_B, q)
        found, broken_B = judge.judge(self.logits_BWV.clone(), drafts, depths_BW, rows)
        assert not broken_B.any()
        return [
            Verdict(tuple(host_ints(path_K[:kept])), token)
            for path_K, kept, token in zip(
                found.path_BK,
                host_ints(found.num_accepted_B),
                host_ints(found.next_B),
                strict=True,
            )
        ]

    def expected(self, way: Way) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for row, (draft, params) in enumerate(zip(self.drafts, self.params, strict=True)):
            logits_NV = self.logits_BWV[row, : len(draft) + 1].clone()
            made = (
                Distributions(tokens=tuple(host_ints(logits_NV.argmax(-1))))
                if params.greedy
                else Distributions(probs_NV=processed_probs(logits_NV, params))
            )
            rng = KeyedRng(self.seeds[row], row, self.starts[row])
            verdicts += RULES[way]([VerifyRow(draft, made, rng)])
        return verdicts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("way", get_args(Way))
def test_the_definition_decides_as_the_rules_do(way: Way, filtered: bool, seed: int) -> None:
    case = Case(way, seed, filtered=filtered)
    assert case.found(TorchTreeProbs(CPU, way, case.k), way) == case.expected(way)


@pytest.mark.parametrize(("way", "seed"), [*((way, 0) for way in get_args(Way)), ("token", 1)])
def test_kernels_decide_as_the_rules_do(
    way: Way, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "MOST_OF_A_PIECE", 8 if seed else 16)
    case = Case(way, seed, filtered=False)
    assert case.found(TritonTreeProbs(RoundKernels(CPU), way), way) == case.expected(way)


def test_a_walk_skips_what_hangs_elsewhere() -> None:
    """Three tokens, so nodes of other branches have the target's own token too; some trees lack
    their last nodes."""
    rng = torch.Generator().manual_seed(3)
    tokens_BK = torch.randint(3, (12, 6), generator=rng)
    own_BW = torch.randint(3, (12, 7), generator=rng)
    columns = [torch.randint(-1, node, (12,), generator=rng) for node in range(1, 6)]
    parents_BK = torch.stack([torch.full((12,), -1), *columns], dim=1)
    parents_BK[::2, 4:] = -2
    wanted = follow_trees(TreeDrafts(tokens_BK, parents_BK, tokens_BK[:, 0] < 0), own_BW)
    path_BK = torch.empty_like(tokens_BK)
    kept_B, next_B = torch.empty_like(own_BW[:, 0]), torch.empty_like(own_BW[:, 0])
    out = (path_BK, kept_B, next_B)
    RoundKernels(CPU).trees.follow((tokens_BK, parents_BK), own_BW, out)
    assert torch.equal(kept_B, wanted.num_accepted_B)
    assert torch.equal(next_B, wanted.next_B)
    assert kept_B.max() > 1
    for path_K, wanted_K, kept in zip(path_BK, wanted.path_BK, host_ints(kept_B), strict=True):
        assert torch.equal(path_K[:kept], wanted_K[:kept])


@pytest.mark.slow
def test_kernels_filter_before_they_decide() -> None:
    case, judge = Case("block", 1, filtered=True), TritonTreeProbs(RoundKernels(CPU), "block")
    assert case.found(judge, "block") == case.expected("block")


@pytest.mark.parametrize("way", get_args(Way))
def test_some_are_accepted_and_some_refused(way: Way) -> None:
    """Or the tests above would compare little."""
    cases = [Case(way, seed, filtered=False) for seed in range(3)]
    kept = [len(verdict.path) for case in cases for verdict in case.expected(way)]
    assert 0 in kept
    assert max(kept) > 1


@pytest.mark.parametrize("way", ["greedy", "token"])
def test_logits_that_are_no_numbers_are_reported(way: Way) -> None:
    case = Case(way, 1, filtered=False)
    case.logits_BWV[0, 0, 3] = torch.nan
    for judge in (TorchTreeProbs(CPU, way, case.k), TritonTreeProbs(RoundKernels(CPU), way)):
        with pytest.raises(AssertionError):
            case.found(judge, way)
