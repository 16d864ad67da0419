"""Everything a user can get wrong: exit 2 or 3, one block that helps, never a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider.pairs as pairs
from doubles.command_line import Command
from outrider.cli.main import run
from outrider.cli.options import KNOWN
from outrider.core.settings import SETTINGS

TARGET = Path(pairs.__path__[0]) / "tiny" / "target"
LONG = "word " * 3000

BAD_VALUES = [
    (["--temperature", "nan"], "--temperature must be a finite number"),
    (["--temperature", "inf"], "--temperature must be a finite number"),
    (["--temperature", "-0.1"], "--temperature must be between 0 and 100"),
    (["--temperature", "warm"], "--temperature must be a number"),
    (["--top-p", "1.01"], "--top-p must be between 0 and 1"),
    (["--top-p", "-1"], "--top-p must be between 0 and 1"),
    (["--min-p", "2"], "--min-p must be between 0 and 1"),
    (["--top-k", "-1"], "--top-k must be at least 0"),
    (["--max-tokens", "0"], "--max-tokens must be at least 1"),
    (["--max-tokens", "-5"], "--max-tokens must be at least 1"),
    (["--max-tokens", "1.5"], "--max-tokens must be an integer"),
    (["--max-tokens", "9" * 5000], "--max-tokens must be an integer"),
    (["--seed", "-1"], "--seed must be between"),
    (["--seed", str(2**63)], "--seed must be between"),
    (["--k", "-1"], "--k must be between 0 and 64"),
    (["--k", "65"], "--k must be between 0 and 64"),
    (["--batch-size", "0"], "--batch-size must be between 1 and 1024"),
    pytest.param(["--stop", ""], "stop", marks=pytest.mark.weights),
    (["--drafter", "eagel"], "--drafter: unknown value 'eagel'"),
    (["--drafter", "modle"], "did you mean 'model'?"),
    (["--dtype", "float61"], "did you mean 'float16'?"),
    (["--sampler", "blok"], "did you mean 'block'?"),
    (["--device", "gpu"], "--device: unknown value 'gpu'"),
    (["--color", "never-ever"], "did you mean 'never'?"),
    (["--config", "absent.toml"], "absent.toml: No such file"),
    (["--config", "settings.ini"], "ends in .toml, .yaml or .yml"),
    (["--draft", "none", "--drafter", "model"], "--drafter model needs a draft model"),
    (["--draft", "outrider/embedded", "--drafter", "ngram"], "--drafter ngram reads none"),
    (["--drafter", "none", "--draft", "no-such-model"], "--drafter none reads none"),
    (["--k", "60", "--context", "32"], "k=60"),
]

BAD_FILES = [
    (["--target", "outrider/embeded"], "outrider/embeded", "'outrider/embedded'"),
    (["--target", "no such model"], "no such model", "Known:"),
    (["--target", "../../etc/passwd"], "passwd", ""),
    (["--target", ""], "no model ''", "Known:"),
    (["--draft", "outrider/embedded-drat"], "outrider/embedded-drat", "'outrider/embedded-draft'"),
    (["--output", "absent/out.json"], "absent/out.json cannot be written", "folder"),
    (["--output", "."], "is a folder", "--output"),
]


@pytest.mark.parametrize(("words", "problem"), BAD_VALUES, ids=lambda item: str(item)[:40])
def test_bad_values_exit_with_2(outrider: Command, words: list[str], problem: str) -> None:
    shown = outrider("generate", "x", *words)
    assert shown.code == 2
    assert problem in shown.err
    # Without a compiler, the first line that needs a model says so before.
    lines = [line for line in shown.err.splitlines() if not line.startswith("note: kernels: ")]
    assert lines[0].startswith("error: ")
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert ("leave it out" in shown.err) is (" must be " in problem)


@pytest.mark.parametrize(("words", "problem", "hint"), BAD_FILES, ids=lambda item: str(item)[:40])
def test_bad_files_exit_with_3(
    outrider: Command, words: list[str], problem: str, hint: str
) -> None:
    shown = outrider("generate", "x", *words)
    assert shown.code == 3
    assert problem in shown.err
    assert hint in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.weights
def test_a_flag_may_set_aside_a_draft_that_a_file_names(outrider: Command) -> None:
    Path("own.toml").write_text('draft = "outrider/embedded-draft"\n')
    flags = ("--config", "own.toml", "--drafter", "ngram", "--max-tokens", "1")
    assert outrider("generate", "x", *flags).code == 0


def test_a_file_in_the_folder_is_named_and_chooses_no_model(outrider: Command) -> None:
    Path("outrider.toml").write_text("k = 2\n")
    assert outrider("config").err == "settings from ./outrider.toml\n"
    assert outrider("config", "--config", "outrider.toml").err == ""
    Path("outrider.toml").write_text('sampler = "typical"\n')
    refused = outrider("generate", "x")
    assert (refused.code, refused.out) == (2, "")
    assert "outrider.toml:sampler = 'typical' counts only in a file that you name" in refused.err
    assert "try: --config outrider.toml" in refused.err
    Path("outrider.toml").unlink()
    assert outrider("config").err == ""


@pytest.mark.weights
@pytest.mark.parametrize("prompt", ["", LONG])
def test_prompts_that_do_not_fit_exit_with_2(outrider: Command, prompt: str) -> None:
    shown = outrider("generate", prompt)
    assert (shown.code, shown.out) == (2, "")
    assert "prompt" in shown.err


def test_no_prompt_at_all_exits_with_2(outrider: Command) -> None:
    shown = outrider("generate")
    assert (shown.code, shown.out) == (2, "")
    assert "no prompt" in shown.err


@pytest.mark.weights
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b"{"),
        ("config.json", None),
        ("config.json", b"[]"),
        ("config.json", b'{"model_type": "mamba"}'),
        ("model.safetensors", None),
        ("model.safetensors", b"\x08" * 100),
        ("tokenizer_config.json", b"\xff"),
    ],
)
def test_damaged_folders_exit_with_3_and_name_the_file(
    outrider: Command, tmp_path: Path, name: str, content: bytes | None
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    shown = outrider("generate", "x", "--target", str(folder), "--drafter", "none")
    assert shown.code == 3
    assert name.removeprefix("model.") in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.weights
def test_a_folder_with_pickled_weights_only_is_refused(outrider: Command, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    shown = outrider("generate", "x", "--target", str(folder), "--drafter", "none")
    assert shown.code == 3
    assert "safetensors" in shown.err


def test_a_bad_variable_is_named(outrider: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_KK", "3")
    shown = outrider("config")
    assert shown.code == 2
    assert "unknown variable 'OUTRIDER_KK'" in shown.err
    assert "'OUTRIDER_K'" in shown.err


def test_debug_adds_the_traceback(outrider: Command) -> None:
    shown = outrider("generate", "x", "--k", "nine", "--debug")
    assert shown.code == 2
    assert "Traceback" in shown.err
    assert shown.err.splitlines()[-2].startswith("error: --k must be an integer")


# Verbs that load a model, with the words that they need; M stands for its name.
LOADERS = {
    "generate": "x --target M",
    "generate, draft": "x --draft M",
    "chat": "--prompt x --target M",
    "batch": "in.jsonl out.jsonl --target M",
    "serve": "--target M",
    "serve, draft": "--draft M",
    "serve, check": "--check --target M",
    "plan": "--target M",
    "plan, draft": "--draft M",
    "verify": "--target M",
    "verify, draft": "--draft M",
    "trace": "x --target M",
    "bench drafters": "--target M",
    "bench drafters, draft": "--draft M",
    "bench engines": "--target M",
    "bench load": "--target M",
    "bench quality": "--target M",
    "bench k": "--target M",
    "bench sweep": "--over k=2 --target M",
    "draft suggest": "M",
    "draft check": "M outrider/embedded",
    "models load": "M",
    "models inspect": "M",
    "models export": "M a.gguf",
    "train eagle": "heads in.jsonl --steps 1 --target M",
}
# Of those with --target: what shows settings or the machine, writes a file for others, or fetches.
LOAD_NOTHING = {"config", "doctor", "cluster config", "bench peers", "simulate", "bench simulate"}


@pytest.mark.parametrize("verb", LOADERS)
def test_what_is_no_model_is_said_first_and_alone(outrider: Command, verb: str) -> None:
    Path("in.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    words = LOADERS[verb].replace("M", "./no-such-model").split()
    shown = outrider(*verb.partition(",")[0].split(), *words)
    assert (shown.code, shown.out) == (3, "")
    assert shown.err.startswith("error: ")
    assert "no-such-model" in shown.err.splitlines()[0]
    assert sum(not line.startswith(("  ", "error: ")) for line in shown.err.splitlines()) == 0


def test_every_verb_that_loads_a_model_is_tried() -> None:
    taking = {
        path
        for path, verb in KNOWN.items()
        if "target" in {item.name for item in verb.offered_settings()}
    }
    assert taking - LOAD_NOTHING == {name for name in LOADERS if name in taking}


WORDS = st.one_of(
    st.sampled_from([item.flag for item in SETTINGS.values()]),
    st.sampled_from(["--json", "--", "-", "-x", "--no-", "=", "--=", "--k=", "models", "config"]),
    st.text(max_size=5),
)


@pytest.mark.wide
@settings(max_examples=12)
@given(st.lists(WORDS, max_size=6))
def test_any_words_are_answered(words: list[str]) -> None:
    """`config` takes every flag and loads nothing, so it may be called with anything."""
    assert run(["config", *words]) in (0, 2)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--draft-lookup",), "did you mean '--drafter'?"),
        (("--draft-min", "5"), "did you mean '--min-k'?"),
        (("--spec-type", "ngram"), "did you mean '--drafter'?"),
        (("--impl", "fake"), "no counterpart here"),
    ],
)
def test_a_flag_of_others_names_ours(outrider: Command, words: tuple[str, ...], hint: str) -> None:
    shown = outrider("generate", "x", *words)
    assert (shown.code, shown.out) == (2, "")
    assert hint in shown.err
