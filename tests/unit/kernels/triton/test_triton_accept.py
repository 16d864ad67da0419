"""One call judges a batch of chains as the rules in verify/ judge each, given the same numbers.

Shapes:  B = chains, K = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.core.draft import Draft
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.rng import KeyedRng, Role, RoundKeys
from outrider.core.sampling import Distributions
from outrider.plugins.gpu.kernels import launchers as triton_launchers
from outrider.plugins.gpu.kernels.launchers import Chains, ProbRows, Verdicts
from outrider.verify.exact import BlockRule, TokenRule
from unit.kernels.implementations import randn
from unit.kernels.triton.interpreted import triton_distributions

pytestmark = pytest.mark.wide

VOCAB, NUM_DRAFTED = 11, 2


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launchers, "MOST_OF_A_PIECE", 8)


@dataclass(frozen=True)
class Case:
    """Three chains: greedy, short and whole, drafted by distributions that are near the
    target's."""

    seed: int
    lengths: tuple[int, ...] = (2, 1, 2)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.5)

    @cached_property
    def keys(self) -> RoundKeys:
        chain_B = torch.arange(len(self.lengths))
        return RoundKeys(self.seed * (1 + chain_B), chain_B.int(), (7 + 3 * chain_B).int())

    def rng(self, chain: int) -> KeyedRng:
        return KeyedRng(self.seed * (1 + chain) % 2**64, chain, 7 + 3 * chain)

    def target(self) -> ProbRows:
        logits_BWV = randn(len(self.lengths), NUM_DRAFTED + 1, VOCAB, seed=self.seed % 1000) * 2
        return ProbRows(logits_BWV, torch.tensor(self.temperatures))

    def drafter(self) -> ProbRows:
        near_BWV = self.target().rows_RV
        near_BWV = near_BWV + 0.6 * randn(*near_BWV.shape, seed=1)
        return ProbRows(near_BWV[:, :-1].contiguous(), torch.tensor(self.temperatures))

    def drafted(self) -> Tensor:
        """Drawn by the kernel from the drafter's distributions; -1 where there is no token."""
        distributions = self.drafter()
        tokens_BK = torch.full((len(self.lengths), NUM_DRAFTED), -1)
        for node in range(NUM_DRAFTED):
            distribution = ProbRows(
                distributions.rows_RV[:, node].contiguous(), distributions.temperature_B
            )
            token_B = torch.empty(len(self.lengths), dtype=torch.int64)
            triton_distributions().draw(distribution, self.keys, node, Role.DRAFT, token_B)
            tokens_BK[:, node] = torch.where(node < torch.tensor(self.lengths), token_B, -1)
        return tokens_BK

    def verdicts(
        self, tokens_BK: Tensor, p: ProbRows, q: ProbRows | None, *, block: bool
    ) -> list[tuple[int, int]]:
        """(accepted, next token) of each chain."""
        num = len(self.lengths)
        out = Verdicts(torch.full((num,), -9, dtype=torch.int32), torch.full((num,), -9))
        chains = Chains(tokens_BK, torch.tensor(self.lengths, dtype=torch.int32))
        triton_distributions().judge(chains, p, q, self.keys, out, block=block)
        return list(zip(host_ints(out.num_accepted_B), host_ints(out.next_B), strict=True))

    def expected(
        self, rule: AcceptanceRule, tokens_BK: Tensor, p_BWV: Tensor, q_BKV: Tensor | None
    ) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for chain, length in enumerate(self.lengths):
            tokens = host_ints(tokens_BK[chain, :length])
            draft = Draft.chain(tokens, None if q_BKV is None else q_BKV[chain, :length])
            row = VerifyRow(
                draft, Distributions(probs_NV=p_BWV[chain, : length + 1]), self.rng(chain)
            )
            (verdict,) = rule([row])
            found.append((len(verdict.path), verdict.next_token))
        return found


def probabilities(distributions: ProbRows) -> Tensor:
    assert distributions.temperature_B is not None
    out = torch.full_like(distributions.rows_RV, torch.nan)
    triton_distributions().softmax(
        distributions.rows_RV.view(-1, VOCAB), distributions.temperature_B, out.view(-1, VOCAB)
    )
    return out


@pytest.mark.slow
@settings(max_examples=1)
@given(seed=st.integers(-(2**60), 2**60))
def test_chains_are_judged_as_the_rules_judge_them(seed: int) -> None:
    case = Case(seed)
    tokens_BK, q = case.drafted(), case.drafter()
    p_BWV, q_BKV = probabilities(case.target()), probabilities(q)
    for block, rule in ((True, BlockRule()), (False, TokenRule())):
        found = case.verdicts(tokens_BK, case.target(), q, block=block)
        assert found == case.expected(rule, tokens_BK, p_BWV, q_BKV)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_tokens_that_were_chosen_are_judged_by_the_token_rule(seed: int) -> None:
    case = Case(seed)
    tokens_BK = case.target().rows_RV[:, :-1].argmax(-1)
    tokens_BK[0, 1] = 3
    p_BWV = probabilities(case.target())
    found = case.verdicts(tokens_BK, case.target(), None, block=True)
    assert found == case.expected(TokenRule(), tokens_BK, p_BWV, None)


@pytest.mark.parametrize("block", [True, False])
def test_a_draft_that_is_the_target_is_kept(block: bool) -> None:
    case = Case(5, lengths=(2, 1, 2))
    p = case.target()
    same = ProbRows(p.rows_RV[:, :-1].contiguous(), p.temperature_B)
    best_BK = same.rows_RV.argmax(-1)
    found = case.verdicts(best_BK, p, same, block=block)
    assert [accepted for accepted, _ in found] == [2, 1, 2]


def test_no_drafts_are_plain_draws() -> None:
    case = Case(9, lengths=(0, 0, 0))
    p_BWV = probabilities(case.target())
    nothing_BK = torch.zeros(3, NUM_DRAFTED, dtype=torch.int64)
    found = case.verdicts(nothing_BK, case.target(), case.drafter(), block=True)
    assert found == [
        (0, case.rng(chain).pick(p_BWV[chain, 0], -1, Role.NEXT)) for chain in range(3)
    ]


def test_a_likely_token_makes_up_for_no_more_than_there_is() -> None:
    """Ratios of 2 and 1/2: the share after the first is 1, so the whole chain is kept half the
    time. Distributions that are probabilities already."""
    case = Case(1, lengths=(2,) * 6)
    p_WV = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.2, 0.4, 0.2, 0.2], [0.25] * 4])
    q_KV = torch.tensor([[0.25] * 4, [0.4, 0.2, 0.2, 0.2]])
    p_BWV, q_BKV = p_WV.repeat(6, 1, 1), q_KV.repeat(6, 1, 1)
    tokens_BK = torch.zeros(6, NUM_DRAFTED, dtype=torch.int64)
    found = case.verdicts(tokens_BK, ProbRows(p_BWV, None), ProbRows(q_BKV, None), block=True)
    assert found == case.expected(BlockRule(), tokens_BK, p_BWV, q_BKV)
    assert 0 < sum(accepted == 2 for accepted, _ in found) < 6
