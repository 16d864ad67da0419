"""`outrider bench k`: a small sweep from end to end, stopped, resumed, and misused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command, Finished
from outrider_lab.bench import drawing, figures
from outrider_lab.bench.studies.sweep import SweepLineup
from outrider_lab.bench.studies.sweep_recipes import ALIASES, REFERENCES
from outrider_lab.bench.studies.sweep_record import FILE_NAME

pytestmark = pytest.mark.wide

SMALL = ("bench", "k", "--domains", "code", "--prompts", "2", "--ks", "1,2", "--max-tokens", "8")


def sweep(outrider: Command, *words: str, plots: bool = False) -> Finished:
    extra = [] if plots else ["--no-plots"]
    return outrider(*SMALL, "--output-dir", "out", *extra, *words)


def records(folder: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, FILE_NAME).read_text().splitlines()]


def keys() -> list[tuple[str, int]]:
    return [(r["piece"], r["config"]["k"]) for r in records() if r["record"] == "sample"]


ALL_KEYS = [(f"code_{i:03d}", k) for i in range(2) for k in (0, 1, 2)]


@pytest.mark.weights
@pytest.mark.slow
def test_a_sweep_leaves_samples_a_summary_and_figures(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "FIGURES", {"speedup_map": figures.FIGURES["speedup_map"]})
    shown = sweep(outrider, plots=True)
    assert shown.code == 0, shown.err
    assert keys() == ALL_KEYS
    run = records()[0]
    assert run["target"] == "outrider/embedded"
    assert {"utc", "command", "commit", "packages"} <= run["provenance"].keys()
    assert run["kernels"]
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["greedy_identical"] is True
    assert [cell["k"] for cell in summary["cells"]] == [0, 1, 2]
    assert all(cell["num_samples"] == 2 for cell in summary["cells"])
    assert len(Path("out/summary.csv").read_text().splitlines()) == 4
    assert len(list(Path("out/figures/embedded").iterdir())) == 4
    assert "embedded, code prompts, greedy, 8 tokens, batch 1, drafter model" in shown.out
    assert "Greedy tokens of every exact cell are those of plain decoding" in shown.out
    assert "figures: out/figures (4 files)" in shown.out


@pytest.mark.weights
@pytest.mark.slow
def test_a_second_run_measures_only_what_is_missing(outrider: Command) -> None:
    assert sweep(outrider).code == 0
    path = Path("out", FILE_NAME)
    whole = path.read_text()
    again = sweep(outrider)
    assert again.code == 0
    assert "has all samples already" in again.err
    assert path.read_text() == whole
    # Without one row, its piece is measured again at every K.
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[:-2] + lines[-1:]))
    assert sweep(outrider).code == 0
    assert keys() == [*ALL_KEYS[:-2], ALL_KEYS[-1], *ALL_KEYS[3:]]
    # A line that a kill cut off is dropped.
    path.write_text(whole[:-30])
    shown = sweep(outrider, "--json")
    assert shown.code == 0
    assert keys() == [*ALL_KEYS[:-1], *ALL_KEYS[3:]]
    found = json.loads(shown.out)
    assert [cell["num_samples"] for cell in found["cells"]] == [2, 2, 2]


@pytest.mark.weights
@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured_and_says_how_to_go_on(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = SweepLineup.measure

    def interrupted(self: SweepLineup, visit: Any, *, run: int, number: int) -> Any:
        if visit.turn == 1:
            raise KeyboardInterrupt
        return measure(self, visit, run=run, number=number)

    monkeypatch.setattr(SweepLineup, "measure", interrupted)
    shown = sweep(outrider)
    assert shown.code == 130
    assert "3 samples are safe in out" in shown.err
    assert "--output-dir out" in shown.err
    assert keys() == ALL_KEYS[:3]
    monkeypatch.setattr(SweepLineup, "measure", measure)
    assert sweep(outrider).code == 0
    assert keys() == ALL_KEYS


@pytest.mark.weights
@pytest.mark.slow
def test_a_prompt_without_a_draft_runs_plainly(outrider: Command) -> None:
    shown = outrider(
        *("bench", "k", "--single-prompt", "def f(x):", "--draft", "none", "--max-tokens", "4"),
        *("--no-plots", "--reference"),
    )
    assert shown.code == 0, shown.err
    assert "only plain decoding runs" in shown.err
    (folder,) = Path("results").iterdir()
    assert folder.name.endswith("-cpu-embedded")
    assert [r["label"] for r in records(str(folder)) if r["record"] == "sample"] == ["AR"]
    assert all(item.setting in shown.out for item in REFERENCES)


@pytest.mark.weights
@pytest.mark.slow
def test_an_experiment_file_fills_in_what_flags_leave_open(outrider: Command) -> None:
    Path("small.yaml").write_text(
        "domains: [maths]\nprompts: 1\nks: [2]\nmax_tokens: 4\nno_plots: true\n"
        "temperature: 0.7\ndrafter: ngram\n"
    )
    shown = outrider(
        *("bench", "k", "--experiment", "small.yaml", "--ks", "3", "--output-dir", "out")
    )
    assert shown.code == 0, shown.err
    assert keys() == [("maths_000", 0), ("maths_000", 3)]
    config = records()[-1]["config"]
    assert (config["temperature"], config["drafter"], config["max_tokens"]) == (0.7, "ngram", 4)


@pytest.mark.weights
def test_lists_in_an_experiment_file_stay_lists_of_settings(outrider: Command) -> None:
    Path("lists.yaml").write_text(
        'stop: ["return", "\\n"]\nbad_words: [the, a]\nks: [1, 2]\nsingle_prompt: a\n'
        "max_tokens: 1\nno_plots: true\nwarmup: 0\n"
    )
    shown = outrider("bench", "k", "--experiment", "lists.yaml", "--output-dir", "out")
    assert shown.code == 0, shown.err
    others = records()[-1]["config"]["others"]
    assert json.loads(others["stop"]) == ["return", "\n"]
    assert json.loads(others["bad_words"]) == ["the", "a"]
    assert keys() == [("single_000", k) for k in (0, 1, 2)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ks", "1,x"), "whole numbers"),
        (("--ks", "65"), "whole numbers"),
        (("--ks", ","), "whole numbers"),
        (("--ks", "1", "--max-k", "2"), "--ks and --max-k"),
        (("--domains", "poetry"), "'poetry'"),
        (("--pairs", "nobody"), "'nobody'"),
        (("--pairs", "embedded", "--target", "x"), "--pairs and --target"),
        (("--preset", "phase-9"), "'phase-9'"),
        (("--single-prompt", ""), "empty"),
        (("--single-prompt", "a", "--domains", "code"), "--single-prompt and --domains"),
        (("--single-prompt", "a", "--prompts", "1"), "--single-prompt and --prompts"),
        (("--single-prompt", "a", "--prompt-set", "x.json"), "--single-prompt and --prompt-set"),
        (("--drafter", "model", "--draft", "none"), "needs a draft model"),
        (("--prompt-set", "none.json"), "none.json"),
        (("--experiment", "none.yaml"), "none.yaml"),
        (("--k", "3"), "unknown option '--k'"),
    ],
)
def test_words_that_cannot_be_meant(outrider: Command, words: tuple[str, ...], said: str) -> None:
    shown = outrider("bench", "k", *words)
    assert shown.code == 2
    assert said in shown.err
    assert not Path("results").exists()


@pytest.mark.parametrize(
    "text", ["k: 3\n", "nonsense: 1\n", "- 1\n", "a: [\n", "prompts: many\n", "top_k: [1]\n"]
)
def test_a_bad_experiment_file_is_named(outrider: Command, text: str) -> None:
    Path("bad.yaml").write_text(text)
    shown = outrider("bench", "k", "--experiment", "bad.yaml")
    assert shown.code == 2
    assert "bad.yaml" in shown.err


def test_a_recipe_whose_models_are_not_here_fails_cleanly(outrider: Command) -> None:
    for name in (*ALIASES, *ALIASES.values()):
        shown = outrider("bench", "k", "--preset", name)
        assert shown.code == 3
        assert "hub" in shown.err
        assert "Traceback" not in shown.err
    assert not Path("results").exists()


def no_module(_: str) -> None:
    """Stands for `find_spec` where nothing is installed."""


@pytest.mark.weights
def test_missing_altair_is_a_note(outrider: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "find_spec", no_module)
    shown = outrider(
        *("bench", "k", "--single-prompt", "a", "--ks", "0", "--max-tokens", "1"),
        *("--output-dir", "out"),
    )
    assert shown.code == 0, shown.err
    assert "note: no figures: altair" in shown.err
    assert not Path("out/figures").exists()
