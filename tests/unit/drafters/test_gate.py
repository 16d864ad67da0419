"""Gates: what a request's look-ups were worth so far says what is drafted of the next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.ngram import CopyAcceptance
from outrider.estimate.cost import LEAST_BEGUN, LEAST_GONE_ON

trials = st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60)


def learnt(told: list[tuple[int, bool]]) -> CopyAcceptance:
    gate = CopyAcceptance()
    for length, right in told:
        gate.learn(length, right=right)
    return gate


@given(told=trials, length=st.integers(1, 40), depth=st.integers(0, 20))
def test_what_is_kept_are_falling_products_of_rates_down_to_what_a_row_is_worth(
    told: list[tuple[int, bool]], length: int, depth: int
) -> None:
    gate = learnt(told)
    kept = gate.kept(length, depth)
    assert len(kept) <= depth
    product = 1.0
    for place, probability in enumerate(kept):
        product *= gate.rate(length + place)
        assert probability == product
    assert not kept or kept[0] >= LEAST_BEGUN > LEAST_GONE_ON
    assert all(probability >= LEAST_GONE_ON for probability in kept)
    if gate.rate(length) >= LEAST_BEGUN and len(kept) < depth:
        assert product * gate.rate(length + len(kept)) < LEAST_GONE_ON


@given(told=trials, length=st.integers(1, 40), asked=st.integers(1, 40))
def test_a_hit_raises_every_rate_and_a_miss_lowers_it(
    told: list[tuple[int, bool]], length: int, asked: int
) -> None:
    """Fading of old counts moves a rate as well, but only by what the new trial left of them."""
    hit, miss = learnt([*told, (length, True)]), learnt([*told, (length, False)])
    assert 0 < miss.rate(asked) <= hit.rate(asked) < 1


def test_an_unread_request_is_drafted_for() -> None:
    gate = CopyAcceptance()
    assert len(gate.kept(2, 4)) == 4
    assert gate.rate(30) > gate.rate(5) > gate.rate(1)


def test_it_shuts_after_misses_and_opens_after_hits() -> None:
    gate = learnt([(2, False)] * 12)
    assert gate.kept(2, 8) == ()
    assert gate.kept(1, 8) == ()
    for length in range(2, 14):
        gate.learn(length, right=True)
    assert len(gate.kept(14, 8)) == 8


def test_counts_fade_so_that_the_end_of_a_long_text_is_judged_by_itself() -> None:
    gate = learnt([(2, True)] * 5000)
    misses = 0
    while gate.kept(2, 1):
        gate.learn(2, right=False)
        misses += 1
    assert misses < 75
