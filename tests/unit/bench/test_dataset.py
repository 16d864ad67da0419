"""Prompt sets: what is built in, how it is counted, saved, loaded and told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.core.errors import ConfigError
from outrider_lab.bench.workload import (
    DOMAINS,
    SUMMARIZE,
    Prompt,
    PromptDataset,
    builtin_texts,
    fingerprint,
)


def words(text: str) -> int:
    return len(text.split())


def dataset() -> PromptDataset:
    texts = {"code": ["def f(x):", "def g(x, y):", "x = 1"], "maths": ["1 + 1"]}
    sources = dict.fromkeys(texts, "builtin")
    return PromptDataset.build(texts, words, tokenizer="words", sources=sources)


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_domain_has_fifty_different_prompts(domain: str) -> None:
    texts = builtin_texts(domain)
    assert len(texts) >= 50
    assert len(set(texts)) == len(texts)
    assert all(text.strip() for text in texts)


def test_articles_end_with_the_request() -> None:
    texts = builtin_texts("summarization")
    assert all(text.endswith(SUMMARIZE) for text in texts)
    lengths = [words(text.removesuffix(SUMMARIZE)) for text in texts]
    assert min(lengths) >= 80
    assert max(lengths) <= 150


def test_an_unknown_domain_is_named() -> None:
    with pytest.raises(ConfigError, match="'poetry'"):
        builtin_texts("poetry")
    with pytest.raises(ConfigError, match="'poetry'"):
        dataset().get_by_domain("poetry")


def test_prompts_are_named_and_counted() -> None:
    found = dataset()
    assert len(found) == 4
    assert found.prompts[1] == Prompt("code_001", "code", "def g(x, y):", 3)
    assert [p.prompt_id for p in found.get_by_domain("maths")] == ["maths_000"]
    code, maths = found.statistics()
    assert (code.n, code.min, code.mean, code.max) == (3, 2, 2.7, 3)
    assert (maths.domain, maths.source, maths.n) == ("maths", "builtin", 1)


def test_the_tiny_set_has_the_first_of_every_domain() -> None:
    assert [p.prompt_id for p in dataset().tiny(2).prompts] == [
        "code_000",
        "code_001",
        "maths_000",
    ]


def test_a_saved_set_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    dataset().save(path)
    assert PromptDataset.load(path) == dataset()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 9, "prompts": []}', "\x00"]
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"prompts\.json") as caught:
        PromptDataset.load(path)
    assert caught.value.hint is not None
    assert "outrider bench prompts" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"raw_text": 5}, "prompts 2: raw_text is 5"),
        ({"raw_text": None}, "prompts 2: raw_text is None"),
        ({"token_count": "3"}, "prompts 2: token_count is '3'"),
        ({"more": 1}, "prompts 2: more is unknown"),
        ({"prompt_id": "code_000"}, "two prompts have one name"),
        ({"domain": "poetry"}, "'poetry'"),
    ],
)
def test_a_prompt_that_was_changed_is_refused_by_its_number(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    path = tmp_path / "prompts.json"
    dataset().save(path)
    record = json.loads(path.read_text())
    record["prompts"][1] |= changes
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=said):
        PromptDataset.load(path)


@pytest.mark.parametrize("field", ["schema", "tokenizer", "sources", "prompts"])
@pytest.mark.parametrize("value", [None, 5, "x", ["x"], {"x": 1}])
def test_a_field_of_another_type_is_refused(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "prompts.json"
    dataset().save(path)
    if field == "tokenizer" and isinstance(value, str):
        return
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match="not a saved set"):
        PromptDataset.load(path)


def test_a_missing_file_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        PromptDataset.load(tmp_path / "none.json")


def test_a_fingerprint_changes_with_any_text_and_with_their_order() -> None:
    prints = {fingerprint(texts) for texts in (["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""])}
    assert len(prints) == 4
    assert dataset().fingerprint("maths") == fingerprint(["1 + 1"])
