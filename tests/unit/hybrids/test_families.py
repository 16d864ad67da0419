"""Configs of gated-delta hybrids: both generations, defaults, and refusals by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles.tiny_hybrids import HYBRIDS, hybrid_shapes, tiny_hybrid
from outrider.core.errors import CheckpointError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.configs import HybridConfig
from outrider.models.families import parse_config
from outrider.models.json_object import JsonObject
from outrider.plugins.hybrids.model import HybridModel

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


def _parse(values: Mapping[str, Any]) -> HybridConfig:
    config = parse_config(JsonObject("config.json", values))
    assert isinstance(config, HybridConfig)
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


@pytest.mark.parametrize("force_reference", [False, True])
def test_a_head_may_have_a_bias_a_scale_and_a_cap(force_reference: bool) -> None:
    """As those of other decoders, operator by operator and in the native call."""

    def logits_of(model: HybridModel) -> Tensor:
        model.state.open(0, ())
        return model.step([StepRow.chain(0, (5, 9, 33))], DraftNeeds()).logits_MV.clone()

    plain, model = (tiny_hybrid(force_reference=force_reference) for _ in range(2))
    bias_V = torch.linspace(-2, 2, model.config.vocab_size)
    traits = replace(model.config.traits, head_bias=True, logit_scale=0.5, logit_cap=3.0)
    model.config = replace(model.config, traits=traits)
    model._operators = replace(model._operators, config=model.config)  # pyright: ignore
    model._tables = replace(model.tables, head_bias_V=bias_V)  # pyright: ignore
    model._forward = model._make_forward()  # pyright: ignore
    expected_MV = 3 * torch.tanh(0.5 * (logits_of(plain) + bias_V) / 3)
    torch.testing.assert_close(logits_of(model), expected_MV, rtol=1e-5, atol=1e-5)


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


# What the hub's files say of LFM2-1.2B and Nemotron 3 Nano, shortened to what is read.
LFM2_1B: Mapping[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "block_ff_dim": 12288,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "intermediate_size": 12288,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_L_cache": 3,
    "conv_bias": False,
    "rope_theta": 1000000.0,
}
NANO_30B: Mapping[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "time_step_limit": [0.0, math.inf],
    "max_position_embeddings": 262144,
}


def test_convolutions_of_the_published_size() -> None:
    config = _parse(LFM2_1B)
    assert (config.ffn_size, config.rope.theta, config.tie_word_embeddings) == (8192, 1e6, True)
    assert 1.16e9 < config.num_parameters < 1.18e9
    # Two rows of a window in each of ten layers: a state is small.
    assert config.delta.state_bytes == 10 * 2 * 2048 * 4


def test_layers_of_one_kind_of_the_published_size() -> None:
    config = _parse(NANO_30B)
    assert len(config.attention_layers) == 6
    assert (config.delta.num_layers, len(config.sparse_layers)) == (23, 23)
    assert 31e9 < config.num_parameters < 32e9
    spec = config.spec("", bytes_per_weight=2, bytes_per_kv=2)
    idle = spec.expert_parameters * (1 - 6 / 128)
    assert 3e9 < spec.num_parameters - idle < 4e9


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("lfm2", {"layer_types": ["conv"] * 4}, "no layer attends"),
        ("lfm2", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache"),
        ("lfm2_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above"),
        ("granite_h", {"mamba_d_head": 7}, "mamba_n_heads 6 of mamba_d_head 7"),
        ("granite_h", {"mamba_n_groups": 4}, "not a multiple of mamba_n_groups 4"),
        ("granite_h", {"time_step_limit": [0.001, math.inf]}, "time_step_limit"),
        ("granite_h", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers has 1"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers has 1"),
        ("nemotron_h", {"hybrid_override_pattern": "MX*"}, "kind 'X'"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("nemotron_h_moe", {"n_group": 4}, "no 4 groups"),
    ],
)
def test_what_cannot_run_of_other_recurrences_is_refused_by_name(
    name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        _parse({**HYBRIDS[name], **changes})
