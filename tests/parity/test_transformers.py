"""Ours against transformers itself, on fresh random weights. Skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from doubles.tiny_checkpoints import VARIANTS, Variant, write_checkpoint
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.families import read_config
from outrider.models.loading import load_model, resolve
from outrider.models.rope import frequencies
from parity.feeding import feed, greedy
from parity.oracle import Oracle

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXT = [(7 * i * i + 3 * i) % 96 for i in range(120)]


def load(folder: Path, *, dtype: str = "float32", force_reference: bool = False) -> Decoder:
    capacity = ModelCapacity(num_slots=512, page_size=16, max_rows=128, max_logits=128)
    options = LoadOptions(
        capacity=capacity, dtype=dtype, device="cpu", force_reference=force_reference
    )
    return load_model(folder, options)


# A variant's shapes are the same in both kernels, and both meet all in
# tests/parity/test_goldens.py. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda item: item.name)
@pytest.mark.parametrize("force_reference", [True, False])
def test_a_variant_computes_what_transformers_computes(
    variant: Variant, force_reference: bool, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, variant, seed=11)
    model, oracle = load(folder, force_reference=force_reference), Oracle(folder)
    logits_NV, hidden_NKD = oracle.run(TEXT)
    model.state.open(1, ())
    out = model.step([StepRow.chain(1, TEXT)], DraftNeeds(hidden_layers=(0, 1)))
    assert out.hidden_NKD is not None
    torch.testing.assert_close(out.logits_MV, logits_NV, atol=1e-4, rtol=0)
    torch.testing.assert_close(out.hidden_NKD, hidden_NKD, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "variant",
    [item for item in VARIANTS if item.config["model_type"] != "gpt2"],
    ids=lambda item: item.name,
)
def test_rotary_frequencies_have_the_same_bits(variant: Variant, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant)
    config, (freqs_R, scaling) = read_config(folder), Oracle(folder).frequencies()
    assert isinstance(config, LlamaConfig)
    assert torch.equal(frequencies(config.rope, config.head_dim), freqs_R)
    assert config.rope.attention_factor == scaling


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda item: item.name)
def test_what_transformers_writes_is_read(variant: Variant, tmp_path: Path) -> None:
    """Its own newest names of keys, its own defaults spelled out, its own choice of tensors."""
    folder = write_checkpoint(tmp_path / "ours", variant, seed=2)
    Oracle(folder).save(tmp_path / "theirs")
    before, after = load(folder), load(tmp_path / "theirs")
    text = TEXT[:12]
    assert torch.equal(feed(after, text, [12]), feed(before, text, [12]))
    assert after.spec.max_tokens == before.spec.max_tokens
    assert after.spec.num_parameters == before.spec.num_parameters


# The logits of each variant are compared above.
@pytest.mark.sample(4)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda item: item.name)
def test_greedy_text_is_the_same(variant: Variant, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant, seed=5)
    expected, lead = Oracle(folder).greedy(TEXT[:9], 64)
    assert lead > 1e-4, "a tie: choose another seed"
    assert greedy(load(folder), TEXT[:9], 64) == expected


# Measured on this pair: float32 1.3e-5, bfloat16 0.08, float16 0.009.
@pytest.mark.weights
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.3), ("float16", 0.04)]
)
@pytest.mark.parametrize("name", ["outrider/embedded", "outrider/embedded-draft"])
def test_the_embedded_pair_computes_what_transformers_computes(
    name: str, dtype: str, tolerance: float
) -> None:
    folder = resolve(name)
    oracle = Oracle(folder)
    text = [(131 * i * i + 17 * i) % 8192 for i in range(100)]
    logits_NV, _ = oracle.run(text)
    model = load(folder, dtype=dtype)
    torch.testing.assert_close(feed(model, text, [100]), logits_NV, atol=tolerance, rtol=0)
    assert model.spec.stop_ids == oracle.stop_ids
