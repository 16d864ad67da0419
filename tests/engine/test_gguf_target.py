"""A GGUF file as target: the same text as the folder it was made from, with and without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.gguf_writer import from_checkpoint, small_llama, wide_llama
from doubles.tiny_checkpoints import random_tensors, variant
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import CheckpointError, VocabularyError
from outrider.kernels.plan import PackedTable
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model, resolve
from outrider_lab.models.gguf_export import GgufOptions, export

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


@pytest.mark.sample(2)
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


MIXES = (
    ("Q4_0",), ("Q4_1", "Q8_0"), ("Q5_0", "Q5_1"), ("Q4_K", "Q4_K", "Q6_K"), ("Q5_K", "Q6_K"),
    ("Q2_K", "Q3_K"), ("IQ4_NL", "IQ4_XS"), ("MXFP4",),
    ("IQ2_XXS", "IQ2_XS", "IQ3_XXS"), ("IQ1_S", "IQ1_M", "IQ2_S", "IQ3_S"), ("NVFP4",),
    ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0"),
)  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
def test_drafts_change_nothing_on_blocks(tmp_path: Path, kinds: Sequence[str]) -> None:
    path = wide_llama(kinds).write(tmp_path / "a.gguf")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[5, 9, 7, 5, 9, 7, 5, 9], [3, 4, 3, 4, 3], [8]]

    def written(drafter: str, **options: Any) -> list[tuple[int, ...]]:
        with LLM(path, config=EngineConfig(drafter=drafter, **options)) as llm:
            return [result.token_ids for result in llm.generate(prompts, params)]

    plain = written("none", batch_size=1)
    assert written("none", batch_size=3) == plain
    assert written("ngram", k=5) == plain
    assert written("quantised-self", k=5, batch_size=1) == plain
    assert written("recycling", tree_nodes=12) == plain


def test_another_precision_takes_the_numbers_of_the_blocks(tmp_path: Path) -> None:
    path = wide_llama(["Q4_K", "Q6_K"]).write(tmp_path / "a.gguf")
    capacity = ModelCapacity(num_slots=64)
    kept = load_model(path, LoadOptions(capacity=capacity, device="cpu"))
    if kept.kernels.pack_blocks is None:
        pytest.skip("no native kernels here")
    floats = load_model(path, LoadOptions(capacity=capacity, device="cpu", dtype="bfloat16"))
    assert isinstance(kept, LlamaModel)
    assert isinstance(floats, LlamaModel)
    assert isinstance(kept.tables.embedding, PackedTable)
    assert kept.tables.head is kept.tables.embedding.packed
    assert kept.tables.embeddings.equal(floats.tables.embeddings)
    assert kept.spec.weight_bytes < floats.spec.weight_bytes / 2
    ids = torch.tensor([3, 7])
    numbers_ND = torch.empty(2, 256)
    kept.tables.embedding.read(ids, numbers_ND)
    assert numbers_ND.bfloat16().equal(floats.tables.embeddings[ids])
