"""From samples to cells and sentences, and how sure a ratio is."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from doubles.sweeps import folder_of, numbers, sample, small_sweep
from outrider.bench.interval import ratio_of_medians
from outrider.bench.sweep_summary import Cell, Spread, cells, summary, verdicts, write_summary


def cell(found: list[Cell], domain: str, k: int) -> Cell:
    return next(one for one in found if (one.domain, one.k) == (domain, k))


def test_a_cell_has_means_and_deviations(tmp_path: Path) -> None:
    found = cell(cells(small_sweep(tmp_path)), "code", 2)
    assert (found.label, found.num_samples, found.success_rate) == ("SD-K2", 3, 1.0)
    assert found.latency_ms == Spread(550.0, 50.0)
    assert found.acceptance == Spread(0.5, 0.0)
    assert found.tokens_per_round == 2.0
    assert found.drafted_per_round == 2.0
    assert found.accepted_histogram == [0, 12, 0]
    assert found.identical is True


def test_stages_add_up_to_the_time_of_a_token(tmp_path: Path) -> None:
    found = cell(cells(small_sweep(tmp_path)), "code", 2)
    assert sum(found.stage_ms.values()) == pytest.approx(550 / 8, abs=1e-4)
    assert found.stage_ms["target"] == pytest.approx(550 / 8 * 5 / 8, abs=1e-4)
    assert found.stage_ms["draft"] == pytest.approx(550 / 8 / 4, abs=1e-4)


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


def test_losses_are_said_in_words(tmp_path: Path) -> None:
    assert verdicts(cells(small_sweep(tmp_path))) == [
        "toy, maths, K=2: speculation does not measurably win: 1.00× (1.00 to 1.00), "
        "50 % accepted, slower on 0 of 3 pieces.",
        "toy, maths, K=4: speculation loses: 0.50× (0.50 to 0.50), 25 % accepted, "
        "slower on 3 of 3 pieces.",
    ]


def test_winning_everywhere_is_said_too(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, sample(0, 0, numbers(0, 1.0)), sample(2, 0, numbers(2, 0.5)))
    assert verdicts(cells(folder)) == ["Speculation lost in no cell of this sweep."]
    plain = folder_of(tmp_path / "plain", sample(0, 0, numbers(0, 1.0)))
    assert verdicts(cells(plain)) == []


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
    ratio = ratio_of_medians([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (ratio.value, ratio.num_pairs) == (1.0, 3)
    assert ratio_of_medians([2.0, 4.0], [1.0, 2.0]).low == pytest.approx(2.0)


@pytest.mark.slow
def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Thirty pieces whose cost varies widely, sped up by 1.5 with 10 % noise."""
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(100):
        cost = rng.lognormal(0, 0.5, size=30)
        plain = cost * rng.lognormal(0, 0.1, size=30)
        fast = cost / 1.5 * rng.lognormal(0, 0.1, size=30)
        ratio = ratio_of_medians(plain.tolist(), fast.tolist())
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 1.5 <= ratio.high
    assert covered >= 90
