"""Tokenizers as GGUF says them, and those that it cannot say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.gguf_file import tokenizer_for
from outrider.core.errors import CheckpointError, ConfigError
from outrider.models.gguf.splits import RULES
from outrider.models.loading import resolve
from outrider_lab.models.gguf_vocabulary import Vocabulary, read_vocabulary

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
GPT2 = {**BYTES, "use_regex": True}
Change = Callable[[dict[str, Any]], object]


def cut_by(*steps: dict[str, Any], whole: bool = False) -> Change:
    def change(raw: dict[str, Any]) -> None:
        raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(steps)}
        raw["model"]["ignore_merges"] = whole

    return change


def pattern(text: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}


def read(
    folder: Path, change: Change = lambda raw: None, pre_tokenizer: str = "auto"
) -> Vocabulary:
    path = tokenizer_for(folder) / "tokenizer.json"
    raw = json.loads(path.read_text("utf-8"))
    change(raw)
    path.write_text(json.dumps(raw), "utf-8")
    return read_vocabulary(folder, vocab_size=96, stop_ids=(1,), pre_tokenizer=pre_tokenizer)


def test_tokens_kinds_and_merges_are_in_order(tmp_path: Path) -> None:
    said = read(tmp_path).metadata
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    assert tokens[:7] == ["<s>", "</s>", "a", "b", "ab", "é", "Ġ"]
    assert (tokens[94], tokens[95]) == ("<tool>", "[PAD95]")
    # Control, ordinary, the user's own and unused.
    assert (kinds[0], kinds[4], kinds[94], kinds[95]) == (3, 1, 4, 5)
    assert said["tokenizer.ggml.merges"] == ["a b", "Ġ a"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (cut_by(GPT2), "gpt-2"),
        (cut_by({"type": "Digits", "individual_digits": True}, GPT2), "smollm"),
        (cut_by(pattern(LLAMA3), BYTES, whole=True), "llama-bpe"),
        (cut_by(pattern(LLAMA3), BYTES), "dbrx"),
        # Whoever reads qwen2 may normalise, which this tokenizer does not.
        (cut_by(pattern(QWEN), BYTES), "deepseek-r1-qwen"),
    ],
)
def test_a_rule_is_known_by_what_it_does(change: Change, name: str, tmp_path: Path) -> None:
    found = read(tmp_path, change)
    assert found.metadata["tokenizer.ggml.pre"] == name
    assert not found.notes


OTHER_RULES: list[Change] = [
    cut_by(pattern(LLAMA3 + "|x"), BYTES),
    cut_by(pattern(QWEN), BYTES, whole=True),
    cut_by(pattern(LLAMA3), {**BYTES, "add_prefix_space": True}),
    cut_by({"type": "Digits", "individual_digits": False}, GPT2),
    cut_by({"type": "Whitespace"}),
    lambda raw: raw.pop("pre_tokenizer"),
]


@pytest.mark.parametrize("change", OTHER_RULES)
def test_another_rule_is_refused_unless_the_caller_names_one(
    change: Change, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="cuts text by a rule") as caught:
        read(tmp_path, change)
    assert "--pre-tokenizer" in str(caught.value.hint)
    found = read(tmp_path, change, "gpt-2")
    assert found.metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert "token ids" in found.notes[0]


UNSPEAKABLE: list[tuple[Change, str]] = [
    (lambda raw: raw["model"].update(type="Unigram"), "of type Unigram"),
    (lambda raw: raw["model"].update(byte_fallback=True), "falls back to bytes"),
    (lambda raw: raw.update(normalizer={"type": "Lowercase"}), "changes text"),
    (lambda raw: raw["model"].update(end_of_word_suffix="</w>"), "prefix or suffix"),
    (lambda raw: raw["model"]["vocab"].update(far=96), "ids up to 96"),
    (lambda raw: raw["added_tokens"][1].update(content="ab"), "one text for several ids"),
    (lambda raw: raw["model"].update(merges=["a b c"]), "merges must be"),
    (lambda raw: raw.pop("model"), "model is missing"),
]


@pytest.mark.parametrize(("change", "problem"), UNSPEAKABLE)
def test_what_the_format_cannot_say_is_refused(
    change: Change, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read(tmp_path, change)


def test_an_unknown_rule_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no pre-tokenizer 'gpt-3'"):
        read(tmp_path, pre_tokenizer="gpt-3")


def test_normalisation_is_noted(tmp_path: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        cut_by(pattern(QWEN), BYTES)(raw)
        raw["normalizer"] = {"type": "NFC"}

    found = read(tmp_path, change)
    assert "NFC" in found.notes[0]
    assert found.metadata["tokenizer.ggml.pre"] == "qwen2"
    found = read(tmp_path, lambda raw: raw.update(normalizer={"type": "NFC"}))
    assert "NFC" in found.notes[0]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_that_is_read_is_found_again(name: str, tmp_path: Path) -> None:
    """By a name that cuts alike: several families have one rule."""
    rule = RULES[name]

    def change(raw: dict[str, Any]) -> None:
        raw["pre_tokenizer"] = rule.pre_tokenizer(prefix=False)
        raw["model"]["ignore_merges"] = rule.ignore_merges
        raw["normalizer"] = {"type": "NFC"} if rule.nfc else None

    found = read(tmp_path, change).metadata["tokenizer.ggml.pre"]
    assert isinstance(found, str)
    assert replace(RULES[found], begins=rule.begins) == rule


def test_ends_beginnings_and_the_template_are_told(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "ab", "chat_template": "{{ x }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    opening = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}]}
    change: Change = lambda raw: raw.update(post_processor=opening)  # noqa: E731
    read(tmp_path, change)
    found = read_vocabulary(tmp_path, vocab_size=96, stop_ids=(1, 4, 2)).metadata
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}
    assert said["bos_token_id"] == 0
    assert said["add_bos_token"] is True
    # The tokenizer's own end first, the others as ends of a turn and of a message.
    assert [said[f"{name}_token_id"] for name in ("eos", "eot", "eom")] == [4, 1, 2]
    assert said["tokenizer.chat_template"] == "{{ x }}"
    (tmp_path / "chat_template.jinja").write_text("{{ y }}")
    assert read(tmp_path).metadata["tokenizer.chat_template"] == "{{ y }}"


@pytest.mark.weights
def test_the_embedded_tokenizer_needs_a_rule_to_be_named() -> None:
    source = resolve("outrider/embedded")
    with pytest.raises(CheckpointError, match="does not know"):
        read_vocabulary(source, vocab_size=8192, stop_ids=(0,))
    found = read_vocabulary(source, vocab_size=8192, stop_ids=(0,), pre_tokenizer="gpt-2").metadata
    merges, tokens = found["tokenizer.ggml.merges"], found["tokenizer.ggml.tokens"]
    assert isinstance(merges, list)
    assert isinstance(tokens, list)
    assert {"".join(str(pair).split(" ")) for pair in merges} <= set(tokens)
    assert (len(tokens), found["tokenizer.ggml.add_bos_token"]) == (8192, False)
