from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles.tiny_checkpoints import random_tensors, save_tensors, variant, write_checkpoint
from outrider.core.errors import CheckpointError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.loading import load_model


def load(folder: Path) -> Decoder:
    return load_model(folder, LoadOptions(capacity=ModelCapacity(num_slots=64), device="cpu"))


def logits(model: Decoder) -> Tensor:
    model.state.open(1, ())
    return model.step([StepRow.chain(1, (3, 1, 4))], DraftNeeds()).logits_MV


def test_a_head_that_is_stored_wins_over_tying(tmp_path: Path) -> None:
    plain, tied = variant("llama2"), variant("tied")
    folder = write_checkpoint(tmp_path, plain)
    expected = logits(load(folder))
    (folder / "config.json").write_text(json.dumps(tied.config))
    assert torch.equal(logits(load(folder)), expected)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tied, plain = variant("tied"), variant("llama2")
    tensors = random_tensors(tied.config, seed=0)
    tied_logits = logits(load(write_checkpoint(tmp_path / "tied", tied)))
    folder = tmp_path / "copied"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(plain.config))
    head = tensors["model.embed_tokens.weight"].clone()
    save_tensors(folder / "model.safetensors", {**tensors, "lm_head.weight": head})
    assert torch.equal(logits(load(folder)), tied_logits)


def test_an_untied_model_needs_a_head(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("tied"))
    (folder / "config.json").write_text(json.dumps(variant("llama2").config))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight, of shape \[96, 64\], is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("phi3", r"self_attn\.q_proj\.weight, of shape \[64, 64\], is missing"),
        ("qwen2", r"self_attn\.o_proj\.bias, of shape \[64\], is missing"),
        ("qwen3", r"k_norm\.weight is not part"),
    ],
)
def test_a_family_s_own_tensors_belong_to_it_alone(name: str, missing: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant(name))
    config = {**variant(name).config, "model_type": "llama", "attention_bias": name == "qwen2"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=missing):
        load(folder)


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
def test_biases_that_the_config_denies_are_not_dropped_silently(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant(name))
    config = {**variant(name).config, name: False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"\.bias is not part of this model"):
        load(folder)


def test_layers_that_the_config_denies_are_not_dropped_silently(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("llama2"))
    config = {**variant("llama2").config, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..* is not part"):
        load(folder)


def test_sizes_that_do_not_fit_the_weights_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("llama2"))
    config = {**variant("llama2").config, "intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight has shape \[96, 64\].*\[128, 64"):
        load(folder)


def test_the_model_outlives_its_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("llama2"))
    model = load(folder)
    expected = logits(model).clone()
    model.state.close(1)
    path = folder / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(logits(model), expected)
