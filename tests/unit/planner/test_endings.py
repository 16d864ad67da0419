"""How long a batch of texts takes, against texts that are played out round by round."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from outrider_lab.planner.calibration import PLAIN, RoundStats
from outrider_lab.planner.candidates import desync, seconds_in_step
from outrider_lab.planner.rounds import Rates, round_stats


def drawn(chance: random.Random, stats: RoundStats, most: int) -> int:
    """Tokens that a round keeps of a draft of `most`."""
    coin = chance.random()
    return sum(coin < kept for kept in stats.kept[:most])


def played(stats: RoundStats, num_tokens: int, seed: int) -> list[int]:
    """How deep each round of one text drafted."""
    chance, left, depths = random.Random(seed), num_tokens, list[int]()
    while left:
        depth = min(len(stats.kept), left - 1)
        depths.append(depth)
        left -= 1 + drawn(chance, stats, depth)
    return depths


@examples(20)
@given(num_tokens=st.integers(1, 300), seconds=st.floats(0.1, 3))
def test_plain_decoding_takes_a_round_a_token(num_tokens: int, seconds: float) -> None:
    found = seconds_in_step(num_tokens, PLAIN, lambda _: seconds)
    assert found == pytest.approx(num_tokens * seconds)
    assert desync(num_tokens, 8, PLAIN, lambda live: 1.0 * live) == 1


@pytest.mark.parametrize(("beta", "k"), [(0.8, 4), (0.9, 12), (0.3, 2)])
def test_texts_that_are_played_out(beta: float, k: int) -> None:
    stats = round_stats(Rates((beta,)), k)
    runs = [played(stats, 40, seed) for seed in range(1500)]
    rounds = statistics.fmean(map(len, runs))
    seconds = statistics.fmean(sum(1 + 0.1 * depth for depth in run) for run in runs)
    found = seconds_in_step(40, stats, lambda depth: 1 + 0.1 * depth)
    assert found == pytest.approx(seconds, rel=0.02)
    in_rounds = seconds_in_step(40, stats, lambda _: 1.0)
    assert in_rounds == pytest.approx(rounds, rel=0.02)
    # Whole drafts in all rounds would take longer than that.
    assert found < (1 + 0.1 * k) * in_rounds


@pytest.mark.parametrize("num_tokens", [63, 100, 1000])
def test_long_texts_go_on_as_they_began(num_tokens: int) -> None:
    stats = round_stats(Rates((0.8,)), 4)
    found = seconds_in_step(num_tokens, stats, lambda depth: 1 + 0.1 * depth)
    rounds = seconds_in_step(num_tokens, stats, lambda _: 1.0)
    steady = num_tokens / stats.tokens
    assert 0 <= rounds - steady < 1
    assert found == pytest.approx(1.4 * rounds, rel=0.02)


@pytest.mark.parametrize(("batch", "num_tokens"), [(2, 48), (8, 48), (16, 100)])
def test_batches_that_are_played_out(batch: int, num_tokens: int) -> None:
    """A pass takes the same time however many are live, so the last text decides."""
    stats = round_stats(Rates((0.8,)), 4)
    longest: list[int] = []
    for trial in range(120):
        runs = (played(stats, num_tokens, trial * batch + text) for text in range(batch))
        longest.append(max(map(len, runs)))
    rounds = seconds_in_step(num_tokens, stats, lambda _: 1.0)
    found = rounds * desync(num_tokens, batch, stats, lambda _: 1.0)
    assert found == pytest.approx(statistics.fmean(longest), rel=0.04)


def test_nothing_is_lost_where_seconds_go_by_sequences() -> None:
    stats = round_stats(Rates((0.8,)), 4)
    assert desync(48, 16, stats, lambda live: 0.1 * live) == pytest.approx(1, abs=1e-6)
    assert desync(48, 1, stats, lambda _: 1.0) == 1


def test_of_two_texts_the_slower_is_slower_by_how_much_texts_differ() -> None:
    """Rounds that keep all scatter by nothing else; the larger of two draws of a normal stats lies
    1 / sqrt(pi) deviations above its mean."""
    found = desync(400, 2, RoundStats((1.0,) * 3, 1.0, 3.0), lambda _: 1.0, texts_differ=0.1)
    assert found == pytest.approx(1 + 0.1 / math.pi**0.5, abs=0.002)


def test_texts_that_differ_end_farther_apart() -> None:
    stats = round_stats(Rates((0.8,)), 4)
    alike, apart = (desync(48, 8, stats, lambda _: 1.0, texts_differ=d) for d in (0, 0.3))
    assert 1 < alike < apart
