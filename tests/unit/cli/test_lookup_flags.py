"""Lookups on the command line: with and without a draft model, a corpus and a guess."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doubles.command_line import Command

BRIEF = ("--max-tokens", "2", "--k", "2")


@pytest.mark.weights
@pytest.mark.slow
def test_a_portfolio_without_a_draft_is_its_lookups(outrider: Command) -> None:
    shown = outrider("generate", "x = 1", "--drafter", "portfolio", "--draft", "none", *BRIEF)
    assert shown.code == 0
    with_guess = outrider("generate", "x = 1", "--drafter", "lookup", "--prediction", "y", *BRIEF)
    assert with_guess.code == 0


@pytest.mark.parametrize("drafter", ["suffix", "recycling", "lookup"])
def test_a_draft_beside_a_drafter_that_reads_none_is_refused(
    outrider: Command, drafter: str
) -> None:
    shown = outrider("generate", "x", "--draft", "outrider/embedded-draft", "--drafter", drafter)
    assert shown.code == 2
    assert f"--drafter {drafter} reads none" in shown.err


@pytest.mark.weights
def test_a_corpus_that_is_not_there_is_said_so(outrider: Command, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    shown = outrider("generate", "x", "--drafter", "suffix", "--suffix-corpus", missing, *BRIEF)
    assert shown.code == 2
    assert "suffix_corpus" in shown.err
    assert "--suffix-corpus takes a text file" in shown.err


@pytest.mark.weights
@pytest.mark.slow
def test_records_name_the_member_that_proposed(outrider: Command) -> None:
    shown = outrider(
        "generate", "a b c d e f a b c d e f a b c", "--drafter", "lookup", "--k", "4",
        "--max-tokens", "12", "--profile", "--json",
    )  # fmt: skip
    assert shown.code == 0
    rounds = json.loads(shown.out.strip().splitlines()[-1])["rounds"]
    assert {entry["drafter"] for entry in rounds} <= {"lookup", "suffix", "ngram"}
