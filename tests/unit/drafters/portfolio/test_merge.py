"""Drafts of several members in one tree, or one chain."""

from __future__ import annotations

import pytest

from outrider.core.draft import Budget
from outrider.core.tree import ROOT
from outrider.drafters.common.context import ScoredDraft
from outrider.drafters.common.merge import Proposal, made_by, merged

TREE = Budget(4, num_nodes=8, price=0.01)
CHAIN = Budget(4, price=0.01)


def chain(name: str, *tokens: int, kept: tuple[float, ...]) -> Proposal:
    return Proposal(name, ScoredDraft(tokens, kept))


def test_one_proposal_stays_as_it_is() -> None:
    tree = ScoredDraft((5, 6, 7), (0.6, 0.3, 0.2), (ROOT, ROOT, 0))
    draft = merged([Proposal("suffix", tree)], TREE)
    assert (draft.tokens, draft.parents, draft.accept_probs) == (
        (5, 6, 7),
        (ROOT, ROOT, 0),
        tree.kept,
    )
    assert (draft.by, draft.parts) == ("suffix", ())
    timed = made_by(tree.draft, "model", 0.25, trial=True)
    assert (timed.by, timed.parts) == ("model", (("model", (0, 1, 2), 0.25, True),))


def test_common_beginnings_are_shared_and_agreement_counts() -> None:
    """Odds multiply: 0.5 and 0.8 are odds of 1 and 4, and 0.8 together; after the split 0.5 against
    0.75 are odds of 1 and 3 against 1 for any other token."""
    one = chain("a", 1, 2, kept=(0.5, 0.25))
    other = chain("b", 1, 3, kept=(0.8, 0.6))
    draft = merged([one, other], TREE)
    assert (draft.tokens, draft.parents) == ((1, 3, 2), (ROOT, 0, 0))
    assert draft.accept_probs == pytest.approx((0.8, 0.8 * 3 / 5, 0.8 * 1 / 5))
    assert draft.by == "a+b"
    assert [part[:2] for part in draft.parts] == [("a", (0, 2)), ("b", (0, 1))]


def test_chains_that_agree_are_pooled_as_in_a_tree() -> None:
    """Odds of 4 and 1, then 3 and 3, then of the longer one alone; the same with a third member
    whose token is worth no row, which takes the general way."""
    one = chain("a", 1, 2, kept=(0.8, 0.6))
    other = chain("b", 1, 2, 3, kept=(0.5, 0.375, 0.3))
    draft = merged([one, other], TREE)
    assert (draft.tokens, draft.is_chain, draft.by) == ((1, 2, 3), True, "a+b")
    assert draft.accept_probs == pytest.approx((0.8, 0.8 * 0.9, 0.8 * 0.9 * 0.8))
    assert [part[:2] for part in draft.parts] == [("a", (0, 1)), ("b", (0, 1, 2))]
    general = merged([one, other, chain("c", 9, kept=(1e-9,))], TREE)
    assert general.tokens == draft.tokens
    assert general.accept_probs == pytest.approx(draft.accept_probs)
    assert general.parts[:2] == draft.parts
    assert len(merged([one, other], Budget(4, num_nodes=5, price=0.9))) == 3


def test_one_members_own_siblings_keep_their_probabilities() -> None:
    tree = ScoredDraft((5, 6), (0.5, 0.4), (ROOT, ROOT))
    far = chain("far", 5, 9, kept=(1e-9, 1e-9))
    draft = merged([Proposal("tree", tree), far], TREE)
    assert sum(draft.accept_probs[:2]) < 1
    alone = merged([Proposal("tree", tree), chain("b", 7, kept=(1e-12,))], TREE)
    assert alone.accept_probs == pytest.approx((0.5, 0.4))


def test_hopeless_tokens_are_left_out() -> None:
    draft = merged([chain("a", 1, 2, kept=(0.0, 0.0)), chain("b", 3, kept=(0.6,))], TREE)
    assert draft.tokens == (3,)


def test_siblings_of_members_that_are_sure_add_up_to_less_than_1() -> None:
    draft = merged([chain("a", 1, kept=(1.0,)), chain("b", 2, kept=(0.99,))], TREE)
    assert draft.tokens == (1, 2)
    assert sum(draft.accept_probs) < 1
    assert draft.accept_probs[0] > draft.accept_probs[1]


def test_the_likeliest_nodes_fill_the_budget() -> None:
    one = chain("a", 1, 1, 1, 1, kept=(0.9, 0.8, 0.7, 0.6))
    other = chain("b", 2, 2, 2, 2, kept=(0.2, 0.1, 0.05, 0.04))
    draft = merged([one, other], Budget(4, num_nodes=5, price=0.01))
    assert len(draft) == 5
    assert list(draft.accept_probs) == sorted(draft.accept_probs, reverse=True)
    assert draft.tokens.count(1) == 4
    unpriced = merged([one, other], Budget(4, num_nodes=8))
    assert unpriced.tokens.count(2) < 4


def test_without_branches_the_best_path_is_drafted() -> None:
    short = chain("a", 1, kept=(0.6,))
    long = chain("b", 2, 2, 2, kept=(0.6, 0.55, 0.5))
    draft = merged([short, long], CHAIN)
    assert (draft.tokens, draft.by) == ((2, 2, 2), "b")
    assert draft.is_chain
    late = merged([chain("a", 2, kept=(0.9,)), chain("b", 3, kept=(0.1,))], CHAIN)
    assert late.parts == (("a", (0,), 0.0, False), ("b", (), 0.0, False))


def test_a_text_is_followed_along_any_branch() -> None:
    tree = ScoredDraft((5, 6, 7, 8), (0.5, 0.3, 0.2, 0.1), (ROOT, ROOT, 0, 1)).draft
    assert [tree.followed(text) for text in ([5, 7, 9], [6, 8], [6, 7], [9], [])] == [2, 2, 1, 0, 0]


def test_a_cut_draft_keeps_the_parts_of_what_is_left() -> None:
    draft = merged([chain("a", 1, 2, kept=(0.9, 0.8)), chain("b", 1, 3, kept=(0.8, 0.1))], TREE)
    assert [part.nodes for part in draft.first(2).parts] == [(0, 1), (0,)]
    timed = made_by(draft, "model", 0.5).first(0)
    assert (len(timed), [part.seconds for part in timed.parts]) == (0, [0.5])
