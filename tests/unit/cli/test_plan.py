"""`outrider plan`: advice from a small calibration, for devices elsewhere, and words to refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command
from outrider.cli import plan as verb

SMALL = (
    *("plan", "--drafters", "ngram", "--domains", "code", "--seconds", "0.5"),
    *("--max-tokens", "6", "--batch", "2"),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(verb, "cache_folder", lambda: folder)
    return folder


@pytest.mark.weights
@pytest.mark.slow
def test_a_plan_is_measured_once_and_said_in_words(outrider: Command, cache: Path) -> None:
    shown = outrider(*SMALL, "--json", "--save", "plan.json")
    assert shown.code == 0, shown.err
    record: dict[str, Any] = json.loads(shown.out)
    assert json.loads(Path("plan.json").read_text()) == record
    assert record["measured_before"] is False
    assert record["same_texts"] == {"ngram": True}
    assert [Path(record["stored"])] == list(cache.rglob("*.json"))
    found = record["calibration"]
    assert found["memory_bytes"] > 0
    assert found["provenance"]["clocks"].keys() >= {"cpu_mhz", "cpu_limit"}
    (drafter,) = found["drafters"]
    assert drafter["name"] == "ngram"
    assert drafter["num_rounds"] > 0
    plan = record["plan"]
    assert plan["job"]["batch"] == 2
    assert {option["k"] for option in plan["options"]} >= {1, 4, 16}
    assert all(option["low"] <= option["speed_up"] <= option["high"] for option in plan["options"])
    again = outrider(*SMALL)
    assert again.code == 0, again.err
    assert "measured before in" in again.out
    assert "Every drafter wrote the text of plain decoding." in again.out
    assert "Run it:\n    outrider generate" in again.out
    assert ("Speculate: ngram" in again.out) != ("Do not speculate, because" in again.out)


def test_a_device_that_is_not_here_is_planned_for(outrider: Command) -> None:
    words = ("--drafters", "model,ngram", "--device", "h100", "--alpha", "0.8,0.7")
    shown = outrider("plan", "outrider/embedded", *words)
    assert shown.code == 0, shown.err
    assert "outrider/embedded on h100" in shown.out
    assert "nothing was measured" in shown.out
    assert "prompts of 512 tokens" in shown.out
    assert "e+0" not in shown.out
    assert max(map(len, shown.out.split("Run it:")[0].splitlines())) <= 80
    record: dict[str, Any] = json.loads(outrider("plan", *words, "--json").out)
    assert {option["drafter"] for option in record["plan"]["options"]} == {"model", "ngram"}
    assert record["stored"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "h100"), "--alpha 0.8"),
        (("--alpha", "0.8"), "here it is counted"),
        (("--save", "."), "name a file with --save"),
        (("--prompts", "."), "name a text file"),
        (("--device", "h1000", "--alpha", "0.8"), "h1000"),
        (("--device", "h100", "--alpha", "often"), "between 0 and 1"),
        (("--device", "h100", "--alpha", "1.5"), "between 0 and 1"),
        (("--device", "h100", "--alpha", "0.8", "--drafters", "mtp"), "drafter 'mtp'"),
        (
            ("--device", "h100", "--alpha", "0.8", "--drafters", "model,ngrm"),
            "did you mean 'ngram'",
        ),
        (("--domains", ","), "--domains names nothing"),
        (("--domains", "poetry"), "'poetry'"),
        (("--drafters", "ngrm"), "did you mean 'ngram'"),
        (("--prompts", "nowhere.txt"), "neither a domain nor a file"),
        (("outrider/embedded", "--target", "other"), "two models"),
        (("--drafter", "ngram"), "unknown option '--drafter'"),
        (("--batch", "1024", "--max-tokens", "1000000000"), "--batch"),
    ],
)
def test_words_that_cannot_be_meant(outrider: Command, words: tuple[str, ...], said: str) -> None:
    shown = outrider("plan", *words)
    # What does not fit into memory is the machine's fault, not the words'.
    assert shown.code in (2, 3), shown.out
    assert said in shown.err
