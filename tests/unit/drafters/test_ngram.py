"""Prompt lookup: worked examples, and a slow search that must find the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.drafters import check_lookup
from outrider.core.errors import ConfigError
from outrider.drafters.ngram import CopyAcceptance, NgramDrafter, NgramIndex
from outrider.testing import row

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
    index = NgramIndex(range(max_n, min_n - 1, -1), len(text))
    index.read(text)
    assert index.continuation(text, depth) == lookup(text, depth, max_n, min_n)


@given(text=texts, cuts=st.lists(st.integers(1, 14)), start=st.integers(0, 14))
def test_reading_in_pieces_is_reading_at_once(text: list[int], cuts: list[int], start: int) -> None:
    """The place, how far it agrees and what was learnt: all follow from the text alone."""
    pieces, whole = NgramIndex(range(3, 0, -1), start), NgramIndex(range(3, 0, -1), start)
    for cut in sorted(min(cut, len(text)) for cut in cuts):
        pieces.read(text[:cut])
    for index in (pieces, whole):
        index.read(text)
    assert pieces.continuation(text, 4) == whole.continuation(text, 4) == lookup(text, 4, 3, 1)
    assert (pieces.length, pieces.gate) == (whole.length, whole.gate)


@given(text=texts)
def test_as_many_tokens_agree_as_the_index_says(text: list[int]) -> None:
    index = NgramIndex(range(3, 0, -1), len(text))
    for end in range(1, len(text) + 1):
        index.read(text[:end])
        if index.length:
            # The latest place with the longest tail is where the text goes on from.
            grown = [*text[:end], *index.continuation(text[:end], 1)]
            tail = grown[-index.length - 1 :]
            runs = [grown[i : i + len(tail)] for i in range(len(grown) - len(tail))]
            assert tail in runs


def test_the_prompt_says_nothing_of_the_output() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]
    prompt, output = (NgramIndex(range(3, 1, -1), start) for start in (len(text), 0))
    for index in (prompt, output):
        index.read(text)
    assert prompt.gate == CopyAcceptance() != output.gate


def rows_drafted(text: list[int], num_prompt: int) -> list[int]:
    """How much is drafted of 8 tokens, in rounds of one token each."""
    drafter = NgramDrafter()
    drafter.open(0, text[:num_prompt])
    ends = range(num_prompt, len(text))
    return [len(drafter.propose([row(0, text[:end], depth=8)])[0]) for end in ends]


def test_what_goes_on_otherwise_each_time_is_soon_not_drafted_and_a_copy_is_again() -> None:
    """Pairs that come again before a token that never came."""
    misleading = [token for new in range(100, 300) for token in (1, 2, new)]
    copied = misleading[-60:-20]
    drafted = rows_drafted(misleading + copied, 3)
    assert sum(drafted[:60]) > 0
    assert sum(drafted[60:-40]) == 0
    assert sum(drafted[-20:]) == 8 * 20


def test_a_copy_is_drafted_to_its_full_depth_from_where_it_is_known() -> None:
    line = list(range(10, 60))
    drafted = rows_drafted(line + line, len(line))
    assert drafted[:2] == [0, 0]
    assert all(count == 8 for count in drafted[10:])


@pytest.mark.parametrize(("max_n", "min_n"), [(2, 3), (1, 0), (0, 0)])
def test_impossible_lengths_are_refused(max_n: int, min_n: int) -> None:
    with pytest.raises(ConfigError, match="min_ngram") as caught:
        NgramDrafter(max_n=max_n, min_n=min_n)
    assert caught.value.hint
