"""Calibrations: a pass's terms, drafts between measured batches, and files."""

from __future__ import annotations

import json

import pytest

from outrider.core.errors import ConfigError
from outrider.estimate.cost import Curve
from outrider_lab.planner.calibration import (
    Calibration,
    DrafterCosts,
    PassCosts,
    PlaceCount,
    RoundStats,
)

DRAFTER = DrafterCosts(
    "model",
    ((1, Curve(((1.0, 1.0), (4.0, 4.0)))), (3, Curve(((1.0, 2.0), (4.0, 8.0))))),
    per_context=0.01,
    per_emitted=0.25,
    places=(PlaceCount(10, 8), PlaceCount(8, 5)),
    requests=((PlaceCount(4, 3),), (PlaceCount(6, 5), PlaceCount(8, 5))),
    laws=(RoundStats((0.8,), 1.0, 1.0),),
    chances=((0.8, 0.1), (0.6,)),
    num_rounds=12,
    carry=0.5,
)
WHOLE = Calibration(
    machine="here",
    target_name="target",
    target=PassCosts(Curve(((1.0, 1.0), (5.0, 2.0))), per_context=0.1, per_read=0.01),
    drafters=(DRAFTER,),
    scatter=0.02,
    memory_bytes=5,
    provenance={"commit": "abc"},
)


def test_every_term_of_a_pass() -> None:
    assert WHOLE.target.seconds(3, 10, 30) == pytest.approx(1.5 + 1 + 0.3)


def test_drafts_between_measured_batches() -> None:
    assert DRAFTER.seconds(2, 1, 0) == 2
    assert DRAFTER.seconds(2, 2, 0) == 3
    assert DRAFTER.seconds(2, 3, 100) == pytest.approx(4 + 0.01 * 2 * 100)
    assert DRAFTER.seconds(2, 5, 0) == 6


def test_a_draft_reads_what_was_emitted_whatever_its_depth() -> None:
    assert DRAFTER.seconds(2, 3, 100, 8) == pytest.approx(4 + 2 + 0.25 * 8)
    assert DRAFTER.seconds(4, 3, 0, 8) == pytest.approx(8 + 0.25 * 8)


def test_no_draft_takes_no_time() -> None:
    assert DRAFTER.seconds(0, 2, 50, 8) == DRAFTER.seconds(2, 0, 0, 8) == 0


def test_a_calibration_that_was_written_is_read_again() -> None:
    assert Calibration.of_json(WHOLE.to_json()) == WHOLE


CHANGES: list[dict[str, object]] = [
    {"schema": "outrider-calibration/0"},
    {"target": 3},
    {"drafters": [{}]},
    {"unheard": 1},
    {"drafters": None},
]


@pytest.mark.parametrize("change", CHANGES)
def test_other_files_are_refused(change: dict[str, object]) -> None:
    record = {**json.loads(WHOLE.to_json()), **change}
    with pytest.raises(ConfigError) as caught:
        Calibration.of_json(json.dumps(record))
    assert "outrider plan --fresh" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}"])
def test_no_calibration_at_all(text: str) -> None:
    with pytest.raises(ConfigError, match="no calibration"):
        Calibration.of_json(text)
