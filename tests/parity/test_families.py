"""Speculation on equals speculation off for every family, from a folder to text.

Weights are random, so drafts are as bad as they can be, or as good: a draft model with other
weights is nearly always refused, one with the target's own weights never.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from doubles.tiny_checkpoints import Variant, variant, write_checkpoint
from doubles.tiny_families import add_words
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import GenerationResult
from outrider.cli.main import run

FAMILIES = ("qwen2", "qwen3", "phi3", "gpt2")
CASES = [
    *((name, "float32") for name in (*FAMILIES, "phi3_longrope")),
    *((name, "bfloat16") for name in ("qwen2_tied", "qwen3_tied", "phi3_partial", "gpt2")),
    *((name, "float16") for name in ("qwen2", "qwen3_tied", "gpt2")),
]
PROMPTS = [[(7 * i * i + 3 * i) % 96 for i in range(length)] for length in (9, 30)]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


def write_model(folder: Path, item: Variant, *, seed: int) -> Path:
    """A checkpoint with a tokenizer of one word an id."""
    write_checkpoint(folder, item, seed=seed)
    return add_words(folder, item.config["vocab_size"])


def generate(
    target: Path, draft: Path | None = None, *, k: int = 4, drafter: str = "auto"
) -> list[GenerationResult]:
    config = EngineConfig(
        drafter=drafter, k=k, batch_size=2, page_size=8, prefill_chunk=16, min_ngram=1
    )
    return LLM(target, draft=draft, config=config).generate(PROMPTS, PARAMS)


def texts(results: list[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_greedy_text_is_the_same_with_every_draft(name: str, dtype: str, tmp_path: Path) -> None:
    item = variant(name)
    item = Variant(name, {**item.changes, "torch_dtype": dtype}, base=item.base)
    target, other = (write_model(tmp_path / str(seed), item, seed=seed) for seed in (3, 4))
    expected = generate(target, drafter="none")
    assert [len(ids) for ids in texts(expected)] == [16, 16]
    # Lengths by number formats are covered in tests/engine/test_drafter_matrix.py.
    for k in (1, 4) if dtype == "float32" else (4,):
        copied = generate(target, drafter="ngram", k=k)
        assert texts(copied) == texts(expected)
        refused = generate(target, other, k=k)
        assert texts(refused) == texts(expected)
        assert sum(result.stats.num_drafted for result in refused) > 0
        itself = generate(target, target, k=k)
        assert texts(itself) == texts(expected)
        for result in itself:
            assert result.stats.num_accepted == result.stats.num_drafted > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_command_line_reads_a_folder_of_every_family(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "model", variant(name), seed=3)
    assert run(["models", "inspect", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["family"] == name
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    # The checkpoint is float32; the rest of the file is its header.
    assert 0 <= stored - facts["num_parameters"] * torch.float32.itemsize < 8192


def test_a_window_that_was_cut_is_told(tmp_path: Path) -> None:
    llm = LLM(write_model(tmp_path / "model", variant("phi3_longrope"), seed=3))
    assert llm.spec.max_tokens == 128
    assert any("the window is 128 tokens, not 256" in note for note in llm.notes)
    longer = LLM(tmp_path / "model", config=EngineConfig(drafter="none", context=200))
    assert longer.spec.max_tokens == 256
    assert any("hold for texts of any length" in note for note in longer.notes)
    assert not any("the window is" in note for note in longer.notes)
    result = longer.generate([[i % 96 for i in range(150)]], PARAMS)[0]
    assert len(result.token_ids) == 16
