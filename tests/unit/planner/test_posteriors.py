"""Rates from counts, what lies beyond them, and where the next draft stands."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.planned import costs, counts
from outrider.core.errors import ConfigError
from outrider.estimate.acceptance import beta_rates, expected_tokens
from outrider_lab.planner.calibration import DrafterCosts, PlaceCount, RoundStats
from outrider_lab.planner.rounds import (
    Rates,
    believe,
    expected_by_place,
    fitted_carry,
    likeness,
    round_stats,
    texts_differ,
)

shares = st.floats(0, 1)
rates = st.builds(
    Rates,
    accepted=st.lists(shares, min_size=1, max_size=8).map(tuple),
    offered=st.lists(shares, min_size=1, max_size=4).map(tuple),
    carry=shares,
)


def played(agrees: Sequence[bool], k: int) -> list[int]:
    """Accepted tokens of rounds of a model that agrees with its target at some positions."""
    kept: list[int] = []
    at = 0
    while at + k < len(agrees):
        run = next((i for i in range(k) if not agrees[at + i]), k)
        kept.append(run)
        at += run + 1
    return kept


def patches(length: int, seed: int = 3) -> list[bool]:
    """Easy and hard stretches: rates rise along a run."""
    chance, agrees = random.Random(seed), list[bool]()
    while len(agrees) < length:
        rate = chance.choice((0.35, 0.95))
        agrees += [chance.random() < rate for _ in range(60)]
    return agrees


def counted(kept: Sequence[int], k: int) -> tuple[PlaceCount, ...]:
    return tuple(
        PlaceCount(sum(n >= place for n in kept), sum(n > place for n in kept))
        for place in range(k)
    )


@examples(20)
@given(rates=rates, k=st.integers(0, 12))
def test_a_round_emits_between_one_token_and_all(rates: Rates, k: int) -> None:
    stats = round_stats(rates, k)
    assert 1 <= stats.tokens <= k + 1 + 1e-9
    assert len(stats.kept) == k
    assert all(b <= a + 1e-9 for a, b in pairwise([1.0, *stats.kept]))
    assert 0 <= stats.acceptance_rate <= 1 + 1e-9
    assert stats.variance >= 0


@examples(20)
@given(rates=rates, k=st.integers(0, 12), better=st.lists(shares, min_size=8, max_size=8))
def test_more_acceptance_never_hurts(rates: Rates, k: int, better: list[float]) -> None:
    raised = tuple(
        rate + (1 - rate) * more for rate, more in zip(rates.accepted, better, strict=False)
    )
    found = [round_stats(Rates(one, rates.offered), k).tokens for one in (rates.accepted, raised)]
    assert found[1] >= found[0] - 1e-9


@examples(20)
@given(beta=shares, k=st.integers(1, 20), carry=shares)
def test_equal_rates_give_the_closed_form_wherever_drafts_stand(
    beta: float, k: int, carry: float
) -> None:
    found = round_stats(Rates((beta,), carry=carry), k)
    assert found.tokens == pytest.approx(expected_tokens(beta, k))
    assert found.num_drafted == pytest.approx(k)


@examples(20)
@given(accepted=st.lists(shares, min_size=1, max_size=9), k=st.integers(1, 9))
def test_drafts_that_begin_anew_multiply_their_places(accepted: list[float], k: int) -> None:
    longer = [*accepted, *[accepted[-1]] * k][:k]
    assert round_stats(Rates(tuple(accepted)), k).tokens == pytest.approx(expected_by_place(longer))


@examples(20)
@given(accepted=st.lists(st.floats(0, 0.97), min_size=1, max_size=6), k=st.integers(1, 6))
def test_drafts_that_go_on_are_a_renewal(accepted: list[float], k: int) -> None:
    """Tokens of a run over rounds of a run, both summed to the end."""

    last = len(accepted) - 1
    runs = [1.0]
    for place in range(500):
        runs.append(runs[-1] * accepted[min(place, last)])
    tokens, rounds = sum(runs), sum(runs[:: k + 1])
    found = round_stats(Rates(tuple(accepted), carry=1.0), k).tokens
    assert found == pytest.approx(tokens / rounds, rel=1e-4)


def test_deep_drafts_foretell_short_ones() -> None:
    """Counts of drafts of 24 on a text with easy and hard stretches, where they begin behind a
    refusal, against rounds of k on it."""
    agrees = patches(30_000)
    every = played(agrees, 24)
    deep = counted([kept for before, kept in pairwise(every) if before < 24], 24)
    accepted = believe(DrafterCosts("model", (), places=deep), num_draws=0).mean.accepted
    for k in (1, 2, 4, 8):
        kept = played(agrees, k)
        measured = 1 + sum(kept) / len(kept)
        onward = round_stats(Rates(accepted, carry=1.0), k).tokens
        anew = round_stats(Rates(accepted), k).tokens
        assert onward == pytest.approx(measured, rel=0.02)
        assert anew < 0.95 * measured


def test_where_the_next_draft_stands_is_found_from_another_probe() -> None:
    drafter = costs(0.1, [0.3, 0.6, 0.8, 0.9, 0.9])
    mean = believe(drafter, num_draws=0).mean
    for carry in (0.0, 0.4, 1.0):
        tokens = round_stats(Rates(mean.accepted, carry=carry), 2).tokens
        assert fitted_carry(drafter, 2, tokens) == pytest.approx(carry, abs=1e-4)
    assert fitted_carry(drafter, 2, 2.9) == 1
    assert fitted_carry(drafter, 2, 1.0) == 0


def test_many_judgements_are_believed() -> None:
    wanted = [0.8, 0.7, 0.9]
    assert believe(costs(0.1, wanted)).mean.accepted == pytest.approx(wanted, abs=2e-3)


def test_few_judgements_leave_doubt() -> None:
    few, many = (believe(costs(0.1, [0.8, 0.7], num_rounds=n)) for n in (40, 40_000))
    wide, narrow = (
        sorted(round_stats(draw, 2).tokens for draw in belief.draws) for belief in (few, many)
    )
    assert wide[-10] - wide[10] > 5 * (narrow[-10] - narrow[10])
    assert wide[10] < round_stats(few.mean, 2).tokens < wide[-10]


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    chance, truth, held = random.Random(5), [0.8, 0.6, 0.7], 0
    wanted = expected_by_place(truth)
    for trial in range(50):
        kept = [next((i for i in range(3) if chance.random() >= truth[i]), 3) for _ in range(60)]
        drafter = DrafterCosts("model", (), places=counted(kept, 3))
        draws = believe(drafter, seed=trial, num_draws=80).draws
        tokens = sorted(round_stats(draw, 3).tokens for draw in draws)
        held += tokens[2] <= wanted <= tokens[-3]
    assert held >= 43


def test_a_place_that_was_cut_off_is_no_refusal() -> None:
    whole = (PlaceCount(1000, 800), PlaceCount(800, 640))
    cut = (PlaceCount(1000, 800), PlaceCount(400, 320))
    a, b = (believe(DrafterCosts("m", (), places=p)).mean for p in (whole, cut))
    assert a.accepted == pytest.approx(b.accepted, abs=1e-2)


def test_seldom_reached_places_share_a_rate_that_goes_on() -> None:
    places = (PlaceCount(500, 400), PlaceCount(19, 9), PlaceCount(9, 3), PlaceCount(3, 0))
    found = believe(DrafterCosts("m", (), places=places)).mean
    assert len(found.accepted) == 2
    assert found.accepted[1] == pytest.approx((0.8 + 12) / 32, abs=1e-3)
    assert found.kept_at(2) == found.kept_at(40) == found.kept_at(3, behind=7)


def test_drafts_shorter_than_asked_are_not_refusals_either() -> None:
    """A lookup that finds something in a third of rounds, and is then right."""
    found = believe(DrafterCosts("ngram", (), places=counts([0.9] * 3, 1000), num_rounds=3000))
    stats = round_stats(found.mean, 3)
    assert stats.drafting == pytest.approx(1 / 3, abs=1e-2)
    assert stats.num_drafted == pytest.approx(3, abs=0.02)
    assert stats.tokens == pytest.approx(1 + (0.9 + 0.81 + 0.729) / 3, abs=0.02)


def test_nothing_is_known_without_counts() -> None:
    with pytest.raises(ConfigError, match="was never counted") as caught:
        believe(DrafterCosts("model", ()))
    assert caught.value.hint is not None
    assert "outrider plan" in caught.value.hint


def texts(u: float, v: float, num: int = 60) -> list[tuple[PlaceCount, ...]]:
    chance = random.Random(1)
    found: list[tuple[PlaceCount, ...]] = []
    for _ in range(num):
        rate = chance.betavariate(u, v)
        found.append((PlaceCount(50, sum(chance.random() < rate for _ in range(50))),))
    return found


def test_texts_that_differ() -> None:
    """The Beta they were drawn from is found again, and weighing texts gives wider intervals."""
    requests = texts(6, 2)
    found = likeness(requests)
    assert found is not None
    assert found[0] / sum(found) == pytest.approx(0.75, abs=0.04)
    assert 4 < sum(found) < 16
    assert expected_by_place(beta_rates(*found, 4)) > expected_tokens(found[0] / sum(found), 4)
    assert 0.1 < texts_differ(requests, 4) < 0.5
    total = (PlaceCount(3000, sum(one[0].accepted for one in requests)),)
    together, apart = (
        believe(DrafterCosts("m", (), places=total, requests=known))
        for known in ((), tuple(requests))
    )
    widths: list[float] = []
    for belief in (together, apart):
        tokens = sorted(round_stats(draw, 4).tokens for draw in belief.draws)
        widths.append(tokens[-6] - tokens[5])
    assert widths[1] > 1.5 * widths[0]


def test_chance_alone_makes_no_difference_between_texts() -> None:
    found = likeness(texts(8e6, 2e6))
    assert found is None or sum(found) > 100


def test_texts_that_are_alike() -> None:
    alike = [(PlaceCount(50, 40),)] * 10
    assert likeness(alike) is None
    assert texts_differ(alike, 4) == 0
    assert likeness(texts(6, 2)[:4]) is None
    assert likeness([(PlaceCount(9, 9),)] * 8) is None


def test_a_shallower_round() -> None:
    stats = RoundStats((0.8, 0.6, 0.5), 0.9, 3.0)
    assert stats.cut(1) == RoundStats((0.8,), 0.9, 1.0)
    assert stats.cut(0).tokens == 1
    assert stats.cut(5) is stats
