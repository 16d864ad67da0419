"""`outrider bench prompts`: the table, the files, and the fallback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doubles.command_line import Command
from outrider.core.errors import MachineError
from outrider_lab.bench.workload import PromptDataset
from outrider_lab.cli import prompts


def test_it_saves_a_hundred_and_fifty_prompts_and_fifteen(outrider: Command) -> None:
    shown = outrider("bench", "prompts", "--output", "all.json", "--tiny-output", "tiny.json")
    assert shown.code == 0, shown.err
    assert "saved 150 prompts to all.json" in shown.out
    assert "saved 15 prompts to tiny.json" in shown.out
    everything = PromptDataset.load(Path("all.json"))
    assert len(everything) == 150
    assert everything.domains == ("code", "conversation", "summarization")
    tiny = PromptDataset.load(Path("tiny.json"))
    assert [len(tiny.get_by_domain(domain)) for domain in tiny.domains] == [5, 5, 5]


def test_the_table_has_lengths_of_every_domain(outrider: Command) -> None:
    lines = outrider("bench", "prompts", "--domains", "code,maths").out.splitlines()
    assert lines[1].split() == ["domain", "source", "n", "min", "mean", "max"]
    assert [line.split()[:3] for line in lines[2:]] == [
        ["code", "builtin", "50"],
        ["maths", "builtin", "50"],
    ]


def test_json_is_one_object_whatever_is_saved(outrider: Command) -> None:
    shown = outrider("bench", "prompts", "--json", "--tiny-output", "tiny.json")
    found = json.loads(shown.out)
    assert [domain["n"] for domain in found["domains"]] == [50, 50, 50]
    assert "saved 15 prompts" in shown.err


def test_counts_are_by_the_tokenizer_that_was_asked_for(outrider: Command) -> None:
    draft = outrider("bench", "prompts", "--tokenizer", "outrider/embedded-draft")
    assert "tokenizer of outrider/embedded-draft" in draft.out
    unknown = outrider("bench", "prompts", "--tokenizer", "nobody/nothing")
    assert unknown.code == 3


def test_a_set_that_cannot_be_fetched_is_replaced_and_said_so(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(domain: str, num: int, _: object) -> list[str]:
        if domain == "code":
            return [f"def f{i}():" for i in range(num)]
        raise MachineError(f"no network for {domain}")

    monkeypatch.setattr(prompts, "published_texts", fetch)
    shown = outrider("bench", "prompts", "--source", "hub", "--output", "all.json")
    assert shown.code == 0
    assert "note: conversation: built-in prompts, since no network for conversation" in shown.err
    assert PromptDataset.load(Path("all.json")).sources == {
        "code": "openai/openai_humaneval",
        "conversation": "builtin",
        "summarization": "builtin",
    }


def test_a_file_of_questions_becomes_a_set(outrider: Command) -> None:
    Path("question.jsonl").write_text('{"category": "rag", "turns": ["Where is it?"]}\n')
    words = ("bench", "prompts", "--source", "question.jsonl", "--output", "own.json", "--domains")
    assert outrider(*words, "retrieval").code == 0
    found = PromptDataset.load(Path("own.json"))
    assert found.sources == {"retrieval": "question.jsonl"}
    missing = outrider(*words, "retrieval,code")
    assert missing.code == 2
    assert "question.jsonl has no code" in missing.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--domains", "poetry"), 2),
        (("--source", "shelf"), 2),
        (("--output", "one.json", "--tiny-output", "./one.json"), 2),
        (("--output", "no/such/folder/all.json"), 3),
    ],
)
def test_words_that_cannot_be_meant(outrider: Command, words: tuple[str, ...], code: int) -> None:
    shown = outrider("bench", "prompts", *words)
    assert shown.code == code
    assert shown.err.startswith("error: ")
    assert not Path("one.json").exists()
