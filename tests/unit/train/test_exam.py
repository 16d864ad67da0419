"""Simulated rounds are those of an engine: counted here token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.clock import host_ints
from outrider_lab.train.target import Exam, HeldOut, accepted_drafts, rounds

BITS = st.lists(st.booleans(), min_size=2, max_size=30)


def walked(right: list[bool], num_prompt: int, k: int) -> list[int]:
    """Rounds as an engine has them. right[p] says that the drafter would follow position p with
    the text's own token."""
    emitted: list[int] = []
    pending, last = num_prompt - 1, len(right) - 1
    while pending < last:
        place = pending
        while place - pending < k and place < last and right[place]:
            place += 1
        emitted.append(min(place - pending + 1, last - pending))
        pending += emitted[-1]
    return emitted


@given(BITS, st.integers(1, 8), st.data())
def test_rounds_are_those_of_a_walk(right: list[bool], k: int, data: st.DataObject) -> None:
    num_prompt = data.draw(st.integers(1, len(right) - 1))
    ids_T = torch.arange(len(right))
    choices_T = torch.tensor([i + 1 if yes else -5 for i, yes in enumerate(right)])
    accepted = host_ints(accepted_drafts(ids_T, [choices_T] * k))
    assert rounds(accepted, num_prompt, len(right)) == walked(right, num_prompt, k)


@given(st.integers(1, 6), st.integers(1, 20))
def test_a_drafter_that_knows_the_text_emits_k_and_one_more(k: int, num_rounds: int) -> None:
    ids = tuple(range((k + 1) * num_rounds + 1))
    exam = Exam((HeldOut(ids, 1),), torch.device("cpu"), k)
    assert exam.tokens_per_round(torch.full_like) == k + 1


def test_a_drafter_that_is_never_right_emits_one() -> None:
    exam = Exam((HeldOut((1, 2, 3, 4), 2),), torch.device("cpu"))
    assert exam.tokens_per_round(lambda ids_T, k: torch.zeros_like(ids_T)) == 1
