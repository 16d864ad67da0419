"""`outrider bench sweep` from words to files: grids, presets, stops, misuse; without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command, Finished
from doubles.sweeps import QuickLLM
from outrider.api.llm import LLM
from outrider.core.errors import ConfigError
from outrider_lab.bench import drawing
from outrider_lab.bench.studies import sweep as sweep_module
from outrider_lab.bench.studies.sweep_recipes import RECIPES
from outrider_lab.bench.studies.sweep_record import FILE_NAME
from outrider_lab.measure.store import AppendLog

pytestmark = [pytest.mark.wide, pytest.mark.weights]

SMALL = ("bench", "sweep", "--prompts", "2", "--max-tokens", "8", "--warmup", "0", "--no-plots")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> type[QuickLLM]:
    monkeypatch.setattr(sweep_module, "LLM", QuickLLM)
    for name in ("made", "wrong", "absent"):
        monkeypatch.setattr(QuickLLM, name, type(getattr(QuickLLM, name))())
    return QuickLLM


def sweep(outrider: Command, *words: str) -> Finished:
    return outrider(*SMALL, "--output-dir", "out", *words)


def samples(folder: str = "out") -> list[dict[str, Any]]:
    lines = Path(folder, FILE_NAME).read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["record"] == "sample"]


def test_a_sweep_leaves_samples_tables_and_a_page(outrider: Command) -> None:
    shown = sweep(outrider, "--over", "k=2,4", "--over", "temperature=0,0.6")
    assert shown.code == 0, shown.err
    assert "4 cells that draft, 4 visits; results: out" in shown.err
    assert len(samples()) == 12
    found = json.loads(Path("out/summary.json").read_text())
    assert found["axes"] == {"k": [2, 4], "temperature": [0.0, 0.6]}
    assert [cell["values"]["k"] for cell in found["cells"]] == [None, 2, 4] * 2
    assert len(Path("out/summary.csv").read_text().splitlines()) == 7
    assert {"report.md", "report.html"} <= {path.name for path in Path("out").iterdir()}
    for words in ("By k", "By temperature", "What this sweep shows", "mixed prompts, 8 tokens"):
        assert words in shown.out
    run = json.loads(Path("out", FILE_NAME).read_text().splitlines()[0])
    assert run["schema"] == "outrider-bench-sweep/1"
    assert run["axes"] == found["axes"]


def test_the_same_command_goes_on_and_measures_nothing_twice(
    outrider: Command, quick: type[QuickLLM]
) -> None:
    assert sweep(outrider, "--over", "k=2").code == 0
    whole = Path("out", FILE_NAME).read_bytes()
    quick.made.clear()
    assert sweep(outrider, "--over", "k=2").code == 0
    assert quick.made == []
    assert Path("out", FILE_NAME).read_bytes() == whole
    # Killed in the midst of a line.
    Path("out", FILE_NAME).write_bytes(whole[:-25])
    assert sweep(outrider, "--over", "k=2").code == 0
    found = json.loads(Path("out/summary.json").read_text())
    assert [cell["num_samples"] for cell in found["cells"]] == [2, 2]
    assert sweep(outrider, "--over", "k=2", "--fresh").code == 0
    assert len(samples()) == 3 + 2 + 4


def test_an_interrupt_keeps_what_was_measured(outrider: Command, quick: type[QuickLLM]) -> None:
    quick.wrong["model", "Question"] = KeyboardInterrupt()
    shown = sweep(outrider, "--over", "k=2")
    assert shown.code == 130
    assert "2 samples are safe in out" in shown.err
    assert "--output-dir out goes on from there" in shown.err
    assert all(llm.closed for llm in quick.made)
    quick.wrong.clear()
    assert sweep(outrider, "--over", "k=2").code == 0
    assert len(samples()) == 4


def test_failures_are_counted_and_never_end_it(outrider: Command, quick: type[QuickLLM]) -> None:
    quick.wrong["ngram", ""] = RuntimeError("a defect")
    quick.absent["recycling"] = ConfigError("not on this machine")
    shown = sweep(outrider, "--over", "drafter=model,ngram,recycling,block")
    assert shown.code == 1
    assert "note: not measured: drafter=block: there are no block heads" in shown.err
    assert "not measured: drafter=recycling, k=4: ConfigError: not on this machine" in shown.err
    assert "2 failed: RuntimeError: a defect" in shown.out
    assert "Not measured: drafter=recycling" in shown.out
    assert len(samples()) == 6


def test_a_machine_without_room_is_named_and_a_full_disk_ends_it(
    outrider: Command, quick: type[QuickLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.absent["model"] = RuntimeError("out of memory")
    shown = sweep(outrider, "--over", "drafter=model,ngram")
    assert shown.code == 1
    assert "not measured: drafter=model, k=4: RuntimeError: out of memory" in shown.err
    quick.absent["none"] = RuntimeError("out of memory")
    shown = sweep(outrider, "--over", "drafter=suffix")
    assert shown.code == 3
    assert "pair embedded: RuntimeError: out of memory" in shown.err
    quick.absent.clear()
    quick.made.clear()

    def full(_: object, lines: bytes) -> None:
        if b'"sample"' in lines:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(AppendLog, "add", full)
    shown = sweep(outrider, "--over", "drafter=suffix", "--over", "batch=1,2")
    assert shown.code == 3
    assert "No space left on device" in shown.err
    assert len(quick.made) == 2
    assert all(llm.closed for llm in quick.made)


def test_a_pair_that_is_not_here_is_named_and_the_rest_goes_on(outrider: Command) -> None:
    shown = sweep(outrider, "--over", "pair=distilgpt2,embedded", "--over", "k=2", "--json")
    assert shown.code == 3
    assert "pair distilgpt2: " in shown.err
    assert "hf download openai-community/gpt2 && hf download distilbert/distilgpt2" in shown.err
    found = json.loads(shown.out)
    assert found["axes"]["pair"] == ["embedded"] or "distilgpt2" not in str(found["cells"])
    assert {cell["pair"] for cell in found["cells"]} == {"embedded"}


def test_without_any_models_nothing_is_left_behind(outrider: Command) -> None:
    shown = outrider("bench", "sweep", "--preset", "end-to-end")
    assert shown.code == 3
    assert shown.err.count("  try: hf download ") == 4
    assert not Path("results").exists()


def test_a_preset_has_its_shape_on_another_pair(outrider: Command) -> None:
    shown = outrider(
        *("bench", "sweep", "--preset", "llama3-batch", "--pair", "embedded", "--prompts", "4"),
        *("--no-plots", "--warmup", "0"),
    )
    assert shown.code == 0, shown.err
    (folder,) = Path("results").iterdir()
    assert folder.name.endswith("-cpu-embedded-llama3-batch")
    configs = [record["config"] for record in samples(str(folder))]
    assert {(c["batch_size"], c["max_tokens"]) for c in configs} == {(1, 64), (2, 64), (4, 32)}
    assert {c["dtype"] for c in configs} == {"auto"}
    assert "greedy acceptance by batch_size: published 0.858, 0.649, 0.618" in shown.out
    assert "8.45" in shown.out


def test_presets_are_listed(outrider: Command) -> None:
    shown = outrider("bench", "sweep", "--presets")
    assert shown.code == 0
    assert all(name in shown.out for name in RECIPES)
    listed = json.loads(outrider("bench", "sweep", "--presets", "--json").out)
    assert [one["name"] for one in listed] == list(RECIPES)


def test_an_experiment_file_has_axes(outrider: Command) -> None:
    Path("grid.yaml").write_text(
        "over:\n  k: [2, 4]\n  domain: code\nmax_tokens: 4\nprompts: 1\ndrafter: ngram\n"
    )
    shown = outrider(
        *("bench", "sweep", "--experiment", "grid.yaml", "--output-dir", "out", "--no-plots")
    )
    assert shown.code == 0, shown.err
    configs = [record["config"] for record in samples()]
    assert [(c["k"], c["drafter"]) for c in configs] == [(0, "none"), (2, "ngram"), (4, "ngram")]
    assert {(c["max_tokens"], c["prompt_domain"]) for c in configs} == {(4, "code")}


@pytest.mark.slow
def test_a_figure_for_each_axis_of_several_values(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "THEMES", drawing.THEMES[:1])
    words = ("bench", "sweep", "--prompts", "1", "--warmup", "0", "--output-dir", "out")
    shown = outrider(*words, "--over", "k=1,2", "--over", "domain=code")
    assert shown.code == 0, shown.err
    names = {path.name for path in Path("out/figures").iterdir()}
    assert names == {"by_k.svg", "by_k.png"}
    assert "figures: out/figures (2 files)" in shown.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to vary"),
        (("--over", "kk=1"), "did you mean 'k'"),
        (("--over", "k=1", "--over", "k=2"), "names k twice"),
        (("--over", "k=1", "--k", "2"), "--k and --over k"),
        (("--over", "domain=poetry"), "'poetry'"),
        (("--over", "pair=embedded", "--pair", "embedded"), "both name models"),
        (("--over", "pair=embedded", "--target", "x"), "both name models"),
        (("--pair", "nobody", "--over", "k=1"), "'nobody'"),
        (("--preset", "phase-9"), "phase-9"),
        (("--over", "p-hit=0.5"), "--schedule ssd"),
        (("--over", "k=1", "--prompt-set", "none.json"), "none.json"),
        (("--experiment", "none.yaml"), "none.yaml"),
    ],
)
def test_words_that_cannot_be_meant(outrider: Command, words: tuple[str, ...], said: str) -> None:
    shown = outrider("bench", "sweep", *words)
    assert shown.code == 2
    assert said in shown.err
    assert not Path("results").exists()


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_loaded(
    outrider: Command, quick: type[QuickLLM]
) -> None:
    Path("file").touch()
    shown = outrider(*SMALL, "--over", "k=2", "--output-dir", "file/below")
    assert shown.code == 3
    assert "cannot be used" in shown.err
    assert quick.made == []


def test_results_of_another_kind_are_left_alone(outrider: Command) -> None:
    assert sweep(outrider, "--over", "k=2").code == 0
    path = Path("out", FILE_NAME)
    path.write_text(path.read_text().replace('"version": "', '"version": "9.'))
    before = path.read_bytes()
    shown = sweep(outrider, "--over", "k=4")
    assert shown.code == 2
    assert "outrider 9." in shown.err
    assert path.read_bytes() == before
    assert outrider("bench", "k", "--output-dir", "out", "--max-k", "1").code == 2
    assert path.read_bytes() == before


@pytest.mark.slow
def test_the_embedded_pair_in_every_kind_of_cell(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "LLM", LLM)
    shown = outrider(
        *("bench", "sweep", "--over", "drafter=model,ngram", "--over", "concurrency=2"),
        *("--over", "context=40", "--prompts", "2", "--requests", "2", "--max-tokens", "4"),
        *("--output-dir", "out", "--no-plots", "--warmup", "0", "--over", "domain=maths"),
    )
    assert shown.code == 0, shown.err
    assert "Greedy tokens of every exact cell are those of plain decoding" in shown.out
    found = json.loads(Path("out/summary.json").read_text())
    assert [cell["num_samples"] for cell in found["cells"]] == [1, 1, 1]
