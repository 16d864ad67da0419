"""Our hybrids against transformers: the same logits and the same greedy text, on random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from doubles.hf_checkpoints import hushed
from doubles.tiny_checkpoints import save_tensors
from doubles.tiny_hybrids import hybrid_config, stored_hybrid, tiny_hybrid
from doubles.tiny_mixers import MIXERS
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model
from outrider.plugins.hybrids.model import HybridModel

pytestmark = pytest.mark.wide

pytest.importorskip("transformers")
TEXT = (5, 17, 3, 3, 90, 41, 8, 8, 8, 60, 2, 33, 71, 9, 0, 14, 14, 27, 50, 6)
NAMES = ("qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_next", *MIXERS)
# One of each family, with all of its parts.
GREEDY = (*NAMES[:4], "lfm2_moe", "granite_h_moe", "bamba", "falcon_h1_norm", "nemotron_h_moe")


def _peer(config: Mapping[str, Any], folder: Path) -> Any:
    """A transformers model with weights of our own making, saved into `folder`."""
    with hushed():
        from transformers import AutoConfig, AutoModelForCausalLM

        configs: Any = AutoConfig
        loader: Any = AutoModelForCausalLM
        settings = {key: value for key, value in config.items() if key != "model_type"}
        model = loader.from_config(configs.for_model(config["model_type"], **settings))
        rng = torch.Generator().manual_seed(7)
        biases = [pair for pair in model.named_buffers() if pair[0].endswith("bias")]
        for name, weight in (*model.named_parameters(), *biases):
            if name.endswith("A_log"):
                # The only ones that it draws by itself; with some its float32 is further than 1e-4
                # from its float64, and ours is not.
                weight.data = torch.rand(weight.shape, generator=rng).mul(16).log()
            noise = torch.randn(weight.shape, generator=rng)
            weight.data = 0.15 * noise if weight.dim() > 1 else weight.data + 0.2 * noise
        model.tie_weights()
        model.eval()
        model.save_pretrained(folder)
    return model


def _ours(folder: Path, *, reference: bool = False) -> HybridModel:
    options = LoadOptions(
        capacity=ModelCapacity(num_slots=256, page_size=8), device="cpu", force_reference=reference
    )
    model = load_model(folder, options)
    assert isinstance(model, HybridModel)
    return model


def _logits(model: HybridModel, text: tuple[int, ...]) -> Tensor:
    model.state.open(0, ())
    out = model.step([StepRow.chain(0, text)], DraftNeeds())
    model.state.close(0)
    return out.logits_MV.clone()


def _in_float64(peer: Any, text: tuple[int, ...]) -> Tensor:
    """What transformers says without rounding: its float32 is up to 1.6e-4 away from that here."""
    for module in peer.modules():
        if hasattr(module, "config"):
            # Grouped products of experts know no float64.
            module.config._experts_implementation = "eager"
    with torch.inference_mode():
        return peer.double()(input_ids=torch.tensor([text])).logits[0]


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reference", [False, True], ids=["chosen kernels", "reference"])
def test_logits_are_those_of_transformers(name: str, reference: bool, tmp_path: Path) -> None:
    peer = _peer(hybrid_config(name), tmp_path)
    ours = _logits(_ours(tmp_path, reference=reference), TEXT)
    difference = ours.double() - _in_float64(peer, TEXT)
    assert float(difference.abs().max()) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    peer = _peer(hybrid_config(name), tmp_path)
    model = _ours(tmp_path)
    model.state.open(0, ())
    fed, text = list(TEXT), list(TEXT)
    for _ in range(24):
        out = model.step([StepRow.chain(0, fed, logits_from=len(fed) - 1)], DraftNeeds())
        model.state.commit({0: range(len(fed))})
        fed = [int(out.logits_MV[0].argmax())]
        text += fed
    with hushed(), torch.inference_mode():
        tokens_1N = torch.tensor([TEXT])
        # Else it takes token 0 for padding.
        seen = torch.ones_like(tokens_1N)
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        wanted = peer.generate(tokens_1N, attention_mask=seen, **options)
    assert text == wanted[0].tolist()


def test_a_hybrid_that_also_sees_is_read_for_its_text(tmp_path: Path) -> None:
    """Nested settings, prefixed names, and tensors of other parts beside them."""
    stored = stored_hybrid("qwen3_5")
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(stored / "model.safetensors").items()
    }
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(3, 3)
    tensors["mtp.fc.weight"] = torch.zeros(3, 3)
    text = hybrid_config("qwen3_5")
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    save_tensors(tmp_path / "model.safetensors", tensors)
    model = _ours(tmp_path)
    assert "pictures" in model.config.notes[0]
    assert torch.equal(_logits(model, TEXT), _logits(tiny_hybrid(), TEXT))
