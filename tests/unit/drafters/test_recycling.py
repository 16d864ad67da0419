"""Token recycling: the table, the tree through it, and when it says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.protocols import DraftRow
from outrider.core.tree import ROOT
from outrider.testing import row
from outrider_lab.drafters.recycling import WIDTH, RecyclingDrafter

VOCAB = 20


def asked(
    text: Sequence[int], last: Outcome | None = None, *, depth: int = 4, num_nodes: int = 0
) -> DraftRow:
    return replace(row(0, text, depth=depth, last=last), budget=Budget(depth, num_nodes=num_nodes))


def likely(best: int) -> tuple[int, ...]:
    return tuple((best + rank) % VOCAB for rank in range(WIDTH))


def plain(next_token: int, best: int) -> Outcome:
    """A round without a draft, in which the target ranked as `likely(best)` says."""
    return Outcome(0, Draft.empty(), Verdict((), next_token), likely=(likely(best),))


def counting(num_rounds: int) -> tuple[RecyclingDrafter, list[int], Outcome]:
    """After a text in which every token is followed by the next one, as was ranked."""
    drafter = RecyclingDrafter(vocab_size=VOCAB)
    text = [0]
    drafter.open(0, text)
    last: Outcome | None = None
    for _ in range(num_rounds):
        drafter.propose([asked(text, last)])
        last = plain((text[-1] + 1) % VOCAB, (text[-1] + 1) % VOCAB)
        text.append(last.verdict.next_token)
    assert last is not None
    return drafter, text, last


def test_what_was_ranked_after_a_token_is_kept_by_that_token() -> None:
    drafter = RecyclingDrafter(vocab_size=VOCAB)
    drafter.open(0, [3])
    draft = Draft((5, 6), (ROOT, ROOT))
    last = Outcome(0, draft, Verdict((1,), 9), likely=(likely(1), likely(2), likely(7)))
    drafter.propose([asked([3, 6, 9], last)])
    assert drafter.entries(3) == likely(1)
    assert drafter.entries(5) == likely(2)
    assert drafter.entries(6) == likely(7)
    assert drafter.entries(9) == ()


def test_a_shorter_outcome_is_of_the_token_before_it() -> None:
    """The round was ended within its draft: the root is still the token before its first."""
    drafter = RecyclingDrafter(vocab_size=VOCAB)
    drafter.open(0, [3])
    last = Outcome(0, Draft.chain([5, 6]), Verdict((), 5), likely=(likely(1), likely(2), likely(7)))
    drafter.propose([asked([3, 5], last)])
    assert drafter.entries(3) == likely(1)


def test_few_ranks_are_kept_as_few() -> None:
    drafter = RecyclingDrafter(vocab_size=VOCAB)
    drafter.open(0, [3])
    last = Outcome(0, Draft.empty(), Verdict((), 4), likely=((4, 1),))
    drafter.propose([asked([3, 4], last)])
    assert drafter.entries(3) == (4, 1)


def test_a_chain_follows_first_entries() -> None:
    drafter, text, last = counting(2 * VOCAB)
    draft = drafter.propose([asked(text, last, depth=3)])[0]
    assert draft.tokens == tuple((text[-1] + place) % VOCAB for place in (1, 2, 3))
    assert draft.parents == (-1, 0, 1)
    assert draft.probs_NV is None


def test_a_tree_has_siblings_in_the_order_of_their_ranks() -> None:
    fresh = RecyclingDrafter(vocab_size=VOCAB)
    fresh.open(0, [0])
    step: Outcome | None = None
    written = [0]
    for place in range(VOCAB):
        # The second entry is right as often as the first.
        fresh.propose([asked(written, step)])
        token = (written[-1] + 1 + place % 2) % VOCAB
        step = plain(token, (written[-1] + 1) % VOCAB)
        written.append(token)
    draft = fresh.propose([asked(written, step, depth=3, num_nodes=9)])[0]
    children = draft.children(ROOT)
    assert len(children) >= 2
    entries = fresh.entries(written[-1])
    assert tuple(draft.tokens[node] for node in children) == entries[: len(children)]
    assert len(draft) <= 9
    assert draft.max_depth <= 3


def test_rates_follow_the_text_and_silence_what_is_never_right() -> None:
    """A text that goes elsewhere than it was ranked: in the end nothing is proposed."""
    drafter = RecyclingDrafter(vocab_size=VOCAB)
    text = [0]
    drafter.open(0, text)
    last: Outcome | None = None
    drafted = list[int]()
    for place in range(120):
        drafted.append(len(drafter.propose([asked(text, last)])[0]))
        token = (text[-1] * 7 + 3 + place) % VOCAB
        last = plain(token, (token + 1) % VOCAB)
        text.append(token)
    assert sum(drafted[:40]) > 0
    assert sum(drafted[-20:]) == 0
    assert drafter.rates()[0] < 0.12


def test_nothing_is_known_of_a_token_never_verified() -> None:
    drafter = RecyclingDrafter(vocab_size=VOCAB)
    drafter.open(0, [1, 2, 3])
    assert drafter.propose([asked([1, 2, 3])])[0].tokens == ()


@pytest.mark.parametrize("num_nodes", [0, 7])
@given(text=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), depth=st.integers(0, 5))
def test_drafts_keep_to_the_budget(text: list[int], depth: int, num_nodes: int) -> None:
    drafter = RecyclingDrafter(vocab_size=VOCAB)
    drafter.open(0, text[:1])
    last: Outcome | None = None
    for end in range(1, len(text) + 1):
        found = drafter.offers([asked(text[:end], last, depth=depth, num_nodes=num_nodes)])[0]
        assert found.draft.max_depth <= depth
        assert len(found.draft) == len(found.kept) <= (max(depth, num_nodes) if depth else 0)
        assert all(0 <= token < VOCAB for token in found.draft.tokens)
        last = plain(text[end % len(text)], text[0])


def test_a_forgotten_table_is_that_of_a_new_drafter() -> None:
    drafter, _, _ = counting(8)
    drafter.close(0)
    drafter.forget()
    assert drafter.entries(3) == ()
    assert drafter.rates() == RecyclingDrafter(vocab_size=VOCAB).rates()
