"""Prompt lookup: worked examples, and a slow search that must find the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.drafters import GREEDY, check_lookup, fresh_draft, row
from outrider.core.errors import ConfigError
from outrider.drafters.ngram import NgramDrafter

texts = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def lookup(text: Sequence[int], depth: int, max_n: int, min_n: int) -> list[int]:
    """The algorithm as it is usually written: scan back for the tail, longest tail first."""
    for n in range(max_n, min_n - 1, -1):
        if len(text) < n + 1:
            continue
        for start in range(len(text) - n - 1, -1, -1):
            if list(text[start : start + n]) == list(text[-n:]):
                grown = list(text)
                for _ in range(depth):
                    grown.append(grown[start + n + len(grown) - len(text)])
                return grown[len(text) :]
    return []


def test_worked_examples() -> None:
    check_lookup()


@given(text=texts, depth=st.integers(0, 5), max_n=st.integers(1, 4), data=st.data())
def test_finds_what_a_slow_search_finds(
    text: list[int], depth: int, max_n: int, data: st.DataObject
) -> None:
    min_n = data.draw(st.integers(1, max_n))
    draft = fresh_draft(partial(NgramDrafter, max_n=max_n, min_n=min_n), text, depth, GREEDY)
    assert list(draft.tokens) == lookup(text, depth, max_n, min_n)
    assert draft.probs_NV is None


@given(text=texts, cuts=st.lists(st.integers(1, 14)))
def test_indexing_in_pieces_is_indexing_at_once(text: list[int], cuts: list[int]) -> None:
    drafter = NgramDrafter(max_n=3, min_n=1)
    drafter.open(0, text)
    for cut in sorted(cuts):
        drafter.propose([row(0, text[:cut], depth=2)])
    draft = drafter.propose([row(0, text, depth=4)])[0]
    assert list(draft.tokens) == lookup(text, 4, 3, 1)


@pytest.mark.parametrize(("max_n", "min_n"), [(2, 3), (1, 0), (0, 0)])
def test_impossible_lengths_are_refused(max_n: int, min_n: int) -> None:
    with pytest.raises(ConfigError, match="min_ngram") as caught:
        NgramDrafter(max_n=max_n, min_n=min_n)
    assert caught.value.hint
