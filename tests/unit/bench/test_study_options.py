"""Flags of studies: what a default stands for, and how words that fit none of them end a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from options import Flag, one_of, read

FLAGS: dict[str, Any] = {
    "quick": False,
    "kind": ("one", "two"),
    "files": [],
    "turns": 4,
    "share": 0.5,
    "peers": None,
    "output": Flag(kind=Path | None, default=None, text="also write the result here"),
}


def test_a_default_says_what_a_flag_takes() -> None:
    words = ["--quick", "--kind", "two", "--files", "a", "b", "--turns", "8", "--share", "1"]
    words += ["--peers", "x", "--output", "y.json"]
    found = read("run.py name", "The question.", FLAGS, words)
    assert (found.quick, found.kind, found.files) == (True, "two", ["a", "b"])
    assert (found.turns, found.share, found.peers) == (8, 1.0, "x")
    assert found.output == Path("y.json")


def test_without_words_all_have_their_defaults() -> None:
    found = read("run.py name", "The question.", FLAGS, [])
    assert (found.quick, found.kind, found.files) == (False, "one", [])
    assert (found.turns, found.share, found.peers, found.output) == (4, 0.5, None, None)


def test_words_without_a_flag_are_one_or_any_number() -> None:
    one = {"commit": Flag(kind=str, is_word=True), "seconds": 900.0}
    assert vars(read("against", "", one, ["abc", "--seconds", "3"])) == {
        "commit": "abc",
        "seconds": 3.0,
    }
    many = {"suites": Flag(kind=one_of(("chat", "blocks")), default=(), is_word=True)}
    assert read("conformance", "", many, ["blocks", "chat"]).suites == ("blocks", "chat")
    assert read("conformance", "", many, []).suites == ()


@pytest.mark.parametrize(
    "words", [["--kind", "three"], ["--turns", "many"], ["--unknown"], ["word"]], ids=" ".join
)
def test_words_that_fit_no_flag_end_the_run_with_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        read("run.py name", "The question.", FLAGS, words)
    assert raised.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_a_required_flag_must_be_there() -> None:
    with pytest.raises(SystemExit) as raised:
        read("conformance", "", {"build": Flag(kind=Path)}, [])
    assert raised.value.code == 2


def test_help_has_the_question_and_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        read("run.py name", "The question.", FLAGS, ["--help"])
    assert not raised.value.code
    shown = capsys.readouterr().out
    assert "The question." in shown
    assert "also write the result here" in shown
    assert all(f"--{name}" in shown for name in FLAGS)
