"""Workloads that are made: translation, retrieval, mixtures, and prompts of a given length."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.errors import ConfigError
from outrider_lab.bench.published import questions_of
from outrider_lab.bench.studies.sweep_grid import PromptSource
from outrider_lab.bench.workload import (
    DOMAINS,
    MIXED,
    MOST_NOTES,
    NUM_MADE,
    PromptDataset,
    builtin_texts,
    retrieval_prompt,
)


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("domain", ["translation", "retrieval"])
def test_made_domains_have_prompts_that_differ(domain: str) -> None:
    texts = builtin_texts(domain)
    assert len(texts) == len(set(texts)) == NUM_MADE
    assert texts == builtin_texts(domain)


def test_a_translation_asks_for_one_sentence() -> None:
    for text in builtin_texts("translation"):
        sentence = text.removeprefix("Translate English to German: ")
        assert sentence != text
        assert re.fullmatch(r"[A-Z][^.!?]+[.!?]", sentence)


@given(number=st.integers(0, 1000), num_notes=st.integers(1, 60))
@settings(max_examples=30)
def test_a_retrieval_prompt_holds_its_answer_once(number: int, num_notes: int) -> None:
    text = retrieval_prompt(number, num_notes)
    notes, _, question = text.partition("\n\nQuestion: Where does ")
    assert notes.count("\n") == num_notes
    name, _, thing = question.removesuffix("?\nAnswer:").partition(" keep the key to ")
    found = [
        line for line in notes.splitlines() if line.startswith(f"{name} keeps the key to {thing} ")
    ]
    assert len(found) == 1


def test_more_notes_than_there_are_are_cut() -> None:
    assert retrieval_prompt(0, MOST_NOTES + 5) == retrieval_prompt(0, MOST_NOTES)


def test_mixed_prompts_come_in_turns() -> None:
    mixed = builtin_texts(MIXED)
    assert mixed[:6] == [
        text for i in range(2) for d in DOMAINS[:3] for text in [builtin_texts(d)[i]]
    ]


@given(num_tokens=st.integers(16, 900), domain=st.sampled_from(DOMAINS[:5]))
@settings(max_examples=30)
def test_a_long_prompt_has_the_length_that_was_asked_for(num_tokens: int, domain: str) -> None:
    source = PromptSource(3)
    found = source.of(domain, num_tokens, words)
    plain = source.of(domain, None, words)
    assert found.print == plain.print
    for long, short in zip(found.works, plain.works, strict=True):
        assert long.prompt_id == f"{short.prompt_id}@{num_tokens}"
        assert words(long.text) == num_tokens
        tail = min(len(long.text), len(short.text))
        assert long.text[-tail:] == short.text[-tail:]


@given(num_tokens=st.integers(60, 1500))
@settings(max_examples=15)
def test_long_retrieval_has_more_notes(num_tokens: int) -> None:
    (work,) = PromptSource(1).of("retrieval", num_tokens, words).works
    assert num_tokens - 25 < words(work.text) <= num_tokens
    assert work.text.endswith("\nAnswer:")


def test_a_length_that_retrieval_cannot_have_is_refused() -> None:
    for num_tokens in (16, 100_000):
        with pytest.raises(ConfigError, match=f"of {num_tokens} tokens"):
            PromptSource(1).of("retrieval", num_tokens, words)


def test_a_saved_set_takes_the_place_of_shipped_prompts() -> None:
    texts = {"poems": ["a rose is", "so much depends"]}
    saved = PromptDataset.build(texts, words, tokenizer="words", sources={"poems": "builtin"})
    source = PromptSource(1, saved)
    assert [work.text for work in source.of("poems", None, words).works] == ["a rose is"]
    assert source.of("poems", 30, words).works[0].text.endswith("a rose is")
    with pytest.raises(ConfigError, match="'code'"):
        source.of("code", None, words)


def test_questions_of_a_file_are_sorted_by_domain(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    rows = [("translation", "a"), ("rag", "b"), ("writing", "c"), ("qa", "d")]
    lines = [json.dumps({"category": c, "turns": [t, "later"]}) for c, t in rows]
    path.write_text("\n".join(lines) + "\n\n")
    assert questions_of(path) == {
        "translation": ["a"],
        "retrieval": ["b"],
        "conversation": ["c", "d"],
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no question"),
        ("x", "line 1: not JSON"),
        ('{"turns": ["a"]}', "line 1: no category"),
        ('\n{"category": "qa", "turns": []}', "line 2: no turns"),
        ('{"category": "qa", "turns": [5]}', "line 1: no turns"),
    ],
)
def test_a_file_of_something_else_is_named_by_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        questions_of(path)
    with pytest.raises(ConfigError, match="No such file"):
        questions_of(tmp_path / "none.jsonl")
