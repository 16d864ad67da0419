"""A pass in one native call has the bits of the same operators called one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.gguf_writer import wide_llama
from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.core.tree import ROOT
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model

PLAIN = DraftNeeds()
NAMES = [
    "llama2", "llama3_rope", "one_kv_head", "wide_heads", "tied", "attention_bias", "mlp_bias",
    "qwen2", "qwen3", "qwen3_tied", "phi3",
]  # fmt: skip


def load(folder: Path, dtype: str) -> LlamaModel:
    options = LoadOptions(
        capacity=ModelCapacity(num_slots=1024, page_size=8, max_rows=512),
        dtype=dtype,
        device="cpu",
    )
    model = load_model(folder, options)
    assert isinstance(model, LlamaModel)
    if model.forward() is None:
        pytest.skip("no compiler, no native kernels")
    return model


def texts(model: Decoder) -> list[Tensor]:
    """Logits of a prompt in chunks, of two sequences with a tree below each, and of no row."""
    vocab = model.spec.vocab_size
    found: list[Tensor] = []

    def step(rows: Sequence[StepRow], keep: int) -> None:
        found.append(model.step(rows, PLAIN).logits_MV.clone())
        model.state.commit({row.seq_id: range(keep) for row in rows})

    for seq_id in (1, 2):
        model.state.open(seq_id, ())
        prompt = [(7 * i * i + seq_id) % vocab for i in range(21)]
        step([StepRow.chain(seq_id, prompt[:13], logits_from=13)], 13)
        step([StepRow.chain(seq_id, prompt[13:])], 8)
    tree = (ROOT, 0, 0, 1, ROOT)
    rows = [StepRow(1, (3, 4, 5, 6, 7), tree), StepRow(2, (8, 9, 10, 11, 12), tree, logits_from=2)]
    step(rows, 1)
    step([StepRow.chain(2, (5,))], 1)
    for seq_id in (1, 2):
        model.state.close(seq_id)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_one_call_has_the_bits_of_many(name: str, dtype: str, tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, variant(name), seed=4), dtype)
    whole = texts(model)
    # Other kernels, though equal ones: the decoder calls them itself.
    model.kernels = replace(model.kernels)
    assert model.forward() is None
    parts = texts(model)
    assert len(whole) == len(parts) == 6
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
    assert not any(logits_MV.isnan().any() for logits_MV in whole)


@pytest.mark.parametrize("kinds", [("Q4_1", "Q8_0"), ("Q4_K", "Q4_K", "Q6_K")], ids="-".join)
def test_one_call_over_blocks_has_the_bits_of_many(kinds: tuple[str, ...], tmp_path: Path) -> None:
    model = load(wide_llama(kinds).write(tmp_path / "a.gguf"), "auto")
    whole = texts(model)
    model.kernels = replace(model.kernels)
    assert model.kernels.pack_blocks is not None
    for one, other in zip(whole, texts(model), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sizes", [(256, 256), (500, 12), (31, 1, 480)], ids=str)
@pytest.mark.parametrize("kinds", [(), ("Q4_1", "Q8_0"), ("Q4_K", "Q6_K")], ids="-".join)
def test_a_large_chunk_has_the_bits_of_smaller_ones(
    kinds: tuple[str, ...], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "model.gguf"
    if kinds:
        wide_llama(kinds).write(folder)
    else:
        folder = write_checkpoint(tmp_path, variant("llama2"), seed=4)
    model = load(folder, "auto" if kinds else "bfloat16")
    prompt = [7 * i * i % model.spec.vocab_size for i in range(512)]

    def last(sizes: Sequence[int]) -> Tensor:
        model.state.open(1, ())
        logits_MV, start = torch.empty(0), 0
        for size in sizes:
            row = StepRow.chain(1, prompt[start : start + size], logits_from=size - 1)
            logits_MV = model.step([row], PLAIN).logits_MV.clone()
            model.state.commit({1: range(size)})
            start += size
        model.state.close(1)
        return logits_MV

    assert torch.equal(last((512,)), last(sizes))


def test_captured_layers_leave_the_logits_as_they_are(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, variant("llama2"), seed=4), "float32")
    model.state.open(1, ())
    row = StepRow.chain(1, (1, 2, 3))
    whole = model.step([row], PLAIN).logits_MV.clone()
    model.state.commit({1: ()})
    captured = model.step([row], DraftNeeds(hidden_layers=(0, 1)))
    assert captured.hidden_NKD is not None
    assert torch.equal(captured.logits_MV, whole)


@pytest.mark.parametrize("token", [-1, 96, 1 << 30])
def test_a_foreign_token_is_an_error_as_it_is_in_pytorch(token: int, tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, variant("llama2"), seed=4), "float32")
    assert model.spec.vocab_size == 96
    model.state.open(1, ())
    with pytest.raises(IndexError, match="not in the vocabulary"):
        model.step([StepRow.chain(1, (1, token))], PLAIN)
