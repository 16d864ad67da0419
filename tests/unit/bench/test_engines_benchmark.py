"""`benchmarks/engines.py` runs from a clean checkout and ends with one JSON object."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.slow
@pytest.mark.weights
def test_a_taste_of_it_ends_with_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, script = tmp_path / "result.json", str(FOLDER / "engines.py")
    monkeypatch.syspath_prepend(FOLDER)  # pyright: ignore[reportUnknownMemberType]
    words = [script, "--quick", "--tier", "a", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(script, run_name="__main__")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    assert report["bars"] == {"growth_at_8": 4.0, "auto_median": 0.97, "auto_low": 0.95}
    (tier,) = report["tiers"]
    assert tier["tier"] == "a"
    assert {(cell["level"], cell["engine"]) for cell in tier["cells"]} == {
        (level, engine)
        for level in (1, 2)
        for engine in ("off", "single", "pd", "pdv", "ssd", "auto")
    }
    assert [cell["status"] for cell in tier["cells"]] == ["success"] * 12
    assert tier["agreement"] == {"visits": 2, "same_tokens": 2}
