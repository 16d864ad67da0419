"""`outrider models export`: what it writes and says, and how it fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from doubles.command_line import Command
from doubles.gguf_file import Gguf
from outrider.models.loading import resolve

EXPORT = ("models", "export", "outrider/embedded-draft")


@pytest.mark.weights
def test_it_writes_a_file_and_says_what_it_holds(outrider: Command, tmp_path: Path) -> None:
    words = (*EXPORT, "m.gguf", "--gguf", "q8_0", "--pre-tokenizer", "gpt-2")
    shown = outrider(*words)
    assert shown.code == 0, shown.err
    first, note = shown.out.splitlines()
    assert first == "m.gguf: 20 tensors in q8_0, 2 MB."
    assert note.startswith("note: ")
    assert len(Gguf.read(tmp_path / "m.gguf").tensors) == 20
    again = outrider(*words)
    assert (again.code, again.out) == (2, "")
    assert "--force" in again.err
    record = json.loads(outrider(*words, "--force", "--json").out)
    assert record["file"] == "m.gguf"
    assert record["num_bytes"] == (tmp_path / "m.gguf").stat().st_size
    assert record["notes"]


@pytest.mark.weights
def test_the_file_is_called_as_the_model_is_and_not_by_a_path(
    outrider: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "private" / "my-model"
    shutil.copytree(resolve("outrider/embedded-draft"), folder)
    options = ("m.gguf", "--gguf", "q8_0", "--pre-tokenizer", "gpt-2", "--force")
    for model, name in (("outrider/embedded-draft",) * 2, (str(folder), "my-model")):
        assert outrider("models", "export", model, *options).code == 0
        assert Gguf.read(tmp_path / "m.gguf").metadata["general.name"] == name


@pytest.mark.weights
@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["models", "export"], 2, "MODEL is missing"),
        ([*EXPORT], 2, "FILE is missing"),
        ([*EXPORT, "m.gguf"], 3, "--pre-tokenizer"),
        ([*EXPORT, "m.gguf", "--gguf", "q5_0"], 2, "q5_0"),
        ([*EXPORT, "m.gguf", "--pre-tokenizer", "gpt2"], 2, "did you mean 'gpt-2'?"),
        ([*EXPORT, "no/m.gguf"], 2, "no folder"),
    ],
)
def test_it_explains_what_is_wrong(
    outrider: Command, words: list[str], code: int, problem: str
) -> None:
    shown = outrider(*words)
    assert (shown.code, shown.out) == (code, "")
    assert problem in shown.err
    assert not list(Path().glob("*.gguf"))
