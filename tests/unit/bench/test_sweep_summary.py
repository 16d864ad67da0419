"""From samples to cells and sentences, and how sure a ratio is."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from doubles.sweeps import folder_of, numbers, sample, small_sweep
from outrider.plugins.measure.turns import MIN_PAIRS, ratio_of_medians
from outrider_lab.bench.studies.sweep_record import SweepSample
from outrider_lab.bench.studies.sweep_report import sections
from outrider_lab.bench.studies.sweep_summary import (
    SweepCell,
    cells,
    summary,
    verdicts,
    write_summary,
)
from outrider_lab.measure.frame import Spread


def pieces(num: int, seconds: float) -> list[SweepSample]:
    """`num` pieces at K = 2 that took `seconds`, where plain decoding took one."""
    return [
        sample(k, i, numbers(k, took)) for i in range(num) for k, took in ((0, 1.0), (2, seconds))
    ]


def cell(found: list[SweepCell], domain: str, k: int) -> SweepCell:
    return next(one for one in found if (one.domain, one.k) == (domain, k))


def test_a_cell_has_means_and_deviations(tmp_path: Path) -> None:
    found = cell(cells(small_sweep(tmp_path)), "code", 2)
    assert (found.config.label, found.num_samples, found.success_rate) == ("SD-K2", 5, 1.0)
    assert found.latency_ms == Spread(600.0, 79.056942)
    assert found.acceptance == Spread(0.5, 0.0)
    assert found.tokens_per_round == 2.0
    assert found.drafted_per_round == 2.0
    assert found.accepted_histogram == [0, 20, 0]
    assert found.identical is True


def test_stages_add_up_to_the_time_of_a_token(tmp_path: Path) -> None:
    found = cell(cells(small_sweep(tmp_path)), "code", 2)
    assert sum(found.stage_ms.values()) == pytest.approx(600 / 8, abs=1e-4)
    assert found.stage_ms["target"] == pytest.approx(600 / 8 * 5 / 8, abs=1e-4)
    assert found.stage_ms["draft"] == pytest.approx(600 / 8 / 4, abs=1e-4)


def test_speed_up_is_over_plain_decoding_of_the_same_visit(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        sample(0, 0, numbers(0, 1.0), visit=1),
        sample(2, 0, numbers(2, 0.9), visit=1),
        # Measured again while the machine was ten times slower.
        sample(0, 0, numbers(0, 10.0), visit=2),
        sample(2, 0, numbers(2, 5.0), visit=2),
    )
    ratio = cell(cells(folder), "code", 2).speedup
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.num_pairs) == (2.0, None, 1)
    # K=4 came later, with plain decoding beside it; K=2 keeps the one of its own visit.
    folder.add([sample(0, 0, numbers(0, 3.0), visit=3), sample(4, 0, numbers(4, 6.0), visit=3)])
    assert [one.speedup.value for one in cells(folder) if one.speedup] == [2.0, 0.5]


def test_failures_are_counted_by_reason_and_left_out(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        sample(0, 0, numbers(0, 1.0)),
        sample(2, 0, numbers(2, 0.5)),
        sample(0, 1, numbers(0, 1.0)),
        sample(2, 1, None, reason="CapacityError: full"),
        sample(0, 2, numbers(0, 1.0)),
        sample(2, 2, numbers(2, 0.1, identical=False), reason="DifferentTokens: token 3"),
    )
    found = cell(cells(folder), "code", 2)
    assert (found.num_samples, found.num_failures) == (3, 2)
    assert found.success_rate == pytest.approx(1 / 3)
    assert found.failures == {"CapacityError: full": 1, "DifferentTokens: token 3": 1}
    assert found.latency_ms == Spread(500.0, None)
    assert found.identical is False
    assert summary(folder)["greedy_identical"] is False


def test_a_cell_without_any_success_has_no_numbers(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, sample(0, 0, None, reason="x"), sample(2, 0, None, reason="x"))
    found = cells(folder)
    assert all(one.latency_ms is None and one.speedup is None for one in found)
    assert verdicts(found) == []
    write_summary(folder)


def test_summary_files(tmp_path: Path) -> None:
    folder = small_sweep(tmp_path)
    record = write_summary(folder)
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(record))
    assert record["runs"] == folder.runs
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["domain"], row["k"]) for row in rows] == [
        (domain, k) for domain in ("code", "maths") for k in "024"
    ]
    assert rows[1]["speedup"] == "2.0"
    assert rows[0]["speedup"] == ""


def test_a_ratio_of_equal_sides_is_one_without_doubt() -> None:
    sides = [1.0, 2.0, 3.0, 4.0, 5.0]
    ratio = ratio_of_medians(sides, sides)
    assert (ratio.value, ratio.num_pairs) == (1.0, 5)
    assert ratio_of_medians([2 * one for one in sides], sides).low == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [0.5, 2.0])
@pytest.mark.parametrize("num", range(1, MIN_PAIRS))
def test_few_pieces_have_a_ratio_and_neither_interval_nor_verdict(
    tmp_path: Path, num: int, seconds: float
) -> None:
    folder = folder_of(tmp_path, *pieces(num, seconds))
    record = json.loads(json.dumps(write_summary(folder)))
    speedup = record["cells"][1]["speedup"]
    assert speedup == {"value": 1 / seconds, "low": None, "high": None, "num_pairs": num}
    assert record["verdicts"] == []
    with (tmp_path / "summary.csv").open() as file:
        row = list(csv.DictReader(file))[1]
    assert (row["speedup"], row["speedup_low"]) == (str(1 / seconds), "")


def test_the_tables_say_how_many_pieces_an_interval_needs(tmp_path: Path) -> None:
    few = folder_of(tmp_path / "few", *pieces(MIN_PAIRS - 1, 0.5))
    table, sentences = sections(few)
    assert table.header[:3] == ("pair", "domain", "k")
    place = table.header.index("speed-up (95 %)")
    assert table.rows[1][place] == "2.00"
    needed = "An interval and a verdict need 5 pieces of work (--prompts 5)."
    assert needed in sentences.points
    enough = folder_of(tmp_path / "enough", *pieces(MIN_PAIRS, 0.5))
    table, sentences = sections(enough)
    assert table.rows[1][place] == "2.00 (2.00 to 2.00)"
    assert needed not in sentences.points


def test_drafters_that_found_nothing_have_no_histogram(tmp_path: Path) -> None:
    found = replace(numbers(2, 1.0), num_drafted=0, num_accepted=0, accepted_histogram=[0, 0, 0])
    folder = folder_of(tmp_path, sample(0, 0, numbers(0, 1.0)), sample(2, 0, found))
    assert [list(one.accepted_histogram) for one in cells(folder)] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("num", [MIN_PAIRS, 30])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(num: int) -> None:
    """Pieces whose cost varies widely, sped up by 1.5 with 10 % noise."""
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(100):
        cost = rng.lognormal(0, 0.5, size=num)
        plain = cost * rng.lognormal(0, 0.1, size=num)
        fast = cost / 1.5 * rng.lognormal(0, 0.1, size=num)
        ratio = ratio_of_medians(plain.tolist(), fast.tolist())
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 1.5 <= ratio.high
    assert covered >= 90
