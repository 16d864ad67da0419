"""`outrider models pairs` and `outrider draft check`: what fits what, and the command for it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outrider.pairs as pairs
from doubles.command_line import Command
from outrider.cli import models as cli_pairs
from outrider.pairs.catalog import PAIRS, get_pair

TINY = Path(pairs.__path__[0]) / "tiny"


def read(outrider: Command, *words: str, code: int = 0) -> Any:
    shown = outrider(*words, "--json")
    assert shown.code == code, shown.err
    return json.loads(shown.out)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A draft's folder without weights: its vocabulary is all that is looked at."""
    made = tmp_path / "drafts" / "mine"
    made.mkdir(parents=True)
    for path in (TINY / "draft").glob("*.json"):
        shutil.copy(path, made)
    return made


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_list_has_every_pair_and_says_what_is_special(outrider: Command) -> None:
    shown = outrider("models", "pairs").out
    for pair in PAIRS.values():
        assert pair.target_model_id in shown
        assert pair.draft_model_id in shown
    assert "needs --drafter bridge" in shown
    assert "gated, needs `hf auth login`" in shown
    assert "needs --drafter quantised-self" in shown
    assert [pair["pair_name"] for pair in read(outrider, "pairs")] == list(PAIRS)


def test_one_pair_is_shown_with_memory_and_command(outrider: Command) -> None:
    shown = outrider("models", "pairs", "gpt2_dev").out
    assert "250 MB" in shown
    assert "3.0 GB" in shown
    assert "KV of 4096 tokens" in shown
    assert get_pair("gpt2_dev").command() in shown
    record = read(outrider, "pairs", "tinyllama_llama3")
    assert record["vocabulary"] == "bridge"
    assert record["draft"]["model_id"] == "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    assert (record["draft"]["gated"], record["target"]["gated"]) == (False, True)
    assert record["memory_gb"] > record["weights_gb"] > 18


def test_a_target_that_drafts_for_itself_loads_no_draft(outrider: Command) -> None:
    shown = outrider("models", "pairs", "llama3_self").out
    assert get_pair("llama3_self").command() in shown
    assert "--draft " not in shown
    assert shown.count("is gated") == 1
    record = read(outrider, "pairs", "llama3_self")
    assert record["supported"]
    assert "--drafter quantised-self --self-quantise int4" in record["command"]


def test_a_pair_that_does_not_run_yet_says_why_and_has_no_command(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = replace(get_pair("gpt2_dev"), refusal="no kernel for it")
    monkeypatch.setattr(cli_pairs, "get_pair", {"gpt2_dev": refused}.__getitem__)
    shown = outrider("models", "pairs", "gpt2_dev").out
    assert "not supported yet: no kernel for it" in shown
    assert "outrider generate" not in shown
    record = read(outrider, "pairs", "gpt2_dev")
    assert (record["supported"], record["command"]) == (False, None)


def test_an_unknown_pair_is_bad_input(outrider: Command) -> None:
    shown = outrider("models", "pairs", "gtp2_dev")
    assert shown.code == 2
    assert "did you mean 'gpt2_dev'?" in shown.err


def test_the_embedded_draft_fits(outrider: Command) -> None:
    words = ("draft", "check", "outrider/embedded", "outrider/embedded-draft")
    shown = outrider(*words)
    assert shown.code == 0
    assert "it fits: outrider generate --target outrider/embedded" in shown.out
    record = read(outrider, *words)
    assert record["fits"]
    assert record["target"] == {"name": "outrider/embedded", "num_tokens": 8192, "num_ids": 8192}


def test_ids_that_differ_are_shown_and_the_exit_code_is_1(outrider: Command, folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    swapped = {i: 4 + (i - 3) % 7 for i in range(4, 11)}
    data["model"]["vocab"] = {t: swapped.get(i, i) for t, i in data["model"]["vocab"].items()}
    data["model"]["merges"] = []
    path.write_text(json.dumps(data))
    shown = outrider("draft", "check", "outrider/embedded", str(folder))
    assert shown.code == 1
    assert "100 % of the draft's tokens are tokens of the target" in shown.out
    assert all(f"\n{token_id} " in shown.out for token_id in (4, 5, 6, 7, 8))
    assert "\n9 " not in shown.out
    assert "--drafter bridge" in shown.out
    record = read(outrider, "draft", "check", "outrider/embedded", str(folder), code=1)
    assert [d["token_id"] for d in record["differences"]] == [4, 5, 6, 7, 8]


def test_a_table_of_another_padding_fits(outrider: Command, folder: Path) -> None:
    edit(folder / "config.json", vocab_size=8256)
    shown = outrider("draft", "check", "outrider/embedded", str(folder))
    assert shown.code == 0
    assert "it fits: outrider generate" in shown.out
    assert "8256" in shown.out


def test_a_pard_model_is_a_draft_model(outrider: Command, folder: Path) -> None:
    edit(folder / "config.json", pard_token=5)
    shown = outrider("draft", "check", "outrider/embedded", str(folder))
    assert shown.code == 0
    assert "it fits: outrider generate" in shown.out


@pytest.mark.parametrize("words", [(), ("outrider/embedded",)])
def test_both_models_are_needed(outrider: Command, words: tuple[str, ...]) -> None:
    shown = outrider("draft", "check", *words)
    assert shown.code == 2
    assert ("DRAFT" if words else "TARGET") + " is missing" in shown.err


@pytest.mark.parametrize("draft", ["nobody/nothing", "no such folder", "nobody/-x-@y"])
def test_a_model_that_is_not_there_is_named(outrider: Command, draft: str) -> None:
    shown = outrider("draft", "check", "outrider/embedded", draft)
    assert shown.code == 3
    assert draft in shown.err
