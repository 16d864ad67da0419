"""A run's folder: claimed only where it can be filled, and filled whole or with a clear error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from outrider.core.errors import CheckpointError, ConfigError, MachineError
from outrider_lab.train import folder as run_folder
from outrider_lab.train.folder import WORK, claim, fill
from outrider_lab.train.loop import Export

pytestmark = pytest.mark.usefixtures("warm_python")

NET = Export({"weight": torch.zeros(2)}, {"model_type": "none"})


def test_a_claimed_folder_is_a_runs_until_it_is_asked_anew(tmp_path: Path) -> None:
    work = claim(tmp_path / "run", fresh=False).work
    (work / "state").touch()
    assert claim(tmp_path / "run", fresh=False).work == work == tmp_path / "run" / WORK
    assert (work / "state").exists()
    claim(tmp_path / "run", fresh=True)
    assert not (work / "state").exists()


HOLDER = """
import sys, time
from pathlib import Path
from outrider_lab.train.folder import claim

claimed = claim(Path(sys.argv[1]), fresh=False)
print("claimed", flush=True)
time.sleep(600)
"""


@pytest.mark.wide
@pytest.mark.parametrize("fresh", [False, True])
def test_two_runs_do_not_share_a_folder(tmp_path: Path, fresh: bool) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "claimed\n"
            state = tmp_path / "run" / WORK / "state"
            state.write_text("its own")
            with pytest.raises(ConfigError, match="another training fills") as caught:
                claim(tmp_path / "run", fresh=fresh)
            assert caught.value.hint is not None
            assert state.read_text() == "its own"
        finally:
            holder.kill()
    # Nobody can hold what a dead process held.
    claim(tmp_path / "run", fresh=fresh)
    assert state.exists() != fresh


def test_a_run_that_fails_before_it_begins_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    claimed = claim(tmp_path / "deep" / "run", fresh=False)
    (claimed.work / "tokens.part").touch()
    with pytest.raises(CheckpointError), claimed.begun():
        raise CheckpointError("no tokenizer")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_run_that_was_there_stays_when_it_cannot_go_on(tmp_path: Path) -> None:
    (claim(tmp_path / "run", fresh=False).work / "state").touch()
    claimed = claim(tmp_path / "run", fresh=False)
    with pytest.raises(CheckpointError), claimed.begun():
        raise CheckpointError("no tokenizer")
    assert (claimed.work / "state").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_no_run_is_left_alone(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    for place, said in ((tmp_path, "thesis.txt"), (tmp_path / "thesis.txt", "is a file")):
        with pytest.raises(ConfigError, match=said):
            claim(place, fresh=fresh)
    with pytest.raises(MachineError, match="cannot be written"):
        claim(tmp_path / "thesis.txt" / "run", fresh=fresh)
    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("error", [SafetensorError("No space left"), OSError(28, "No space left")])
def test_a_full_disk_is_named_and_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(run_folder, "save_file", full)
    with pytest.raises(MachineError, match="No space left") as caught:
        fill(tmp_path, NET, "card", {})
    assert "free some space" in (caught.value.hint or "")
    assert not (tmp_path / "config.json").exists()
