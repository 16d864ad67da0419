"""Drafters in GGUF files, as llama.cpp's converter writes them, against those in folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles.eagle_heads import EagleFolder
from doubles.gguf_writer import Gguf
from doubles.published_drafters import CASES, MASK, TARGET, Case, drawn
from doubles.tiny_checkpoints import random_llama
from outrider.core.errors import CheckpointError
from outrider.core.protocols import StepRow
from outrider.models.decoder import ModelCapacity
from outrider.models.heads import HeadsToLoad, hidden_layers_of, kind_of
from outrider.plugins.heads.eagle import load_eagle
from unit.heads.test_published_drafters import Pair, drafter_in

LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    "attention_conv.kernel_projection": "attn_conv_proj",
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
}
OUTER = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "hidden_norm": "enc.output_norm",
    "input_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
    "candidate_selector.hidden_projection": "selector_hidden",
}


def stored(name: str) -> str:
    """The name in a GGUF file."""
    plain, ending = name, ""
    if name.endswith((".weight", ".bias")):
        plain, _, end = name.rpartition(".")
        ending = f".{end}"
    if "codebook" in plain:
        ending = ".weight"
    if plain.startswith(("layers.", "midlayer.")):
        block, _, part = plain.removeprefix("layers.").partition(".")
        return f"blk.{0 if block == 'midlayer' else block}.{LAYER[part]}{ending}"
    return OUTER.get(plain, plain) + ending


def written(path: Path, arch: str, keys: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(96)],
        "tokenizer.ggml.mask_token_id": MASK,
        **{f"{arch}.{key}": value for key, value in keys.items()},
    }
    file = Gguf(metadata)
    for name, tensor in tensors.items():
        if name == "d2t":
            file.add("d2t", (tensor + torch.arange(len(tensor))).numpy(), "I64")
        elif name != "t2d":
            file.add(stored(name), tensor.float().numpy())
    return file.write(path)


def sizes_of(layer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "block_count": layer["num_hidden_layers"],
        "context_length": layer["max_position_embeddings"],
        "embedding_length": layer["hidden_size"],
        "feed_forward_length": layer["intermediate_size"],
        "attention.head_count": layer["num_attention_heads"],
        "attention.head_count_kv": layer["num_key_value_heads"],
        "attention.key_length": layer["head_dim"],
        "attention.value_length": layer["head_dim"],
        "attention.layer_norm_rms_epsilon": layer["rms_norm_eps"],
        "rope.freq_base": 10000.0,
    }


OWN: Mapping[str, Mapping[str, Any]] = {
    "dflash": {},
    "dflash-zlab": {},
    "dspark-vanilla": {"sample_from_anchor": True, "has_confidence_head": True},
    "dspark-gated": {"sample_from_anchor": True, "has_confidence_head": True},
    "dspark-rnn": {"sample_from_anchor": False, "has_confidence_head": True},
}


# llama.cpp converts vanilla Markov heads alone; others have the names of folders.
@pytest.mark.parametrize("name", OWN)
def test_a_file_drafts_as_its_folder(name: str, tmp_path: Path) -> None:
    case = Case.read(CASES / f"{name}.json")
    layer = case.config.get("transformer_layer_config", case.config)
    layers = [0, 3, 8] if name == "dflash-zlab" else [1, 3, 8]
    keys = {**sizes_of(layer), "target_layers": layers, "block_size": 5, **OWN[name]}
    path = written(tmp_path / "a.gguf", "dflash", keys, drawn(case.shapes, case.ids))
    pair = Pair(case, *drafter_in(path, chunk=8))
    assert pair.kind == name.partition("-")[0]
    pair.open(0)
    for length, expected in case.drafts.items():
        (draft,) = pair.drafter.propose([pair.states(0, length)])
        assert draft.tokens == expected


SLIDING = ["sliding_attention", "full_attention"]
DFLASH2 = {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}


def windowed(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file whose first layer slides."""
    slides = [kind == SLIDING[0] for kind in SLIDING]
    window = {"attention.sliding_window": 6, "attention.sliding_window_pattern": slides}
    return {**sizes_of(layer), "target_layers": [1, 3, 8], "block_size": 5, **window}


@pytest.mark.parametrize("causal", [None, False, True])
@pytest.mark.parametrize("name", ["dflash-window", "dflash2"])
def test_windows_in_a_file_are_those_of_z_labs_folder(
    name: str, causal: bool | None, tmp_path: Path
) -> None:
    """llama.cpp converts windows of this format alone, which end at the token itself."""
    case = Case.read(CASES / f"{name}.json")
    layer = case.config["transformer_layer_config"]
    own = DFLASH2 if name == "dflash2" else {}
    switch = {} if causal is None else {"is_causal": causal}
    parts = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 7], **own}
    config = {**layer, "architectures": ["DFlashDraftModel"], "dflash_config": parts, **switch}
    folder = replace(case, config={**config, "block_size": 5}).write(tmp_path / "folder")
    keys = windowed(layer) | own
    keys |= {} if causal is None else {"attention.causal": causal}
    file = written(tmp_path / "a.gguf", "dflash", keys, drawn(case.shapes, case.ids))
    one, other = (Pair(case, *drafter_in(path, chunk=8)) for path in (folder, file))
    drafts: list[tuple[int, ...]] = []
    for pair in (one, other):
        pair.open(0)
    for length in case.drafts:
        ((first,), (second,)) = (
            pair.drafter.propose([pair.states(0, length)]) for pair in (one, other)
        )
        assert first.tokens == second.tokens
        drafts.append(first.tokens)
    assert len(set(drafts)) > 3
    assert any(drafts)


def test_windows_of_dspark_are_refused(tmp_path: Path) -> None:
    case = Case.read(CASES / "dspark-vanilla.json")
    keys = {**windowed(case.config["transformer_layer_config"]), **OWN["dspark-vanilla"]}
    path = written(tmp_path / "a.gguf", "dflash", keys, drawn(case.shapes, case.ids))
    with pytest.raises(CheckpointError, match="DSpark with a sliding window") as caught:
        kind_of(path)
    assert "folder with safetensors" in str(caught.value.hint)


def paired(weight_OI: Tensor, head_dim: int) -> Tensor:
    """Rows of heads with neighbours as pairs, as llama.cpp turns them in this architecture."""
    rows = weight_OI.view(-1, 2, head_dim // 2, weight_OI.shape[1])
    return rows.transpose(1, 2).reshape(weight_OI.shape)


def test_eagle_3_in_a_file_is_that_in_a_folder(tmp_path: Path) -> None:
    heads = EagleFolder(
        64, 96, layers=(1, 3, 5), ids=tuple(range(3, 90, 4)), changes={"norm_before_fc": True}
    )
    tensors = heads.tensors()
    stored_tensors = {
        name: paired(tensor, 16) if name.endswith(("q_proj.weight", "k_proj.weight")) else tensor
        for name, tensor in tensors.items()
    }
    keys = {
        **sizes_of(heads.config()),
        "target_layers": [1, 3, 5],
        "target_hidden_size": 64,
        "norm_before_residual": False,
        "norm_before_fc": True,
    }
    path = written(tmp_path / "a.gguf", "eagle3", keys, stored_tensors)
    assert kind_of(path) == "eagle"
    assert hidden_layers_of(path, "eagle", 8) == (1, 3, 5)
    target = random_llama(TARGET)
    room = ModelCapacity(num_slots=64, page_size=4, hidden_layers=(1, 3, 5))
    states_PLD = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    found: list[Tensor] = []
    folder = heads.write(tmp_path / "folder")
    for place in (path, folder):
        net = load_eagle(HeadsToLoad(place, "eagle", room), target)
        net.state.open(0, ())
        out = net.step([StepRow.chain(0, (3, 1, 4, 1, 5))], net.fuse(states_PLD))
        found.append(out.logits_MV.clone())
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)
