"""Rows of models/family_table.py: what config.json says of layers, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from outrider.core.errors import CheckpointError
from outrider.models.configs import LlamaConfig
from outrider.models.families import DECODER_FAMILIES, FAMILIES, parse_llama
from outrider.models.json_object import JsonObject
from outrider.models.layer_kinds import Gate, Norms
from outrider.models.rope_config import Rope

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def parsed(family: str, **changes: Any) -> LlamaConfig:
    return parse_llama(JsonObject("config.json", {"model_type": family, **SIZES, **changes}))


def windows(config: LlamaConfig) -> list[int]:
    return [config.layer_kind(index).window for index in range(config.num_layers)]


def thetas(config: LlamaConfig) -> list[float]:
    ropes = [config.layer_kind(index).rope for index in range(config.num_layers)]
    return [0.0 if rope is None else rope.theta for rope in ropes]


def test_rows_of_a_compressed_cache() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = parsed("deepseek_v3", rope_parameters=yarn, rope_interleave=False)
    assert config.latent is not None
    assert (config.head_dim, config.num_kv_heads, config.rope.rotary_dim(576)) == (576, 1, 64)
    assert (config.latent.still, config.latent.value_dim, config.latent.query_rank) == (
        128, 128, 1536,
    )  # fmt: skip
    assert not config.latent.interleaved
    assert config.scale == pytest.approx(192**-0.5 * (1 + 0.1 * math.log(4)) ** 2)
    assert config.rope.attention_factor == 1.0
    assert "a compressed cache" in config.extras
    assert parsed("deepseek_v2", q_lora_rank=None).latent == replace(
        config.latent, query_rank=0, interleaved=True
    )


def test_experts_come_from_groups() -> None:
    v3, v2 = parsed("deepseek_v3").experts, parsed("deepseek_v2", n_group=8, topk_group=3).experts
    limited = parsed("deepseek_v2", topk_method="group_limited_greedy", n_group=8, topk_group=3)
    groups = [
        (one.num_groups, one.top_groups, one.group_best, one.has_choice_bias)
        for one in (v3, v2, limited.experts)
        if one is not None
    ]
    assert groups == [(8, 4, 2, True), (1, 1, 1, False), (8, 3, 1, False)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_lora_rank": 13}, "kv_lora_rank must be even"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim must be even"),
        ({"n_group": 3, "topk_group": 1}, "n_group"),
        ({"n_group": 4, "topk_group": 5}, "topk_group"),
        ({"n_group": 64, "topk_group": 1, "num_experts_per_tok": 8}, "above num_experts 4"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_no_latent_attention_has_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parsed("deepseek_v3", **changes)


@pytest.mark.parametrize("family", DECODER_FAMILIES)
def test_every_family_is_read_by_its_defaults(family: str) -> None:
    assert family in FAMILIES
    text = {"text_config": SIZES, "vision_config": {}}
    if family in ("gemma3", "mistral3", "qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe"):
        raw = JsonObject("config.json", {"model_type": family, **text})
        config = parse_llama(raw)
        assert config.also_sees
        assert "a part for pictures" in config.extras
        assert any("pictures" in note for note in config.notes)
    else:
        config = parsed(family)
    assert config.family == family
    assert config.num_parameters > 0


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 8}, [8] * 6),
        ("ministral", {"sliding_window": 8}, [8] * 6),
        ("ministral", {"sliding_window": None}, [0] * 6),
        ("gemma2", {"sliding_window": 8}, [8, 0] * 3),
        ("gemma3_text", {"sliding_window": 8}, [8] * 5 + [0]),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, [8, 0] * 3),
        ("gpt_oss", {"sliding_window": 8}, [8, 0] * 3),
        ("olmo3", {"sliding_window": 8}, [8, 8, 8, 0, 8, 8]),
        ("cohere2", {"sliding_window": 8}, [8, 8, 8, 0, 8, 8]),
        ("exaone4", {"sliding_window": 8}, [8, 8, 8, 0, 8, 8]),
        ("exaone4", {"sliding_window": 8, "sliding_window_pattern": "LLG"}, [8, 8, 0] * 2),
        ("exaone4", {"sliding_window": None}, [0] * 6),
        ("qwen3_moe", {"sliding_window": 8}, [0] * 6),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, [8] * 6),
        (
            "qwen2_moe",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            [8, 0, 8, 0, 0, 0],
        ),
        (
            "smollm3",
            {"sliding_window": 8, "use_sliding_window": True},
            [0, 0, 0, 8, 0, 0],
        ),
        ("gemma2", {"sliding_window": 8, "layer_types": [FULL] * 5 + [SLIDING]}, [0] * 5 + [8]),
        ("gemma2", {"sliding_window": 256}, [0] * 6),
    ],
)
def test_windows_by_layer(family: str, changes: dict[str, Any], expected: list[int]) -> None:
    assert windows(parsed(family, **changes)) == expected


def test_positions_by_layer() -> None:
    assert thetas(parsed("smollm3")) == [2e6, 2e6, 2e6, 0, 2e6, 2e6]
    assert thetas(parsed("smollm3", no_rope_layers=[0, 1] * 3)) == [0, 2e6] * 3
    assert thetas(parsed("cohere2", sliding_window=8, rope_theta=50.0)) == [50, 50, 50, 0, 50, 50]
    exaone = parsed("exaone4", sliding_window=8)
    assert thetas(exaone) == [1e4, 1e4, 1e4, 0, 1e4, 1e4]
    assert thetas(parsed("exaone4", sliding_window=None)) == [1e4] * 6
    gemma = parsed("gemma3_text", sliding_window=8)
    assert thetas(gemma) == [1e4] * 5 + [1e6]
    old = parsed(
        "gemma3_text",
        sliding_window=8,
        rope_theta=7e5,
        rope_local_base_freq=50.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert thetas(old) == [50] * 5 + [7e5]
    assert old.layer_kind(0).rope == Rope(theta=50.0)
    assert old.layer_kind(5).rope == Rope(kind="linear", theta=7e5, factor=8.0)
    parts = {FULL: {"rope_theta": 9.0}, SLIDING: {"rope_theta": 3.0}}
    assert thetas(parsed("olmo3", sliding_window=8, rope_parameters=parts)) == [3, 3, 3, 9, 3, 3]


def test_gpt_oss_stretches_positions_by_default() -> None:
    rope = parsed("gpt_oss", max_position_embeddings=131072).rope
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 150000.0, 32.0)
    assert (rope.original_tokens, rope.truncate) == (4096, False)


def test_traits() -> None:
    gemma = parsed("gemma2", query_pre_attn_scalar=64).traits
    assert (gemma.norms, gemma.from_one, gemma.gate) == (Norms.AROUND, True, Gate.GELU)
    assert (gemma.attention_scale, gemma.embedding_scale) == (0.125, 8.0)
    assert (gemma.attention_cap, gemma.logit_cap) == (50.0, 30.0)
    third = parsed("gemma3_text", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert (third.traits.attention_cap, third.traits.logit_cap) == (0.0, 30.0)
    cohere = parsed("cohere2", logit_scale=0.25).traits
    assert (cohere.norms, cohere.centred, cohere.logit_scale) == (Norms.PARALLEL, True, 0.25)
    assert parsed("olmo2").traits.whole_heads
    assert parsed("exaone4").traits.norms is Norms.AFTER
    assert parsed("gpt_oss").traits.sinks
    granite = parsed("granite", logits_scaling=8.0, residual_multiplier=0.5).traits
    assert (granite.logit_scale, granite.residual_scale) == (0.125, 0.5)


def test_mixtures() -> None:
    config = parsed("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    spec = config.spec("", bytes_per_weight=2, bytes_per_kv=2)
    assert (spec.num_experts, spec.num_active_experts) == (4, 2)
    assert spec.expert_parameters == 6 * 4 * 3 * 64 * 8
    assert config.sparse_layers == tuple(range(6))
    assert parsed("qwen3_moe", num_experts=0).experts is None
    assert parsed("qwen3_moe", mlp_only_layers=[1, 2]).sparse_layers == (0, 3, 4, 5)
    assert parsed("qwen2_moe", decoder_sparse_step=3).sparse_layers == (2, 5)
    assert parsed("mixtral").experts == parsed("mixtral", num_experts_per_tok=2).experts
    oss = parsed("gpt_oss", num_local_experts=4, num_experts_per_tok=4, swiglu_limit=3.0).experts
    assert oss is not None
    assert (oss.biased, oss.gate, oss.limit) == (True, Gate.CLAMPED, 3.0)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("gemma2", {"layer_types": [FULL] * 5}, "layer_types has 5 entries for 6 layers"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 6}, "'chunked_attention'"),
        ("olmo3", {"layer_types": [SLIDING] * 6, "sliding_window": None}, "sliding_window"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 6 layers"),
        ("qwen3_moe", {"num_experts_per_tok": 129}, "num_experts_per_tok 129 is above"),
        ("cohere2", {"logit_scale": 0}, "logit_scale must be above 0"),
        ("granite", {"attention_multiplier": "1"}, "attention_multiplier must be a number"),
        ("gpt_oss", {"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ("gemma3_text", {"rope_parameters": {FULL: {"rope_type": "ntk"}}}, "rope type 'ntk'"),
    ],
)
def test_what_is_refused_is_named(family: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parsed(family, **changes)
    assert said in str(caught.value)


def test_a_text_part_that_is_not_ours_is_named() -> None:
    text = {**SIZES, "model_type": "gemma4_text"}
    raw = JsonObject("config.json", {"model_type": "mistral3", "text_config": text})
    with pytest.raises(CheckpointError, match="a text model of model_type 'gemma4_text'"):
        parse_llama(raw)
    quantised = {"quantization_config": {"quant_method": "hqq"}}
    raw = JsonObject("config.json", {"model_type": "gemma3", "text_config": SIZES, **quantised})
    with pytest.raises(CheckpointError, match="hqq"):
        parse_llama(raw)
