"""`outrider report` in this process: words, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doubles import report_results
from doubles.command_line import Command
from doubles.sweeps import small_sweep
from outrider_lab.bench import drawing


def no_module(_: str) -> None:
    """Stands for `find_spec` where nothing is installed."""


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures have tests of their own, and take most of the time."""
    monkeypatch.setattr(drawing, "find_spec", no_module)


def test_a_page_is_written_and_summed_up(tmp_path: Path, outrider: Command) -> None:
    small_sweep(tmp_path / "k")
    done = outrider("report", "k")
    assert done.code == 0
    assert "gain: K sweep: toy: in 2 of 4 cells" in done.out
    assert "loss: K sweep: toy: in 1 of 4 cells; 0.500×" in done.out
    assert "page: report.html (0." in done.out
    assert "altair is not installed" in done.err
    text = (tmp_path / "report.html").read_text()
    assert "K sweep: toy" in text
    again = outrider("report", "k", "--output", "again.html")
    assert again.code == 0
    assert (tmp_path / "again.html").read_text() == text


def test_json_says_the_same(tmp_path: Path, outrider: Command) -> None:
    small_sweep(tmp_path / "k")
    report_results.write(tmp_path, "drafters", report_results.drafters())
    (tmp_path / "k" / "stray.json").write_text("{}")
    done = outrider("report", "k", "drafters", "--json", "--figures", "figures")
    record = json.loads(done.out)
    assert [part["kind"] for part in record["parts"]] == ["K sweep", "drafters"]
    assert record["parts"][0]["claims"][0]["ratio"]["value"] == 2.0
    assert record["bytes"] == len((tmp_path / "report.html").read_bytes())
    assert [item["place"] for item in record["skipped"]] == ["k/stray.json"]
    assert "skipped: k/stray.json: it does not say which benchmark it is of" in done.err
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((), 2, "FOLDER is missing"),
        (("nowhere",), 2, "nowhere does not exist"),
        (("empty",), 2, "outrider bench k"),
        (("k", "--output", "no/such/page.html"), 3, "cannot be written"),
        (("k", "--output", "empty"), 3, "is a folder"),
    ],
)
def test_mistakes_are_explained(
    tmp_path: Path, outrider: Command, words: tuple[str, ...], code: int, says: str
) -> None:
    small_sweep(tmp_path / "k")
    (tmp_path / "empty").mkdir()
    done = outrider("report", *words)
    assert done.code == code
    assert says in done.err
    assert not list(tmp_path.glob("*.html"))
