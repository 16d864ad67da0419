"""`scripts/against`: two sides take turns, and one that was slowed down on purpose is found."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[3]
CELL = "a-bf16/model"


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "studies")  # pyright: ignore[reportUnknownMemberType]
    return importlib.import_module("against")


def has_history() -> bool:
    words = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", "HEAD"]
    return bool(shutil.which("git")) and subprocess.run(words, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.skipif(not has_history(), reason="needs git and a commit")
def test_a_taste_of_this_commit_against_itself(
    against: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    words = ["HEAD", "--cells", f"{CELL},a-int8/pass-16", "--seconds", "0", "--threads", "1"]
    against.main([*words, "--json", str(output)])
    report = json.loads(output.read_text("utf-8"))
    assert [cell["cell"] for cell in report["cells"]] == [CELL, "a-int8/pass-16"]
    for cell in report["cells"]:
        assert not cell["errors"]
        assert not cell["differing"]
        assert cell["kernels"]["old"] == cell["kernels"]["new"]
        assert all(0 < r["low"] <= r["value"] <= r["high"] for r in cell["ratios"])
    assert report["provenance"]["cpu"]
    assert len(report["old"]) == 40
    assert CELL in capsys.readouterr().out


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.weights
def test_a_sleep_and_another_token_are_found(against: ModuleType, tmp_path: Path) -> None:
    source, planted = ROOT / "src", tmp_path / "src"
    shutil.copytree(source, planted, copy_function=os.symlink)
    file = planted / "outrider" / "api" / "output.py"
    text = file.read_text("utf-8")
    file.unlink()
    file.write_text(
        text
        + "\n\n_result = OutputStream.result\n\n\n"
        + "def _slower(self, **words):\n"
        + "    import time, dataclasses\n"
        + "    time.sleep(0.25)\n"
        + "    result = _result(self, **words)\n"
        + "    return dataclasses.replace(result, token_ids=result.token_ids[:-1])\n\n\n"
        + "OutputStream.result = _slower\n",
        "utf-8",
    )
    cells = against.chosen(CELL, threads=1)
    (found,) = against.compare({"old": source, "new": planted}, cells, seconds=0)
    assert not found.errors
    assert found.fails
    assert len(found.ratios) == against.MAX_SITTINGS
    assert all(ratio.high < against.BAR for ratio in found.ratios)
    before, after = found.differing[0]
    assert [ids[:-1] for ids in before] == after


def test_what_only_the_other_side_ran_fails(against: ModuleType) -> None:
    found = against.Found("cell", errors={"new": "ConfigError: no such drafter"})
    assert found.fails
    found = against.Found("cell", errors={"old": "ConfigError: no such drafter"})
    assert not found.fails
    assert "not compared: old: ConfigError" in found.line()


def test_one_slow_sitting_is_not_enough(against: ModuleType) -> None:
    slow, fair = against.Ratio(0.9, 0.88, 0.92, 9), against.Ratio(1.0, 0.97, 1.03, 9)
    assert against.Found("cell", [slow]).seems_slower
    assert not against.Found("cell", [slow]).fails
    assert not against.Found("cell", [slow, fair]).fails
    assert against.Found("cell", [slow, slow]).fails


def test_an_unknown_cell_is_told_the_known_ones(against: ModuleType) -> None:
    with pytest.raises(SystemExit, match="b-int8/ngram"):
        against.chosen("c-*", threads=1)
