"""Counts of conformance suites, and what they compare, without the peers."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, cast

from conformance.client import PeerClient
from conformance.counts import Suite
from conformance.vocabularies import documented, random_text, tokenizer_in, with_rule

from doubles.gguf_writer import LLAMA, Gguf
from outrider.models.gguf.reader import read_header


def test_a_suite_counts_what_is_right_wrong_documented_and_refused() -> None:
    suite = Suite("texts")
    suite.count("a", True, "")
    for at in range(9):
        suite.count("a", False, f"text {at}")
    suite.count("b", False, "x", "NFC")
    suite.refuse("c", "no such type", count=3)
    record = suite.record()
    assert [record[key] for key in ("right", "wrong", "refused")] == [1, 9, 3]
    assert record["documented"] == {"b: NFC": 1}
    assert record["examples"] == {"a": [f"text {at}" for at in range(5)]}
    assert suite.line() == "texts: 1 right, 9 wrong, 3 refused, 1 documented differences"
    assert "WRONG a: 'text 0'" in suite.details()


def test_random_texts_are_of_their_seed() -> None:
    texts = [random_text(Random(seed), ["<|end|>"]) for seed in range(40)]
    assert texts == [random_text(Random(seed), ["<|end|>"]) for seed in range(40)]
    assert any("<|end|>" in text for text in texts)
    assert {ord(char) > 0x3000 for text in texts for char in text} == {True, False}


def test_a_file_can_name_another_rule(tmp_path: Path) -> None:
    data = Gguf(dict(LLAMA)).write(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "b.gguf"
    path.write_bytes(with_rule(data, "qwen2"))
    assert read_header(path).metadata["tokenizer.ggml.pre"] == "qwen2"
    assert tokenizer_in(path, tmp_path).encode("e\u0301") == tokenizer_in(path, tmp_path).encode(
        "é"
    )


def test_a_difference_is_documented_only_where_its_reason_holds() -> None:
    class Peer:
        """A peer that does not normalise."""

        def encode(self, texts: list[str]) -> list[list[int]]:
            return [[*map(ord, text)] for text in texts]

    def reason(name: str, text: str, ours: list[int]) -> str | None:
        peer = cast("PeerClient", cast("Any", Peer()))
        return documented(peer, name, frozenset({"<|end|>"}), text, ours)

    assert str(reason("qwen2", "e\u0301", [233])).startswith("NFC")
    assert reason("qwen2", "e\u0301", [101]) is None
    assert reason("llama-bpe", "e\u0301", [233]) is None
    assert str(reason("qwen2", "a</s>", [])).startswith("</s>")
    assert str(reason("gpt-4o", "Éa", [])).startswith("words by case")
    assert reason("gpt-4o", "Ea", []) is None
    assert str(reason("phi", "<|end|>\u3000", [])).startswith("blanks")
