"""`studies/parity_matrix.py` runs from a clean checkout."""

from __future__ import annotations

import json
from pathlib import Path

import parity_matrix
import pytest
from matrices.matrix import Matrix, Row
from parity_matrix import measured, with_drafters

pytestmark = pytest.mark.wide


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.weights
def test_parity_is_run_with_every_drafter_that_finds_what_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ground = with_drafters("dense", "outrider/embedded", None)
    assert {"ngram", "suffix", "model", "quantised-self"} <= set(ground.drafts)
    assert ground.drafts["model"] == "outrider/embedded-draft"
    few = ground.pair_rows()[:2]
    cells = measured(ground, few, ["def add(a, b):"], 3)
    assert [cell.row for cell in cells] == few
    assert all(cell.holds for cell in cells)
    assert "equal" in capsys.readouterr().err


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("matrix", ["pair", "features", "engines"])
def test_a_taste_of_each_matrix_says_what_is_equal(
    matrix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    words = [matrix, "--prompts", "1", "--max-tokens", "3", "--no-transformers"]
    few = Matrix.pair_rows

    def two_rows(matrix: Matrix) -> list[Row]:
        return few(matrix)[:2]

    monkeypatch.setattr(Matrix, "all_rows", two_rows)
    monkeypatch.setattr(Matrix, "pair_rows", two_rows)
    assert parity_matrix.main([*words, "--output", str(output)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    assert report["num_tokens"] == report["num_equal"] > 0
    assert report["num_rows"] == report["num_rows_that_hold"] == len(report["cells"]) == 2
    assert ("acceptance" in report) == (matrix != "pair")
