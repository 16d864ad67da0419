"""Each benchmark runs from a clean checkout, says what it measured, and writes it down."""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.wide

FOLDER = Path(__file__).parents[3] / "studies"
# Names of what a benchmark must say, beside what all say.
SAYS = {
    "limits": ("ceilings", "cells", "layers", "bars"),
    "verify_cost": ("kernels", "cells"),
    "drafter_cost": ("kernels", "cells"),
    "linear_rows": ("arithmetic", "cells"),
    "lookup_cost": ("k", "cells"),
    "predicted": ("cells", "bar"),
    "tiers": ("kernels", "cells", "bar", "met"),
    "batch": ("kernels", "cells", "ratio_at_16", "bar"),
    "memory_cost": ("append_us", "append_ratio", "rollback_ratio", "bars"),
    "overhead": ("cells",),
    "accept_cost": ("cells",),
    "quantise_error": ("formats",),
    "audits": ("cells", "alarms", "found", "family_level"),
    "soak": ("cells",),
    "structured": ("cells", "json_schema", "meets_goal"),
}


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("name", SAYS)
@pytest.mark.usefixtures("one_torch_thread")
def test_a_taste_of_it_ends_with_one_json_object(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = taste(name, ["--quick"], tmp_path, monkeypatch)
    assert report == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["benchmark"] == name
    assert report["quick"] is True
    assert report["provenance"]["packages"]["outrider"]
    assert report["provenance"]["command"] == f"run.py {name} --quick --output FILE"
    assert set(SAYS[name]) <= set(report)
    assert all(map(math.isfinite, numbers(report)))
    # Differences: a busy machine may turn that of two times round.
    report.pop("layers", None)
    for cell in report.get("cells", ()):
        cell.pop("memory_growth", None)
        cell.pop("acceptance_drift", None)
    assert min(numbers(report)) >= 0


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
def test_a_hybrid_has_a_verify_cost_of_each_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--hybrid", "--quick", "--repeats", "1"]
    cells = taste("verify_cost", words, tmp_path, monkeypatch)["cells"]
    assert {cell["rollback"] for cell in cells} == {"ring", "replay"}
    assert {1, 16} <= {cell["rows"] for cell in cells}
    assert all(cell["recurrent_ms"] > 0 and cell["ms"] > 0 for cell in cells)


@pytest.mark.slow
@pytest.mark.weights
def test_a_taste_of_all_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = taste("engines", ["--quick", "--tier", "a"], tmp_path, monkeypatch)
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


@pytest.mark.slow
@pytest.mark.weights
def test_a_taste_of_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = taste("drafters", ["--quick", "--tier", "a"], tmp_path, monkeypatch)
    assert report["bars"] == {"lookups_on_adversarial": 0.97}
    (tier,) = report["tiers"]
    assert {"off", "ngram", "model"} <= {cell["contestant"] for cell in tier["cells"]}
    assert {cell["status"] for cell in tier["cells"]} == {"success"}
    assert set(tier["met"]) == {"lookups_on_adversarial", "heads_over_model", "trees_over_chains"}


def taste(
    name: str, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What a study writes that is run with these words."""
    output = folder / "result.json"
    monkeypatch.syspath_prepend(FOLDER)  # pyright: ignore[reportUnknownMemberType]
    monkeypatch.setattr(sys, "argv", ["run.py", name, *words, "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")
    assert not ended.value.code
    return json.loads(output.read_text())


def numbers(value: Any) -> list[float]:
    """All of them, however deep."""
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers(inner)]  # pyright: ignore
    if isinstance(value, list):
        return [n for inner in value for n in numbers(inner)]  # pyright: ignore
    return [value] if isinstance(value, float) else []
