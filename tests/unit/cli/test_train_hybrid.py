"""`outrider train pretrain --family hybrid`: a model that drafts for itself, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doubles.command_line import Command

pytestmark = pytest.mark.wide

SMALL = ("--batch", "2", "--window", "64", "--warmup", "1", "--device", "cpu")
HYBRID = ("--family", "hybrid", "--hidden", "64", "--layers", "3", "--held-out", "0.3", *SMALL)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        body = f"def add_{number}(a, b):\n    return a + b + {number}\n\n\n" * 12
        (folder / f"{number}.py").write_text(body, encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("teacher", [(), ("--teacher", "outrider/embedded")])
def test_a_hybrid_is_trained_and_drafts_for_itself(
    outrider: Command, texts: Path, teacher: tuple[str, ...]
) -> None:
    words = ("train", "pretrain", "made", str(texts), *HYBRID, *teacher, "--json")
    record = json.loads(outrider(*words, "--steps", "3").out)
    assert record["steps"] == 3
    assert record["after"]["held_out_loss"] < record["before"]["held_out_loss"]
    assert "held out loss" in Path("made/README.md").read_text(encoding="utf-8")
    again = json.loads(outrider(*words, "--steps", "4").out)
    assert again["steps"] == 4

    common = ("generate", "def add(a, b):", "--target", "made", "--max-tokens", "12", "--json")
    plain = json.loads(outrider(*common, "--drafter", "none").out)
    drafted = json.loads(outrider(*common, "--drafter", "mtp", "--k", "3").out)
    assert drafted["text"] == plain["text"]
    assert drafted["stats"]["num_drafted"] > 0


@pytest.mark.weights
def test_a_llama_with_a_teacher_is_sent_to_train_draft(outrider: Command, texts: Path) -> None:
    shown = outrider(
        "train", "pretrain", "made", str(texts), *SMALL, "--teacher", "outrider/embedded"
    )
    assert shown.code == 2
    assert "outrider train draft --target outrider/embedded" in shown.err
    assert not Path("made").exists()


@pytest.mark.slow
@pytest.mark.weights
def test_a_block_is_trained_for_a_hybrid_that_is_there(outrider: Command, texts: Path) -> None:
    """It begins as the target's own, so it drafts at once; its folder says how long to draft."""
    target = ("--target", "outrider/embedded-hybrid")
    words = ("train", "mtp", "made", str(texts), *target, "--turns", "2", *SMALL)
    record = json.loads(outrider(*words, "--steps", "2", "--exam-prompts", "2", "--json").out)
    assert record["before"]["tokens_per_round"] > 1.3
    stated = json.loads(Path("made/config.json").read_text(encoding="utf-8"))["outrider_worth"]
    assert stated["drafter"] == "mtp"
    assert len(stated["kept"]) == 4
    worth = record["worth"]
    best = worth["k"] if worth["speed_up"] > 1 else 4

    common = ("generate", "def add(a, b):", *target, "--max-tokens", "12", "--json")
    plain = json.loads(outrider(*common, "--drafter", "none").out)
    drafted = json.loads(outrider(*common, "--draft", "made", "--controller", "fixed").out)
    assert drafted["text"] == plain["text"]
    assert drafted["stats"]["num_drafted"] > 0
    assert drafted["stats"]["k"] == best
