"""`outrider bench quality` from words to tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command
from outrider_lab.bench import quality as rules

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

SMALL = ("bench", "quality", "--domains", "code", "--prompts", "2", "--max-tokens", "8")
CPU = ("--device", "cpu", "--dtype", "float32")


def test_a_run_prints_tables_and_writes_json(outrider: Command) -> None:
    words = ("--formats", "float32,int8", "--rules", "block,typical", "--text-tokens", "100")
    shown = outrider(*SMALL, *CPU, *words, "--output", "quality.json")
    assert shown.code == 0, shown.err
    assert "Number formats" in shown.out
    assert "2/2" in shown.out
    record: dict[str, Any] = json.loads(Path("quality.json").read_text())
    assert (record["benchmark"], record["holds"], record["complete"]) == ("quality", True, True)
    assert {"provenance", "machine", "weights"} <= record.keys()
    wide, narrow = record["formats"]
    assert narrow["perplexity"] == pytest.approx(wide["perplexity"], rel=0.05)
    assert 0 < narrow["divergence_nats"] < 0.1
    assert narrow["same_first_choice"] > 0.9
    plain, block, typical = record["rules"]
    assert plain["perplexity"] == pytest.approx(block["perplexity"])
    assert 1 < plain["perplexity"] < 5
    assert (typical["exact"], typical["broken"]) == (False, False)


def test_perplexity_of_a_file_alone(outrider: Command) -> None:
    Path("text.txt").write_text("def add(a, b):\n    return a + b\n" * 3)
    words = ("--formats", "float32", "--rules", "none", "--text", "text.txt", "--json")
    shown = outrider(*SMALL, *CPU, *words)
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    assert record["rules"] == []
    assert record["formats"][0]["perplexity"] > 1


def test_drafts_of_a_target_s_own_copies_are_counted(outrider: Command) -> None:
    words = ("--formats", "float32,int4", "--rules", "none", "--text-tokens", "50")
    shown = outrider(*SMALL, *CPU, *words, "--self-drafts", "int8", "--output", "quality.json")
    assert shown.code == 0, shown.err
    assert "int8 drafts kept %" in shown.out
    record: dict[str, Any] = json.loads(Path("quality.json").read_text())
    for row in record["formats"]:
        assert 0.5 < row["int8_drafts"] <= 1
        assert row["int4_drafts"] is None


def test_a_broken_rule_is_an_exit_code(outrider: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[rules.RuleRow]:
        told = {"rule": "block", "drafter": "model", "exact": True, "must_match": True}
        return [rules.RuleRow(**told, num_texts=2, num_same=1, first_difference=3)]  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr("outrider_lab.cli.bench_studies.compare_rules", broken)
    shown = outrider(*SMALL, *CPU, "--formats", "none", "--rules", "block")
    assert shown.code == 1
    assert "block broke its promise" in shown.out


def test_an_interrupt_keeps_the_rows_before_it(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> list[rules.RuleRow]:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider_lab.cli.bench_studies.compare_rules", stopped)
    words = ("--formats", "float32", "--rules", "block", "--text-tokens", "40", "--json")
    shown = outrider(*SMALL, *CPU, *words)
    assert shown.code == 130
    record = json.loads(shown.out)
    assert record["complete"] is False
    assert len(record["formats"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--formats", "int9"), "did you mean 'int"),
        (("--rules", "typcal"), "did you mean 'typical'"),
        (("--rules", "none", "--formats", "none"), "neither a format nor a rule"),
        (("--domains", ","), "--domains names nothing"),
        (("--domains", "poetry"), "'poetry'"),
        (("--text", "nowhere.txt"), "cannot be read"),
        (("--sampler", "token"), "unknown option '--sampler'"),
        (("--output", "no/folder/x.json"), "cannot be written"),
    ],
)
def test_words_that_cannot_be_meant(outrider: Command, words: tuple[str, ...], said: str) -> None:
    shown = outrider("bench", "quality", *words)
    assert shown.code in (2, 3)
    assert said in shown.err
