"""Published tables from the planner's own rounds; tests/unit/test_published_tables.py has the rest.

1B parameters draft for 8B and for 70B, acceptance 0.9; drafting K tokens in passes of the target.
"""

from __future__ import annotations

import pytest

from doubles.planned import flat
from outrider.estimate.cost import Curve
from outrider.plugins.lanes.ahead.fan_out import chances, geometric
from outrider_lab.planner.calibration import DrafterCosts
from outrider_lab.planner.overlap import AheadWays, ahead
from outrider_lab.planner.rounds import DecodeLoad, Rates, RoundForecast, forecast, round_stats

KS = (2, 4, 6, 8, 10, 12)
SMALL = (0.36, 0.69, 1.02, 1.35, 1.67, 2.01)
LARGE = (0.04, 0.08, 0.12, 0.15, 0.19, 0.23)
RATES = Rates((0.9,))


def drafter(times: tuple[float, ...]) -> DrafterCosts:
    curve = Curve(tuple(zip(map(float, KS), times, strict=True)))
    return DrafterCosts("model", ((1, curve),))


def rounds(times: tuple[float, ...]) -> list[RoundForecast]:
    calibration = flat(drafter(times))
    return [
        forecast(calibration, drafter(times), DecodeLoad(), round_stats(RATES, k), depth=k)
        for k in KS
    ]


@pytest.mark.parametrize(
    ("times", "speeds"),
    [
        (SMALL, ["1.993", "2.423", "2.583", "2.607", "2.570", "2.478"]),
        (LARGE, ["2.606", "3.792", "4.658", "5.327", "5.766", "6.064"]),
    ],
)
def test_speed_ups_from_the_published_times(times: tuple[float, ...], speeds: list[str]) -> None:
    found = rounds(times)
    assert [one.draft_over_plain for one in found] == pytest.approx(times)
    assert [f"{one.speed_up:.3f}" for one in found] == speeds
    assert [f"{one.speed_up_if_free:.3f}" for one in found] == speeds


def test_a_cheaper_drafter_gains_more_and_hides_less() -> None:
    """Small T_SD: greater speed-up of drafting in turns; T_SD near 1: greater gain of hiding it."""
    small, large = rounds(SMALL), rounds(LARGE)
    assert all(a.speed_up < b.speed_up for a, b in zip(small, large, strict=True))
    gains = [
        one.stats.tokens / max(1, t) / one.speed_up for one, t in zip(small, SMALL, strict=True)
    ]
    assert max(gains) == gains[2] == pytest.approx(1.98, abs=0.005)
    assert large[2].stats.tokens / large[2].speed_up == pytest.approx(1.12, abs=0.005)


def test_from_six_tokens_on_drafting_cannot_be_hidden() -> None:
    for one, k, taken in zip(rounds(SMALL), KS, SMALL, strict=True):
        # In the table, drafting ahead takes as long as drafting: no step over the trunk.
        assert (one.draft_over_verify > 1) == (k >= 6) == (taken > 1)
    got = ahead(
        drafter(SMALL), DecodeLoad(), rounds(SMALL)[1], AheadWays(p_hit=1.0, contention=0.0)
    )
    assert got.times.ahead == pytest.approx(0.69 + 0.36)


def test_the_example_of_a_fan_out() -> None:
    found = geometric(24, chances(0.8, 7), 1.0)
    assert [f"{count:.1f}" for count in found] == [
        "3.9", "3.5", "3.1", "2.8", "2.5", "2.2", "2.0", "4.0",
    ]  # fmt: skip
