"""Costs as values: curves that never fall, and tables that survive being written down."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import ConfigError
from outrider.estimate.cost import CostTable, Curve

seconds = st.floats(0, 10)
samples = st.dictionaries(
    st.integers(1, 40), st.tuples(seconds, st.integers(1, 64)), min_size=1, max_size=12
)
LINE = Curve(((1.0, 1.0), (3.0, 2.0), (4.0, 4.0)))
TABLE = CostTable(
    target=Curve(((1.0, 10.0), (9.0, 12.0))),
    drafts=((1, Curve(((0.0, 0.0), (4.0, 2.0)))), (8, Curve(((0.0, 0.0), (4.0, 6.0))))),
    overhead=0.5,
    host=0.25,
)


@pytest.mark.parametrize(
    ("x", "wanted"),
    [(0, 1.0), (1, 1.0), (2, 1.5), (3, 2.0), (3.5, 3.0), (4, 4.0), (5, 5.0), (7, 7.0)],
)
def test_between_points_it_is_straight_and_beyond_it_goes_on(x: float, wanted: float) -> None:
    """Beyond the last point along the line from the first: one a row here."""
    assert LINE.at(x) == pytest.approx(wanted)


def test_one_point_is_the_same_everywhere() -> None:
    assert [Curve(((4.0, 2.0),)).at(x) for x in (1, 4, 100)] == [2.0] * 3


@given(samples=samples, data=st.data())
def test_a_curve_never_falls(samples: dict[int, tuple[float, int]], data: st.DataObject) -> None:
    curve = Curve.through((x, y, w) for x, (y, w) in samples.items())
    low, high = sorted(data.draw(st.tuples(st.floats(0, 60), st.floats(0, 60))))
    assert curve.at(low) <= curve.at(high) + 1e-9


@given(samples=samples)
def test_what_rises_is_kept_and_what_falls_is_pooled(
    samples: dict[int, tuple[float, int]],
) -> None:
    """The weighted mean stays, and no curve is nearer than the pools' own means."""
    curve = Curve.through((x, y, w) for x, (y, w) in samples.items())
    total = math.fsum(w * y for y, w in samples.values())
    assert math.fsum(samples[round(x)][1] * y for x, y in curve.points) == pytest.approx(total)
    values = [y for _, (y, _) in sorted(samples.items())]
    if values == sorted(values):
        assert [y for _, y in curve.points] == values


def test_pools_weigh() -> None:
    assert Curve.through([(1, 4.0, 3), (2, 0.0, 1)]).points == ((1, 3.0), (2, 3.0))


@pytest.mark.parametrize(
    ("count", "rows", "depth", "drafting", "wanted"),
    [
        (1, 1, 0, 0, 0.75 + 10.0),  # nothing is drafted
        (1, 5, 4, 1, 0.75 + 11.0 + 2.0),
        (1, 5, 2, 1, 0.75 + 11.0 + 1.0),
        (8, 9, 4, 8, 2.5 + 12.0 + 6.0),
        (2, 9, 4, 2, 1.0 + 12.0 + 2.0),  # two is nearer to one than to eight, by ratio
        (4, 9, 4, 3, 1.5 + 12.0 + 6.0),
        (1, 17, 8, 1, 0.75 + 14.0 + 4.0),
    ],
)
def test_a_round_is_the_sum_of_its_parts(
    count: int, rows: int, depth: int, drafting: int, wanted: float
) -> None:
    assert TABLE.round_seconds(count, rows, depth, drafting) == pytest.approx(wanted)
    parts = TABLE.target_seconds(rows) + TABLE.draft_seconds(depth, max(drafting, 1))
    assert TABLE.overhead + TABLE.host * count + parts == pytest.approx(wanted)


def test_a_table_survives_being_written() -> None:
    text = TABLE.to_json()
    json.loads(text)
    assert CostTable.of_json(text) == TABLE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        TABLE.to_json().replace("10.0", "-10.0"),
        TABLE.to_json().replace("10.0", "NaN"),
        TABLE.to_json().replace("10.0", "13.0"),
        TABLE.to_json().replace('[[1, {"points"', '[[0, {"points"'),
        TABLE.to_json().replace("0.5", "Infinity"),
        TABLE.to_json().replace("10.0", '"a"'),
        '{"target": {"points": []}, "drafts": [], "overhead": 0, "host": 0}',
        TABLE.to_json().replace("0.25", "-1"),
    ],
)
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CostTable.of_json(text)
    assert caught.value.hint


def test_a_token_more_costs_what_it_adds_where_drafts_are() -> None:
    """Not what any draft costs, which the first row has here; rows grow dear from the ninth on."""
    costs = CostTable(
        target=Curve(((1.0, 1.0), (2.0, 3.0), (9.0, 3.7), (17.0, 6.1))),
        drafts=((1, Curve(((0.0, 0.0), (1.0, 0.5), (16.0, 2.0)))),),
    )
    assert costs.token_seconds(1, 1, 3.8) == pytest.approx(0.1 + 0.1)
    assert costs.token_seconds(1, 1, 1.0) == pytest.approx(0.1 + 0.1)
    assert costs.token_seconds(1, 1, 8.0) == pytest.approx((0.4 + 2.4) / 12 + 0.1)
    assert costs.token_seconds(3, 0, 8.0) == 0
    # What the draft model adds is shared by all that draft.
    assert costs.token_seconds(2, 2, 1.0) == pytest.approx(0.1 + 0.1 / 2)
