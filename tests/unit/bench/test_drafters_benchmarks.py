"""`benchmarks/drafters.py` and `drafters_parity.py` run from a clean checkout."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.wide

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.slow
@pytest.mark.weights
def test_a_taste_of_it_ends_with_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, script = tmp_path / "result.json", str(FOLDER / "drafters.py")
    monkeypatch.syspath_prepend(FOLDER)  # pyright: ignore[reportUnknownMemberType]
    words = [script, "--quick", "--tier", "a", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(script, run_name="__main__")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    assert report["bars"] == {"lookups_on_adversarial": 0.97}
    (tier,) = report["tiers"]
    assert {"off", "ngram", "model"} <= {cell["contestant"] for cell in tier["cells"]}
    assert {cell["status"] for cell in tier["cells"]} == {"success"}
    assert set(tier["met"]) == {"lookups_on_adversarial", "heads_over_model", "trees_over_chains"}


@pytest.mark.slow
@pytest.mark.weights
def test_parity_is_run_with_every_drafter_that_finds_what_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script: dict[str, Any] = runpy.run_path(str(FOLDER / "drafters_parity.py"))
    ground = script["ground_of"]("dense", "outrider/embedded", None)
    assert {"ngram", "suffix", "model", "quantised-self"} <= set(ground.drafts)
    assert ground.drafts["model"] == "outrider/embedded-draft"
    few = ground.pair_rows()[:2]
    cells = script["measured"](ground, few, 3)
    assert [cell.row for cell in cells] == few
    assert all(cell.holds for cell in cells)
    assert "equal" in capsys.readouterr().err
