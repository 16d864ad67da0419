"""Drafts, verdicts and outcomes: trees as tuples, and where each emitted token came from."""

from __future__ import annotations

import pytest
import torch

from outrider.core.draft import Draft, Origin, Outcome, Verdict, common_prefix
from outrider.core.errors import DrafterError
from outrider.core.tree import ROOT

TREE = Draft((5, 6, 7, 8, 9), (ROOT, ROOT, 0, 0, 2))


def test_children_come_in_drawing_order() -> None:
    assert TREE.children(ROOT) == (0, 1)
    assert TREE.children(0) == (2, 3)
    assert TREE.children(4) == ()


def test_max_depth_counts_tokens_of_the_longest_path() -> None:
    assert TREE.max_depth == 3
    assert Draft.chain([4, 5]).max_depth == 2
    assert Draft.empty().max_depth == 0


def test_a_chain_is_a_tree_of_one_branch() -> None:
    chain = Draft.chain([4, 5, 6])
    assert chain.parents == (ROOT, 0, 1)
    assert len(chain) == 3
    assert Draft.chain([]) == Draft.empty()


@pytest.mark.parametrize(
    ("drafted", "text", "kept"),
    [([], [4], 0), ([4], [], 0), ([4, 5], [5, 4], 0), ([4, 5], [4, 6, 5], 1), ([4, 5], [4, 5], 2)],
)
def test_a_chain_is_kept_up_to_where_the_text_goes_on_otherwise(
    drafted: list[int], text: list[int], kept: int
) -> None:
    assert common_prefix(drafted, text) == common_prefix(text, drafted) == kept


@pytest.mark.parametrize("parents", [(1, ROOT), (0,), (ROOT, 1), (-2,), (ROOT, ROOT, ROOT)])
def test_parents_come_before_children(parents: tuple[int, ...]) -> None:
    with pytest.raises(DrafterError):
        Draft((1, 2), parents)


def test_every_node_has_a_distribution_or_none_has() -> None:
    with pytest.raises(DrafterError):
        Draft.chain([1, 2], torch.ones(1, 3))


def test_an_outcome_emits_its_path_and_one_more() -> None:
    outcome = Outcome(0, TREE, Verdict((0, 2, 4), 3))
    assert outcome.tokens == (5, 7, 9, 3)
    assert outcome.num_accepted == 3
    assert Outcome(0, Draft.empty(), Verdict((), 8)).tokens == (8,)


def test_ending_an_outcome_turns_an_accepted_token_into_its_last() -> None:
    outcome = Outcome(4, TREE, Verdict((0, 2, 4), 3))
    assert outcome.keep(4) is outcome
    assert outcome.keep(3) == Outcome(4, TREE, Verdict((0, 2), 9))
    assert outcome.keep(1) == Outcome(4, TREE, Verdict((), 5))
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="cannot be kept"):
            outcome.keep(wrong)


@pytest.mark.parametrize(
    ("draft", "verdict", "origins"),
    [
        (Draft.empty(), Verdict((), 1), ("plain",)),
        (TREE, Verdict((), 1), ("recovered",)),
        (TREE, Verdict((0,), 1), ("accepted", "recovered")),
        (TREE, Verdict((1,), 1), ("accepted", "bonus")),
        (TREE, Verdict((0, 2, 4), 3), ("accepted", "accepted", "accepted", "bonus")),
        (TREE, Verdict((0, 2), 9), ("accepted", "accepted", "accepted")),
    ],
)
def test_origins(draft: Draft, verdict: Verdict, origins: tuple[Origin, ...]) -> None:
    assert Outcome(0, draft, verdict).origins == origins
