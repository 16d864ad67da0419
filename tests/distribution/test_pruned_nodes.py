"""A drafted token that a mask forbids is a refusal: what leaving it out would do to the text.

The engine keeps such a node, whose target probability is zero, and the rules go on with what its
draft left. To leave it out and to draw afresh looks the same and is not, where rules read the
draft's distribution.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checks.distribution import assert_same_distribution, joint_distribution, normal, walked
from doubles.every_branch import Distribution, Tokens
from outrider.core.draft import Draft, Outcome
from outrider.core.protocols import AcceptanceRule, VerifyRow
from outrider.core.rng import Rng, Role
from outrider.core.sampling import Distributions
from outrider.verify.exact import BlockRule, CoupledRule, MatchRule, TokenRule

READ_DRAFTS: list[AcceptanceRule] = [TokenRule(), BlockRule()]
READ_NONE: list[AcceptanceRule] = [MatchRule(), CoupledRule()]
# The third token is forbidden, and drafted more often than not.
TARGET, PROPOSAL = normal((1, 2, 0)), normal((1, 1, 3))


def first_tokens(rule: AcceptanceRule, *, prunes: bool) -> Distribution:
    """The distribution of the first token of a round with one drafted token."""

    def one_round(rng: Rng) -> Tokens:
        token = rng.pick(PROPOSAL, 0, Role.DRAFT)
        draft = Draft((token,), (-1,), PROPOSAL[None])
        if prunes and TARGET[token] == 0:
            draft = Draft.empty()
        rows = torch.stack([TARGET] * (1 + len(draft)))
        verdict = rule([VerifyRow(draft, Distributions(probs_NV=rows), rng)])[0]
        return Outcome(0, draft, verdict).tokens[:1]

    return walked(one_round)


def target_of(_: Tokens) -> Tensor:
    return TARGET


@pytest.mark.parametrize("rule", READ_DRAFTS + READ_NONE, ids=lambda rule: rule.name)
def test_a_forbidden_node_that_is_kept_changes_nothing(rule: AcceptanceRule) -> None:
    found = first_tokens(rule, prunes=False)
    assert_same_distribution(found, joint_distribution(target_of, 1), 1e-9)


@pytest.mark.parametrize("rule", READ_DRAFTS, ids=lambda rule: rule.name)
def test_one_that_is_left_out_would_change_the_text(rule: AcceptanceRule) -> None:
    """By Q(forbidden) times the target, in place of what the draft left of it."""
    found = first_tokens(rule, prunes=True)
    assert found[(0,)] == pytest.approx(0.2 + 0.6 / 3)
    assert found[(0,)] > float(TARGET[0]) + 0.05


@pytest.mark.parametrize("rule", READ_NONE, ids=lambda rule: rule.name)
def test_rules_that_read_no_draft_do_not_mind(rule: AcceptanceRule) -> None:
    found = first_tokens(rule, prunes=True)
    assert_same_distribution(found, joint_distribution(target_of, 1), 1e-9)
