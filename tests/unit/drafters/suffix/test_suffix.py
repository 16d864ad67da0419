"""Suffix lookup: what is proposed, how deep, from where, and with how much memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.draft import Budget
from outrider.core.protocols import DraftRow
from outrider.core.tree import ROOT
from outrider.drafters.common.context import ScoredDraft, least_kept
from outrider.drafters.suffix import SuffixDrafter
from outrider.kernels.native.rounds import NativeLookups
from outrider.testing import row

LINE = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)


def asked(seq_id: int, text: Sequence[int], *, depth: int = 8, num_nodes: int = 0) -> DraftRow:
    return replace(row(seq_id, text, depth=depth), budget=Budget(depth, num_nodes=num_nodes))


def told(drafter: SuffixDrafter, seq_id: int, text: Sequence[int], *, prompt: int = 1) -> None:
    """A whole request whose every token is heard of by itself."""
    drafter.open(seq_id, text[:prompt])
    for end in range(prompt, len(text) + 1):
        drafter.propose([asked(seq_id, text[:end])])
    drafter.close(seq_id)


def offer(
    drafter: SuffixDrafter, text: Sequence[int], *, depth: int = 8, num_nodes: int = 0
) -> ScoredDraft:
    drafter.open(99, text)
    found = drafter.offers([asked(99, text, depth=depth, num_nodes=num_nodes)])[0]
    drafter.close(99)
    return found


def check_offer(found: ScoredDraft, depth: int, num_nodes: int) -> None:
    draft, kept = found.draft, found.kept
    assert len(kept) == len(draft) <= max(depth, num_nodes)
    assert draft.max_depth <= depth
    assert list(kept) == sorted(kept, reverse=True)
    least = least_kept(Budget(depth, num_nodes=num_nodes))
    assert all(least <= probability <= 1 for probability in kept)
    for node, parent in enumerate(draft.parents):
        above = 1.0 if parent == ROOT else kept[parent]
        assert kept[node] <= above
    for parent in range(ROOT, len(draft)):
        siblings = draft.children(parent)
        above = 1.0 if parent == ROOT else kept[parent]
        assert len({draft.tokens[node] for node in siblings}) == len(siblings)
        assert sum(kept[node] for node in siblings) <= above + 1e-9


def test_what_is_forgotten_is_what_requests_wrote_and_not_the_corpus() -> None:
    corpus = (30, 31, 32, 33, 34, 35)
    fresh, drafter = SuffixDrafter(corpus=[corpus]), SuffixDrafter(corpus=[corpus])
    for seq_id in range(3):
        told(drafter, seq_id, LINE)
    assert offer(drafter, LINE[:4]).draft.tokens
    drafter.forget()
    assert not offer(drafter, LINE[:4]).draft.tokens
    assert offer(drafter, corpus[:3]) == offer(fresh, corpus[:3])


def test_it_goes_on_as_the_text_did() -> None:
    drafter = SuffixDrafter()
    text = [*LINE, 1, *LINE[:6]]
    assert offer(drafter, text, depth=3).draft.tokens == LINE[6:9]


def test_a_text_that_repeats_with_a_short_period_is_drafted_on_and_on() -> None:
    drafter = SuffixDrafter()
    assert offer(drafter, [1, 2, 3] * 8, depth=5).draft.tokens == (1, 2, 3, 1, 2)


def test_depth_follows_from_how_sure_it_is() -> None:
    """A run of two tokens seen once is worth a few tokens, one of many much more."""
    short = len(offer(SuffixDrafter(), [*LINE, 1, *LINE[:2]], depth=8).draft)
    long = len(offer(SuffixDrafter(), [*LINE, *LINE, 1, *LINE], depth=8).draft)
    assert 1 <= short < long


def test_other_requests_and_the_corpus_are_remembered() -> None:
    drafter = SuffixDrafter(corpus=[[40, 41, 42, 43, 44, 45]])
    assert offer(drafter, [0, 40, 41, 42], depth=2).draft.tokens == (43, 44)
    told(drafter, 0, [0, *LINE])
    assert offer(drafter, [3, *LINE[:5]], depth=2).draft.tokens == LINE[5:7]


def test_while_others_write_a_request_is_not_disturbed() -> None:
    """Two texts in turns, each of which repeats itself."""
    drafter = SuffixDrafter()
    texts = {0: [*LINE, 1, *LINE], 1: [*reversed(LINE), 2, *reversed(LINE)]}
    for seq_id, text in texts.items():
        drafter.open(seq_id, text[:1])
    for end in range(1, 19):
        rows = [asked(seq_id, text[:end], depth=2) for seq_id, text in texts.items()]
        drafts = drafter.propose(rows)
        if end >= 16:
            for draft, text in zip(drafts, texts.values(), strict=True):
                assert draft.tokens[:1] == tuple(text[end : end + 1])


def test_what_follows_more_often_is_proposed() -> None:
    drafter = SuffixDrafter()
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    assert offer(drafter, text, depth=1).draft.tokens == (3,)


def test_trees_branch_where_the_text_did() -> None:
    drafter = SuffixDrafter()
    text = [1, 2, 3, 9, 1, 2, 4, 7, 1, 2]
    found = offer(drafter, text, depth=3, num_nodes=12)
    check_offer(found, 3, 12)
    assert {found.draft.tokens[node] for node in found.draft.children(ROOT)} == {3, 4}
    chain = offer(drafter, text, depth=3)
    assert len(chain.draft.children(ROOT)) == 1


@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=3),
    depth=st.integers(0, 6),
    num_nodes=st.integers(0, 12),
)
def test_offers_keep_to_budget_and_add_up(
    texts: list[list[int]], depth: int, num_nodes: int
) -> None:
    drafter = SuffixDrafter()
    for seq_id, text in enumerate(texts):
        drafter.open(seq_id, text[:1])
    for end in range(1, max(map(len, texts)) + 1):
        rows = [
            asked(seq_id, text[:end], depth=depth, num_nodes=num_nodes)
            for seq_id, text in enumerate(texts)
        ]
        for found in drafter.offers(rows):
            check_offer(found, depth, num_nodes)
            if num_nodes <= depth:
                assert found.draft.parents == tuple(range(-1, len(found.draft) - 1))


@pytest.mark.parametrize("vocab_size", [40, 4000])
def test_where_nothing_repeats_it_falls_silent(vocab_size: int) -> None:
    """Of 600 random tokens the first few matches are tried; then there are none."""
    rng = random.Random(1)
    drafter = SuffixDrafter()
    text = [rng.randrange(vocab_size) for _ in range(600)]
    drafter.open(0, text[:50])
    drafted = [
        len(drafter.propose([asked(0, text[:end], depth=8)])[0]) for end in range(50, len(text))
    ]
    assert sum(drafted) <= 0.12 * len(drafted)
    assert sum(drafted[200:]) <= 0.05 * len(drafted[200:])


def test_it_speaks_again_when_the_text_begins_to_repeat() -> None:
    rng = random.Random(2)
    drafter = SuffixDrafter()
    text = [rng.randrange(40) for _ in range(400)]
    text += text[100:200]
    drafter.open(0, text[:50])
    drafts = [drafter.propose([asked(0, text[:end], depth=8)])[0] for end in range(50, len(text))]
    assert sum(len(draft) for draft in drafts[-50:]) >= 200


def test_memory_is_bounded_and_the_recent_is_kept() -> None:
    """Whatever is written, and however many requests write it."""
    rng = random.Random(3)
    drafter = SuffixDrafter(num_tokens=256, corpus=[[rng.randrange(99) for _ in range(1000)]])
    most = 0
    for seq_id in range(30):
        told(drafter, seq_id, [rng.randrange(1000) for _ in range(100)], prompt=60)
        most = max(most, drafter.num_states)
    assert most <= 3 * (2 * 256) + 2 * 100 + 3
    told(drafter, 50, [0, *LINE])
    assert offer(drafter, [3, *LINE[:6]], depth=1).draft.tokens == LINE[6:7]


def test_a_request_goes_on_when_memory_begins_anew() -> None:
    """A long request that repeats itself, while others fill the memory twice over."""
    rng = random.Random(4)
    drafter = SuffixDrafter(num_tokens=256)
    text = [*range(100, 150)] * 20
    drafter.open(0, text[:1])
    right = 0
    for end in range(1, len(text) - 1):
        draft = drafter.propose([asked(0, text[:end], depth=1)])[0]
        right += draft.tokens == (text[end],)
        if end % 20 == 0:
            told(drafter, end, [rng.randrange(1000) for _ in range(60)], prompt=60)
    assert right >= 0.8 * len(text)


def test_ids_may_be_used_again_after_closing() -> None:
    drafter = SuffixDrafter()
    told(drafter, 7, [1, 2, 3])
    drafter.open(7, [4])
    assert drafter.propose([asked(7, [4])])[0].tokens == ()
    drafter.close(7)


def test_no_depth_no_draft_but_the_text_is_heard() -> None:
    drafter = SuffixDrafter()
    assert offer(drafter, [*LINE, *LINE], depth=0).draft.tokens == ()
    assert offer(drafter, [1, *LINE[:6]], depth=2).draft.tokens == LINE[6:8]


@pytest.mark.parametrize("is_native", [False, True])
def test_a_text_kept_apart_neither_teaches_others_nor_learns_from_them(
    is_native: bool, request: pytest.FixtureRequest
) -> None:
    library = request.getfixturevalue("native_library") if is_native else None
    drafter = SuffixDrafter(native=None if library is None else NativeLookups(library))
    told(drafter, 0, LINE * 3)
    others = drafter.num_states
    drafter.open_apart(7, LINE[:1])
    assert not drafter.propose([asked(7, LINE[:6])])[0]
    # From itself it drafts.
    assert drafter.propose([asked(7, (*LINE[:6], 90, 91, 92, 93, *LINE[:4]))])[0].tokens[:1] == (9,)
    drafter.close(7)
    assert drafter.num_states == others
    assert not offer(drafter, (1, 90, 91, 92)).tokens
