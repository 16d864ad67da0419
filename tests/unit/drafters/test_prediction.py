"""Predicted outputs: a right guess is accepted whole, an edited one is found again soon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.draft import Budget
from outrider.core.protocols import DraftRow
from outrider.core.rng import KeyedRng
from outrider.drafters.prediction import PredictionDrafter

PROMPT = (1, 2, 3)
FRESH = 1000  # tokens from here on are in no guess
words = st.lists(st.integers(0, 5), min_size=1, max_size=60)
apart = st.permutations(range(80)).map(lambda order: order[:60])


def ask(
    drafter: PredictionDrafter, text: Sequence[int], guess: Sequence[int], depth: int
) -> list[int]:
    rng = KeyedRng(0, 0, len(text))
    tokens = [*PROMPT, *text]
    row = DraftRow(0, tokens, None, Budget(depth), SamplingParams(), rng, tuple(guess))
    return list(drafter.propose([row])[0].tokens)


def opened() -> PredictionDrafter:
    drafter = PredictionDrafter()
    drafter.open(0, PROMPT)
    return drafter


def rounds(text: Sequence[int], guess: Sequence[int], k: int) -> list[tuple[int, int]]:
    """(drafted, accepted) of each round of a target that writes `text` whatever is proposed."""
    drafter, record, length = opened(), list[tuple[int, int]](), 0
    while length < len(text):
        draft = ask(drafter, text[:length], guess, min(k, len(text) - length - 1))
        agreed = takewhile(lambda pair: pair[0] == pair[1], zip(draft, text[length:], strict=False))
        record.append((len(draft), len(list(agreed))))
        length += record[-1][1] + 1
    return record


def expected(text: Sequence[int], guess: Sequence[int]) -> list[int | None]:
    """At each place of `text`, the token that is proposed for it; None where there is none."""
    drafter = opened()
    return [next(iter(ask(drafter, text[:i], guess, 1)), None) for i in range(len(text))]


@given(guess=words, k=st.integers(1, 8))
def test_an_unchanged_guess_is_accepted_whole(guess: list[int], k: int) -> None:
    record = rounds(guess, guess, k)
    assert len(record) == -(-len(guess) // (k + 1))
    assert all(drafted == accepted for drafted, accepted in record)


@examples(40)
@given(guess=apart, place=st.integers(0, 50), removed=st.integers(0, 9), added=st.integers(0, 9))
def test_after_an_edit_two_tokens_find_the_guess_again(
    guess: list[int], place: int, removed: int, added: int
) -> None:
    text = [*guess[:place], *range(FRESH, FRESH + added), *guess[place + removed :]]
    proposed = expected(text, guess)
    assert proposed[:place] == guess[:place]
    back = place + added + 2
    assert proposed[back:] == text[back:]


@examples(40)
@given(guess=apart, place=st.integers(0, 50))
def test_one_token_for_another_costs_that_token_alone(guess: list[int], place: int) -> None:
    text = [*guess[:place], FRESH, *guess[place + 1 :]]
    wrong = [i for i, token in enumerate(expected(text, guess)) if token != text[i]]
    assert wrong == [place]


@examples(40)
@given(guess=apart, first=st.integers(5, 25), second=st.integers(30, 55))
def test_moved_blocks_are_found(guess: list[int], first: int, second: int) -> None:
    text = [*guess[first:second], *guess[:first], *guess[second:]]
    wrong = sum(a != b for a, b in zip(expected(text, guess), text, strict=True))
    assert wrong <= 3 * 2


@examples(40)
@given(guess=words, text=words, cuts=st.sets(st.integers(1, 59)), k=st.integers(0, 6))
def test_reading_in_pieces_is_reading_at_once(
    guess: list[int], text: list[int], cuts: set[int], k: int
) -> None:
    drafter = opened()
    for cut in sorted(cuts):
        ask(drafter, text[:cut], guess, k)
    assert ask(drafter, text, guess, k) == ask(opened(), text, guess, k)


@examples(40)
@given(text=words, k=st.integers(0, 6))
def test_an_empty_guess_drafts_nothing(text: list[int], k: int) -> None:
    assert ask(opened(), text, (), k) == []


def test_of_equal_tails_the_nearest_after_the_last_sure_place_wins() -> None:
    guess = [7, 8, 20, 21, 22, 23, 7, 8, 30, 31, 7, 8, 40]
    # Two tokens that are not in the guess, then a tail that it has three times.
    assert ask(opened(), [7, 8, 20, 21, 99, 98, 7, 8], guess, 2) == [30, 31]
    assert ask(opened(), [7, 8, 20, 21, 22, 23, 7, 8, 30, 99, 98, 7, 8], guess, 1) == [40]


def test_a_longer_tail_beats_a_nearer_place() -> None:
    guess = [1, 2, 5, 6, 60, 6, 8, 61, 8, 9, 62, 5, 6, 8, 9, 70]
    assert ask(opened(), [1, 2, 99, 98, 5, 6, 8, 9], guess, 1) == [70]


def test_a_single_token_counts_only_where_it_is_alone() -> None:
    """A comma says little: the guess is full of them."""
    guess = [10, 5, 11, 5, 12, 5, 13]
    assert ask(opened(), [99, 98, 5], guess, 2) == []
    assert ask(opened(), [99, 98, 12], guess, 2) == [5, 13]


@pytest.mark.parametrize("first", [[99], [98, 99], []])
def test_another_spelling_at_the_seam_is_survived(first: list[int]) -> None:
    """The guess is encoded alone, so its first token may differ from the text's."""
    guess = [1, *range(20, 40)]
    text = [*first, *range(20, 40)]
    wrong = sum(a != b for a, b in zip(expected(text, guess), text, strict=True))
    assert wrong <= len(first) + 1


def test_a_guess_that_the_text_outgrows_ends() -> None:
    assert ask(opened(), [4, 5, 6, 90, 91], [4, 5, 6], 3) == []


@pytest.mark.weights
def test_a_guess_travels_from_the_request_to_the_drafter() -> None:
    prompt = "def add(a, b):"
    short = SamplingParams(max_tokens=40)
    wanted = LLM(config=EngineConfig(drafter="none")).generate(prompt, short)[0]
    llm = LLM(config=EngineConfig(drafter="prediction", k=7))
    result = llm.generate(prompt, replace(short, prediction=wanted.text))[0]
    assert result.token_ids == wanted.token_ids
    # A last token that has no text, the end, is not in the guess.
    assert result.stats.num_rounds <= -(-len(wanted.token_ids) // 8) + 1
    without = llm.generate(prompt, short)[0]
    assert (without.token_ids, without.stats.num_drafted) == (wanted.token_ids, 0)
