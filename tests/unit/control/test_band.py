"""The band: one token more above it, one fewer below, each sequence by itself."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from checks.controllers import trace
from outrider.estimate.acceptance import MOST_SEQUENCES
from outrider.plugins.controllers import RECENT, WINDOW, BandController


def band(*, k: int = 8, min_k: int = 1, target: float = 0.7) -> BandController:
    return BandController(k=k, min_k=min_k, target=target)


def depths(controller: BandController, accepted: list[int], drafted: int = 10) -> list[int]:
    """The depth of sequence 0 after each round."""
    found: list[int] = []
    for count in accepted:
        controller.observe(trace(0, drafted, count))
        found.append(controller.budgets([0])[0].depth)
    return found


def test_it_starts_at_four_within_its_range() -> None:
    assert band().budgets([0])[0].depth == 4
    assert band(k=2).budgets([0])[0].depth == 2
    assert band(k=12, min_k=6).budgets([0])[0].depth == 6
    assert band(k=0, min_k=0).budgets([0])[0].depth == 0


def test_four_rounds_are_needed_and_then_every_round_moves_one_step() -> None:
    assert depths(band(), [10] * 10) == [4, 4, 4, 5, 6, 7, 8, 8, 8, 8]
    assert depths(band(), [0] * 9) == [4, 4, 4, 3, 2, 1, 1, 1, 1]


def test_within_the_band_nothing_moves() -> None:
    """0.6 and 0.8 are its edges, and belong to it."""
    for accepted in (6, 7, 8):
        assert set(depths(band(), [accepted] * 12)) == {4}
    assert depths(band(), [9] * 4)[-1] == 5
    assert depths(band(), [5] * 4)[-1] == 3


def test_the_mean_is_over_the_last_four() -> None:
    controller = band()
    depths(controller, [7] * 20)
    # 0.7, 0.7, 0.7, 1.0 is 0.775; one more 1.0 makes 0.85.
    assert depths(controller, [10, 10]) == [4, 5]


def test_rounds_that_drafted_nothing_do_not_count() -> None:
    controller = band()
    depths(controller, [10] * 3)
    for _ in range(5):
        controller.observe(trace(0, 0, 0))
        controller.observe(trace(0, 0, 0, reading=True))
    assert controller.budgets([0])[0].depth == 4
    assert depths(controller, [10]) == [5]


def test_every_sequence_has_its_own_length() -> None:
    controller = band()
    for _ in range(6):
        controller.observe(trace(0, 4, 4))
        controller.observe(trace(1, 4, 0))
    assert [controller.budgets([i])[0].depth for i in (0, 1, 2)] == [7, 1, 4]


def test_the_target_moves_the_band() -> None:
    assert depths(band(target=0.3), [5] * 5)[-1] == 6
    assert depths(band(target=0.95), [8] * 5)[-1] == 2


def test_a_sequence_at_nought_tries_again() -> None:
    controller = band(min_k=0)
    assert depths(controller, [0] * 7)[-1] == 0
    for _ in range(WINDOW - 1):
        controller.observe(trace(0, 0, 0))
        assert controller.budgets([0])[0].depth == 0
    controller.observe(trace(0, 0, 0))
    assert controller.budgets([0])[0].depth == 1
    # The rounds before are forgotten: four new ones decide.
    assert depths(controller, [1] * (RECENT + 1), drafted=1) == [1, 1, 1, 2, 3]


def test_running_sequences_are_never_forgotten() -> None:
    """Whoever is seen each round outlives any number of others."""
    controller = band()
    depths(controller, [10] * 6)
    for other in range(1, 3 * MOST_SEQUENCES):
        controller.observe(trace(other, 4, 0))
        if other % 500 == 0:
            controller.budgets([0])
    assert controller.budgets([0])[0].depth == 7
    assert controller.stats(1).num_samples == 0


def test_statistics_are_over_the_window() -> None:
    controller = band()
    assert controller.stats(0).acceptance == 0
    depths(controller, [10] * 5 + [5] * WINDOW)
    stats = controller.stats(0)
    assert (stats.depth, stats.acceptance, stats.num_samples) == (1, 0.5, WINDOW)


@given(st.lists(st.integers(0, 10), max_size=60), st.integers(0, 4), st.integers(4, 12))
def test_a_step_is_one_token(accepted: list[int], min_k: int, k: int) -> None:
    found = depths(band(k=k, min_k=min_k), accepted)
    assert all(abs(b - a) <= 1 for a, b in pairwise([4, *found]))
    assert all(min_k <= depth <= k for depth in found)
