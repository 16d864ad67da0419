"""What a token of text costs lookups, counted in calls: bounded, and the same at any length."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from outrider.core.protocols import Drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.portfolio import PortfolioDrafter, lookup_members
from outrider.drafters.suffix import SuffixDrafter
from outrider.testing import row

NUM_TOKENS = 1500
WINDOW = 250


def lookup() -> Drafter:
    return PortfolioDrafter(lookup_members(SuffixDrafter(), NgramDrafter()))


def num_calls(action: Callable[[], object]) -> int:
    """Functions of Python and of C that `action` calls."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        del frame, argument
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(("make", "most"), [(NgramDrafter, 20), (SuffixDrafter, 65), (lookup, 90)])
@pytest.mark.parametrize("vocab_size", [60, 5000])
def test_a_token_that_repeats_nothing_costs_a_few_calls_and_no_rows(
    make: Callable[[], Drafter], most: int, vocab_size: int
) -> None:
    """Rounds of one token each, as in plain decoding, over a text at random."""
    rng = random.Random(vocab_size)
    text = [rng.randrange(vocab_size) for _ in range(NUM_TOKENS)]
    drafter = make()
    drafter.open(0, text[:1])
    drafted = list[int]()

    def rounds(start: int) -> None:
        for end in range(start, start + WINDOW):
            drafted.append(len(drafter.propose([row(0, text[:end], depth=8)])[0]))

    own = num_calls(lambda: [row(0, text[:end], depth=8) for end in range(1, WINDOW)])
    calls = [num_calls(lambda s=s: rounds(s)) - own for s in range(1, NUM_TOKENS - WINDOW, WINDOW)]
    assert max(calls) <= most * WINDOW
    assert calls[-1] <= 1.5 * calls[1]
    # A row of a draft costs a few hundredths of a pass, so this is a few thousandths of the time.
    assert sum(drafted) <= 0.06 * len(drafted)
    assert sum(drafted[WINDOW:]) <= 0.04 * len(drafted[WINDOW:])
