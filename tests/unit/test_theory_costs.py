"""docs/theory.md computed again, sections 5 to 12: costs, batches, drafting ahead, trees."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from checks.documents import Document
from checks.theory_device import BYTE, OPERATION, Device, Numbers, model_of
from outrider.core.tree import best_shape, chain_shape
from outrider.estimate.acceptance import beta_rates, expected_tokens, measured_speed_up
from outrider.estimate.forecast import Mixture
from outrider.plugins.lanes.ahead.fan_out import (
    Misses,
    chances,
    expected_hit_rate,
    geometric,
    optimal,
    uniform,
)
from outrider_lab.planner.overlap import AheadTimes, crossover_batch, steady_hits
from outrider_lab.planner.roofline import critical_context
from outrider_lab.planner.rounds import expected_by_place, speed_up

PAGE = Document.named("docs/theory.md").between("## 5.", "## Sources")
PROSE = PAGE.prose
NUMBERS = Numbers()
DEVICE = Device(NUMBERS)
CARD = model_of(NUMBERS.parameters)


def digits(*values: float, num: int = 3) -> list[str]:
    return [f"{value:.{num}f}" for value in values]


def test_k_lies_at_the_edge_of_a_tile() -> None:
    beta, c, batch, ridge, tile = 0.8, 0.05, 4, 24, 8

    def tiles(k: int) -> int:
        return -(-batch * (k + 1) // tile)

    def gain(k: int) -> float:
        verify = max(1.0, tiles(k) * tile / ridge)
        return measured_speed_up(expected_tokens(beta, k), plain=1, draft=c * k, verify=verify)

    assert (
        "S for K = 3 to 7 is {}, {}, {}, {} and {}.".format(*digits(*map(gain, range(3, 8))))
        in PROSE
    )
    best = max(range(65), key=gain)
    assert f"The best K is {best}, where the third tile is full" in PROSE
    assert tiles(best) * tile == batch * (best + 1) == ridge


def test_acceptance_that_differs_is_worth_more() -> None:
    def both(k: int) -> tuple[float, float]:
        return expected_tokens(0.8, k), expected_by_place(beta_rates(4, 1, k))

    assert all(same < different for same, different in map(both, range(2, 17)))
    assert "E is {} for one beta and {} for Beta(4, 1)".format(*digits(*both(8))) in PROSE


def test_batches() -> None:
    ratio = DEVICE.takes(128, 5) / DEVICE.takes(128, 1)
    text = "128 sequences verify in {} plain passes, and S is {}."
    assert text.format(*digits(ratio, DEVICE.gain(128, NUMBERS.k))) in PROSE
    assert f"Speculation loses from {DEVICE.break_even()} sequences on." in PROSE
    assert f"rows are free up to {DEVICE.ridge:.0f} only" in PROSE


def test_speculation_gains_below_the_break_even_and_loses_from_it_on() -> None:
    limit = DEVICE.break_even()
    assert limit is not None
    assert DEVICE.gain(limit, 4) <= 1 < DEVICE.gain(limit - 1, 4)
    assert Device(Numbers(context=100_000)).break_even() is None


def test_a_long_context_brings_the_room_back() -> None:
    kept = CARD.kv_bytes_per_token
    assert f"keeps {kept} bytes a token" in PROSE
    found = [
        Device(replace(NUMBERS, context=context)).gain(333, NUMBERS.k)
        for context in (0, 1000, 8000)
    ]
    text = "S is {} without context, {} at 1000 tokens and {} at 8000"
    assert text.format(*digits(*found)) in PROSE
    alone, together = (round(critical_context(CARD, batch)) for batch in (1, 32))
    assert f"{alone} tokens of one sequence, {together} of each of 32" in PROSE


def drafting(p_hit: float, batch: float = 1.0) -> tuple[AheadTimes, AheadTimes]:
    """With a draft after a miss, and without."""
    expected = expected_tokens(0.8, 4)
    times = AheadTimes(p_hit, expected, expected, ahead=0.4, fallback=0.4, batch=batch)
    return times, replace(times, tokens_miss=1.0, fallback=0.0)


def test_drafting_ahead() -> None:
    in_turns = speed_up(expected_tokens(0.8, 4), 0.4)
    speeds = [drafting(p_hit)[0].speed for p_hit in (0, 0.5, 0.7, 0.9, 1)]
    # Corollary 9, with as many tokens after a hit as after a miss.
    assert all(speed / in_turns <= (1 + 0.4) * (1 + 1e-12) for speed in speeds)
    text = "S is {} at p = 0.7 and {} at p = 1, against {} in turns"
    assert text.format(*digits(speeds[2], speeds[4], in_turns)) in PROSE
    assert f"0.9 and 0.6 give {steady_hits(0.9, 0.6):.3f}" in PROSE


def test_a_batch_waits_for_its_slowest_row() -> None:
    alone, eight, plain = (
        times.speed for times in (drafting(0.9)[0], drafting(0.9, 8)[0], drafting(0.9)[1])
    )
    text = (
        "S falls from {} for one sequence to {} for eight; without a draft after a miss it is {}."
    )
    assert text.format(*digits(alone, eight, plain)) in PROSE
    times, plain = drafting(0.9)
    limit = math.ceil(crossover_batch(0.9, times.tokens, plain.tokens, times.fallback))
    assert f"From {limit} sequences on" in PROSE
    for batch in (limit - 1, limit):
        times, plain = drafting(0.9, batch)
        assert (plain.speed > times.speed) == (batch == limit)


def test_which_verdicts_are_drafted_for() -> None:
    likely = chances(0.8, 5)
    exact, whole = geometric(24, likely, 1.0), optimal(24, likely, Misses())
    assert "F for n = 0 to 5 is {}, {}, {}, {}, {} and {}.".format(*whole) in PROSE
    assert all(abs(few - many) < 1 for few, many in zip(whole, exact, strict=True))
    rates = [expected_hit_rate(counts, likely, Misses()) for counts in (whole, uniform(24, 6))]
    assert "They cover {} of the outcomes, equal shares {}".format(*digits(*rates, num=4)) in PROSE


def test_one_device() -> None:
    bounds = [f"{1 / eta:.2f} for" for eta in (0.5, 0.85)]
    assert f"{bounds[0]} an engine that reaches 0.5, {bounds[1]} one that reaches 0.85" in PROSE


def test_trees() -> None:
    num_nodes, likely = 16, [(0.6, 0.2, 0.1)] * 16
    tree = best_shape(likely, num_nodes)
    chain = expected_by_place([place[0] for place in likely[:num_nodes]])
    assert len(chain_shape(num_nodes)) == len(tree) == num_nodes
    text = "16 nodes have E = {} as a chain and {} as the best tree, of depth {}"
    assert text.format(*digits(chain, 1 + tree.expected), max(tree.depths) + 1) in PROSE


def test_mixtures_of_experts() -> None:
    # Nine tenths of what one row reads are experts; all of them are sixteen times as much.
    mixture = Mixture(num_experts=128, num_active=8, expert_share=14.4 / 14.5)
    read = 128 * (1 - (1 - 8 / 128) ** 5)
    weights = mixture.read_share(5) / mixture.read_share(1)
    speed = measured_speed_up(expected_tokens(0.8, 4), plain=1.0, draft=0.1 * 4, verify=weights)
    assert f"5 rows read {read:.1f} experts and {weights:.3f} times the weights" in PROSE
    assert f"S is {speed:.3f} at K = 4" in PROSE


def test_energy() -> None:
    assert (NUMBERS.watts, BYTE, OPERATION) == (100, 30e-12, 0.75e-12)
    plain = DEVICE.joules(0)
    # 100 W for 15.6 ms, 14 GB, 14 GFLOP.
    assert plain == pytest.approx(100 * 14 / 900 + 14e9 * (30e-12 + 0.75e-12))
    text = "K = 4 takes {} J a token and plain decoding {}"
    assert text.format(*digits(DEVICE.joules(4), plain)) in PROSE
    for k in (0, 2, 4, 6, 16):
        spent = DEVICE.joules(k)
        # A draft with a tenth of the parameters; of K drafted tokens E - 1 are of use.
        moved, counted = 14e9 * (1 + 0.1 * k), 14e9 * (1 + k + 0.1 * k)
        drawn = 100 * 14 / 900 * (1 + 0.1 * k)
        by_hand = drawn + 30e-12 * moved + 0.75e-12 * counted
        assert spent == pytest.approx(by_hand / expected_tokens(0.8, k))
    # Two hundred times slower arithmetic, and refused tokens cost time as well as energy.
    slow = Device(replace(NUMBERS, tflops=1.5))
    least = min(range(20), key=slow.joules)
    assert least <= max(range(20), key=lambda k: slow.gain(1, k))


def test_every_number_of_these_sections_is_computed_or_given() -> None:
    """A number that is new in the prose belongs in one of these sets, if computed in a test too."""
    given = {"24", "0.05", "0.8", "0.1", "0.4", "0.9", "0.6", "0.2", "0.5", "0.85", "0.7", "0.75"}
    given |= {"32", "128", "90", "100", "30", "80", "12", "2408.11049"}
    computed = {
        "2.567",
        "2.801",
        "2.951",
        "2.419",
        "2.472",
        "333",
        "198",
        "524288",
        "26703",
        "834",
        "0.857",
        "0.9048",
        "0.9000",
        "2.00",
        "1.18",
    }
    computed |= {"4.329", "5.080", "0.623", "1.969", "1000", "8000", "2.316", "3.001", "3.362"}
    computed |= {"2.401", "3.232", "2.738", "3.125", "16", "2.500", "3.349", "35.3", "4.072"}
    computed |= {"0.752", "0.840", "1.986", "1.920", "1.449"}
    assert PAGE.numbers <= given | computed, PAGE.numbers - given - computed
