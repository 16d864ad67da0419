"""What a run of engines means: bounds, predictions, sentences, pages, figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from doubles.engine_runs import all_contestants, evidence_of, measured, plan
from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench.studies.engines_cells import (
    BareReads,
    EngineSample,
    EnginesEvidence,
    Taken,
    ahead_predictions,
    cells,
    lane_bounds,
)
from outrider_lab.bench.studies.engines_report import (
    evidence_record,
    meets_bar,
    timelines,
)
from outrider_lab.bench.studies.engines_run import request_rows, sample_record
from outrider_lab.measure.frame import csv_text

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def taken() -> list[Taken]:
    return measured(plan(), all_contestants())


@pytest.fixture(scope="module")
def samples(taken: list[Taken]) -> list[EngineSample]:
    return [one.sample for one in taken]


@pytest.fixture(scope="module")
def evidence(taken: list[Taken]) -> EnginesEvidence:
    return evidence_of(taken)


def test_no_arrangement_of_the_same_passes_beats_the_bare_reads(
    samples: list[EngineSample],
) -> None:
    """Level 0: 3 requests of 2 passes, each with a draft of 4, in 6 x 12 ms."""
    bounds = {bound.level: bound for bound in lane_bounds(samples, BareReads(0.004, 0.0005))}
    assert bounds[0].eta == pytest.approx((6 * 0.004 + 24 * 0.0005) / 0.072, rel=1e-3)
    assert bounds[0].gain == pytest.approx(2, rel=1e-3)
    assert lane_bounds(samples, BareReads(0.004, 0.0005), engine="nobody") == []


def test_a_prediction_needs_hits_and_a_window(
    samples: list[EngineSample], evidence: EnginesEvidence
) -> None:
    """The servers' only lane never drafts ahead, so there is no T_ahead to reckon with."""
    assert evidence.ahead_predictions == []
    hits = [cell.p_hit for cell in cells(samples) if cell.engine == "ssd"]
    assert all(hit is not None and 0 < hit < 1 for hit in hits)


def test_a_prediction_from_known_times(samples: list[EngineSample]) -> None:
    """With hits always and a window that is long enough, drafting costs nothing."""
    found = cells(samples)
    known = {
        "single": {"draft_ms": 2.0, "verify_ms": 8.0, "tokens_per_round": 2.0},
        "ssd": {
            "p_hit": 0.5,
            "hit_tokens_per_round": 3.0,
            "miss_tokens_per_round": 1.0,
            "ahead_over_verify": 0.5,
            "mean_batch": 2.0,
        },
    }
    changed = [replace(cell, **known.get(cell.engine, {})) for cell in found if cell.level == 2]
    (one,) = ahead_predictions(changed)
    # 2 tokens over 0.25 x 1 + 0.75 x 1.25, against 2 over 1.25.
    assert one.ratio == pytest.approx(1.25 / (0.25 + 0.75 * 1.25), abs=1e-4)
    assert one.ratio_apart == pytest.approx(1.25 / (0.5 + 0.5 * 1.25), abs=1e-4)


@pytest.mark.parametrize(
    ("ratio", "word", "met"),
    [
        (Ratio(1.1, 1.05, 1.2, 5), "gain", True),
        (Ratio(0.98, 0.96, 1.01, 5), "no measurable difference", True),
        (Ratio(0.96, 0.955, 0.99, 5), "loss", False),
        (Ratio(0.99, 0.94, 1.05, 5), "no measurable difference", False),
        (Ratio(2.0, None, None, 4), "not judged", None),
    ],
)
def test_a_ratio_is_judged_by_its_interval(ratio: Ratio, word: str, met: bool | None) -> None:
    assert (ratio.verdict, meets_bar(ratio)) == (word, met)


def test_records_have_plain_values(evidence: EnginesEvidence, taken: list[Taken]) -> None:
    import json

    record = json.loads(json.dumps(evidence_record(evidence), allow_nan=False))
    assert len(record["cells"]) == 12
    assert record["reference"]["label"].startswith("The source's own figures")
    sample = json.loads(json.dumps(sample_record(taken[-1].sample), allow_nan=False))
    assert sample["numbers"]["num_tokens"] == 12
    assert sample["lanes"]["lanes"]["main"]["num_jobs"] > 0
    rows = request_rows(taken)
    assert len(rows) == 2 * 5 * 6 * 3
    lines = csv_text(rows).splitlines()
    assert len(lines) == len(rows) + 1
    assert lines[0].startswith("level,engine,repeat,number,request,arrived_s")
    assert csv_text([]) == ""


def test_lanes_are_drawn_for_every_engine(taken: list[Taken]) -> None:
    two = [t for t in taken if t.sample.engine in ("pd", "ssd")]
    assert list(timelines(two, "small print")) == ["lanes_pd", "lanes_ssd"]
