"""A GGUF file as target: the same text as the folder it was made from, with and without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from doubles.gguf_writer import from_checkpoint, small_llama
from doubles.tiny_checkpoints import random_tensors, variant
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import CheckpointError, VocabularyError
from outrider.lab.gguf_export import GgufOptions, export
from outrider.models.loading import resolve

PROMPT = "def add(a, b):\n    return a + b\n\ndef add("
GREEDY = SamplingParams(max_tokens=24)
EMBEDDED = "outrider/embedded"

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "embedded.gguf"
    for _ in export(resolve(EMBEDDED), path, GgufOptions(form="bf16", pre_tokenizer="gpt-2")):
        pass
    return path


@pytest.mark.parametrize("drafter", ["none", "ngram", "quantised-self"])
def test_the_text_is_that_of_the_folder(file: Path, drafter: str) -> None:
    config = EngineConfig(drafter=drafter, tokenizer=EMBEDDED)
    (ours,) = LLM(file, config=config).generate(PROMPT, GREEDY)
    (theirs,) = LLM(EMBEDDED, config=EngineConfig(drafter="none")).generate(PROMPT, GREEDY)
    assert ours.text == theirs.text


def test_a_file_is_a_draft_as_well(file: Path) -> None:
    (own,) = LLM(file, draft=file, config=EngineConfig()).generate(PROMPT, GREEDY)
    (plain,) = LLM(file, config=EngineConfig(drafter="none")).generate(PROMPT, GREEDY)
    assert own.text == plain.text
    assert own.stats.tokens_per_round > 2


def test_an_unknown_rule_can_be_replaced_by_another_tokenizer(tmp_path: Path) -> None:
    item = variant("llama2")
    tensors = random_tensors(item.config, seed=0)
    made = from_checkpoint(item.config, tensors)
    made.metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "never-heard-of"}
    path = made.write(tmp_path / "odd.gguf")
    with pytest.raises(CheckpointError, match="never-heard-of") as caught:
        LLM(path, config=EngineConfig(drafter="none"))
    assert "--tokenizer" in str(caught.value.hint)
    small = small_llama().write(tmp_path / "words.gguf")
    llm = LLM(path, config=EngineConfig(drafter="none", tokenizer=str(small)))
    assert llm.tokenizer.encode("ab") == [4]
    (written,) = llm.generate("ab", SamplingParams(max_tokens=2))
    assert written.error is None
    with pytest.raises(VocabularyError, match="and the target has 96"):
        LLM(path, config=EngineConfig(drafter="none", tokenizer=EMBEDDED))
