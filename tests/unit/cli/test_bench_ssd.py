"""`run.py ssd`: a whole study at a tiny size, interrupted, gone on with, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cost_study import pair
from cost_study.engines import Bed, CostEngine, CostRun
from cost_study.pair import Make
from cost_study.ssd import ssd

from doubles.command_line import Command, Finished

pytestmark = pytest.mark.wide

TINY = {
    "--pairs": "64x96x2x2x1x32/32x48x1x1x1x32",
    "--layer-share": "2",
    "--scale": "1",
    "--pass-scale": "1",
    "--max-tokens": "6",
    "--repeats": "1",
    "--ks": "2",
    "--threads": "1",
    "--device": "cpu",
    "--output-dir": "run",
}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the half second that memory is read for."""

    def bytes_per_second(threads: int) -> float:
        return 1e10 + threads

    monkeypatch.setattr(pair, "memory_bytes_per_second", bytes_per_second)


@pytest.fixture
def command(outrider: Command, capsys: pytest.CaptureFixture[str]) -> Command:
    """The study as `run.py` starts it, in an empty folder."""
    del outrider

    def call(*words: str, stdin: str = "") -> Finished:
        del stdin
        capsys.readouterr()
        code = ssd.main(words)
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return call


def study(command: Command, **given: str) -> Finished:
    """Tiny, unless words say otherwise."""
    words = TINY | {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    return command("--quick", *(word for pair in words.items() for word in pair))


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "results.json").read_text())


def test_one_command_runs_the_whole_study(command: Command, tmp_path: Path) -> None:
    shown = study(command)
    assert shown.code == 0, shown.err
    for title in ("T_SD", "roofline", "Verification windows", "Cells"):
        assert title in shown.out
    found = record(tmp_path)
    assert (found["benchmark"], found["schema"], found["complete"]) == (
        "ssd",
        "outrider-bench-ssd/1",
        True,
    )
    assert found["provenance"]["packages"]["torch"]
    studies = {(one["study"], one["method"]) for one in found["cells"]}
    assert studies == {
        (study, method)
        for study in ("alpha", "hits", "fan_out", "batch")
        for method in ("ar", "sd", "ssd")
    }
    assert {one["batch"] for one in found["cells"]} == {1, 4}
    assert [one["k"] for one in found["draft_shares"]] == [2]
    assert len(found["products"]) == 2 * 7 * 7
    assert found["windows"]
    assert found["ceilings"]["gigaflops_per_second"] > 0
    assert "layer-sampled: 1 of 2 layers" in {one["sampled"] for one in found["models"]}
    assert found["num_failures"] == 0
    for name in ("report.md", "report.html", "samples.jsonl"):
        assert (tmp_path / "run" / name).exists()


def test_a_study_goes_on_where_it_was_interrupted(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_run, turns = Bed.run, {"left": 4}

    def run(bed: Bed, contestant: CostEngine, *, repeat: int = 0) -> CostRun:
        if not turns["left"]:
            raise KeyboardInterrupt
        turns["left"] -= 1
        return plain_run(bed, contestant, repeat=repeat)

    monkeypatch.setattr(Bed, "run", run)
    first = study(command, studies="hits")
    assert first.code == 130
    assert "the same command" in first.err
    assert not record(tmp_path)["complete"]
    assert record(tmp_path)["draft_shares"]
    turns["left"] = 100
    second = study(command, studies="hits")
    assert second.code == 0, second.err
    found = record(tmp_path)
    assert found["complete"]
    assert {one["study"] for one in found["cells"]} == {"hits"}
    # Words, coins and texts are those of the interrupted run.
    third = study(command, studies="hits")
    assert "all samples already" in third.err
    assert record(tmp_path)["cells"] == found["cells"]


def test_an_engine_that_fails_does_not_end_the_study(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_run = Bed.run

    def run(bed: Bed, contestant: CostEngine, *, repeat: int = 0) -> CostRun:
        taken = plain_run(bed, contestant, repeat=repeat)
        if contestant.p_hit == 0:
            raise RuntimeError("broke")
        if contestant.p_hit == 1:
            return CostRun(taken.numbers, tuple((1, *text) for text in taken.texts))
        return taken

    monkeypatch.setattr(Bed, "run", run)
    shown = study(command, studies="hits")
    assert shown.code == 1
    assert "2 samples failed" in shown.out
    assert "figures mean nothing" in shown.out
    forced = [one["p_hit"] for one in record(tmp_path)["cells"] if one["method"] == "ssd"]
    assert forced == [0.7]
    lines = (tmp_path / "run" / "samples.jsonl").read_text()
    assert "RuntimeError: broke" in lines
    assert "DifferentTokens" in lines


def test_models_that_cannot_be_made_do_not_end_the_study(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pair(*given: object) -> None:
        del given
        raise MemoryError("full")

    monkeypatch.setattr(Make, "pair", pair)
    shown = study(command, studies="hits")
    assert shown.code == 1
    found = record(tmp_path)
    assert found["products"]
    assert not found["cells"]
    assert found["num_failures"] > 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pairs": "8b"}, "no pair '8b'"),
        ({"pairs": ","}, "--pairs names none"),
        ({"studies": "hit"}, "no study 'hit'"),
        ({"ks": "two"}, "must be whole numbers from 0"),
        ({"alphas": "2"}, "--alphas has 2"),
        ({"costs": "heads"}, "no cost 'heads'"),
        ({"scale": "3"}, "cannot be divided by 3"),
        ({"tensor_parallel": "4"}, "which 4 ranks cannot share"),
        ({"tensor_parallel": "2", "quantise": "int8"}, "quantised weights cannot be split"),
        ({"pairs": "llama-70b/llama-70b", "layer_share": "1"}, "GB are free"),
    ],
)
def test_words_that_cannot_be_are_refused(
    command: Command, given: dict[str, str], said: str, tmp_path: Path
) -> None:
    shown = study(command, **given)
    assert shown.code in (2, 3)
    assert said in shown.err
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_study_is_not_written_to(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    shown = study(command, studies="none")
    assert shown.code == 2
    assert "holds other files" in shown.err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]
