"""Configs of gated-delta hybrids: both generations, defaults, and refusals by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from doubles.tiny_hybrids import HYBRIDS, hybrid_shapes, tiny_hybrid
from outrider.core.errors import CheckpointError
from outrider.models.families import QwenHybridConfig, parse_config
from outrider.models.json_object import JsonObject

# What the hub's files of the two families say, shortened to what is read.
NEXT_80B: Mapping[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
DENSE_27B: Mapping[str, Any] = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "qwen3_5", "depth": 27},
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "eos_token_id": 248044,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    },
}


def _parse(values: Mapping[str, Any]) -> QwenHybridConfig:
    config = parse_config(JsonObject("config.json", values))
    assert isinstance(config, QwenHybridConfig)
    return config


def test_the_largest_of_the_first_generation() -> None:
    config = _parse(NEXT_80B)
    assert config.attention_layers == tuple(range(3, 48, 4))
    assert config.sparse_layers == tuple(range(48))
    assert config.rope.rotary_dim(config.head_dim) == 64
    assert config.dtype == "bfloat16"
    assert 79e9 < config.num_parameters < 81e9
    spec = config.spec("", bytes_per_weight=2, bytes_per_kv=2)
    assert (spec.num_experts, spec.num_active_experts) == (512, 10)
    # The name says 3 billion active of 80.
    idle = spec.expert_parameters * (1 - 10 / 512)
    assert 2.5e9 < spec.num_parameters - idle < 4.5e9


def test_a_dense_model_of_the_second_which_also_sees() -> None:
    config = _parse(DENSE_27B)
    assert (config.head_dim, config.delta.num_heads, config.delta.num_layers) == (256, 48, 48)
    assert config.experts is None
    assert config.stop_ids == (248044,)
    assert config.rope.theta == 1e7
    assert "pictures" in config.notes[0]
    assert 26e9 < config.num_parameters < 28e9
    spec = config.spec("", bytes_per_weight=2, bytes_per_kv=2)
    # 16 layers attend; a state of the others is what published systems count for a slot.
    assert spec.kv_bytes_per_token == 2 * 16 * 4 * 256 * 2
    assert 149 <= spec.state_bytes / 2**20 < 160
    assert spec.input_bytes < spec.state_bytes / 30
    assert spec.num_experts == spec.expert_parameters == 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_parameters_are_those_in_the_files(name: str) -> None:
    counted = sum(math.prod(shape) for shape in hybrid_shapes(HYBRIDS[name]).values())
    assert tiny_hybrid(name).config.num_parameters == counted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries for 4"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer attends"),
        ({"layer_types": None, "full_attention_interval": 5}, "no layer attends"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5 is above"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"quantization_config": {"bits": 4}}, "quantized|quantised"),
    ],
)
def test_what_cannot_run_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        _parse({**HYBRIDS["qwen3_5_moe" if "num_experts" in changes else "qwen3_5"], **changes})
