"""The families that llama.py computes, with a row for each: the meaning of its config.json.

A row has the defaults of absent keys, the keys that are never read, and how the layers differ
(layer_kinds.py). Defaults are those of transformers. No tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from outrider.models.json_object import JsonObject
from outrider.models.layer_kinds import (
    LayerKind,
    LayerTraits,
    Mixture,
    Norms,
    Ropes,
    Traits,
    Windows,
    all_but_every,
    always,
    by_kind,
    by_kinds,
    by_switch,
    cohere_traits,
    dense,
    exaone_ropes,
    gemma1_traits,
    gemma_traits,
    gpt_oss_experts,
    gpt_oss_rope,
    granite_traits,
    in_all_layers,
    ministral3_reach,
    mixtral_experts,
    named_or_one,
    one_rope,
    plain_traits,
    qwen2_moe_windows,
    qwen_experts,
    qwen_windows,
    smollm3_windows,
    where_listed,
    where_sliding,
    whole,
)
from outrider.models.rope_config import COMMON_ROPE, MROPE, PHI3_ROPE, RopeRules


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a family: `defaults` of absent keys, `fixed` values of keys that it never
    reads, and its kinds of layers. `activations` are the names of its gate under `activation_key`;
    the first is the default. `norm_key` names the epsilon of its norms. `reach` returns the number
    of tokens up to which llama.py computes the family's own logits, and the reason."""

    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    fixed: Mapping[str, object] = field(default_factory=dict[str, object])
    windows: Windows = whole
    rope: RopeRules = COMMON_ROPE
    ropes: Ropes = one_rope
    traits: Traits = plain_traits
    experts: Mixture = dense
    qkv_bias: bool = False
    qk_norm: bool = False
    fused_tensors: bool = False
    activation_key: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "swish")
    norm_key: str = "rms_norm_eps"
    reach: Callable[[JsonObject], tuple[int, str] | None] = lambda _: None


_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_NO_MLP_BIAS = {"mlp_bias": False}
_TIED = {"tie_word_embeddings": True}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_QWEN3 = {**_QWEN, "head_dim": 128}
_GELU = ("gelu_pytorch_tanh", "gelu_new")
_AFTER = always(LayerTraits(norms=Norms.AFTER))
_OLMO = Family(
    {"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    _NO_MLP_BIAS,
    traits=always(LayerTraits(norms=Norms.AFTER, whole_heads=True)),
    qk_norm=True,
)
_GEMMA2 = Family(
    {
        **_TIED,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "eos_token_id": 1,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    _NO_MLP_BIAS,
    all_but_every(2),
    ropes=named_or_one,
    traits=gemma_traits,
    activation_key="hidden_activation",
    activations=_GELU,
)
_QWEN3_MOE = Family(
    {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    _NO_MLP_BIAS,
    by_switch,
    experts=qwen_experts,
    qk_norm=True,
)
FAMILY_TABLE: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family({"num_key_value_heads": 8, "sliding_window": 4096}, _NO_BIAS, in_all_layers),
    "ministral": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096},
        _NO_BIAS,
        lambda raw, num_layers: by_kinds(raw, num_layers, lambda _: raw.has("sliding_window")),
    ),
    "ministral3": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        _NO_BIAS,
        in_all_layers,
        reach=ministral3_reach,
    ),
    "qwen2": Family(_QWEN, _NO_BIAS, qwen_windows, qkv_bias=True),
    "qwen3": Family(_QWEN3, _NO_MLP_BIAS, qwen_windows, qk_norm=True),
    "phi3": Family(
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "eos_token_id": 32000},
        _NO_BIAS,
        in_all_layers,
        PHI3_ROPE,
        fused_tensors=True,
    ),
    "qwen2_moe": Family(
        {
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
        _NO_BIAS,
        qwen2_moe_windows,
        experts=qwen_experts,
        qkv_bias=True,
    ),
    "qwen3_moe": _QWEN3_MOE,
    "mixtral": Family(
        {
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        _NO_BIAS,
        in_all_layers,
        experts=mixtral_experts,
    ),
    "gpt_oss": Family(
        {
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
        },
        _NO_MLP_BIAS,
        all_but_every(2),
        ropes=gpt_oss_rope,
        traits=always(LayerTraits(sinks=True)),
        experts=gpt_oss_experts,
    ),
    "gemma": Family(
        {**_TIED, "num_key_value_heads": 16, "head_dim": 256, "eos_token_id": 1},
        _NO_MLP_BIAS,
        traits=gemma1_traits,
        # The first files say gelu and mean the approximation.
        activations=(*_GELU, "gelu"),
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        defaults={
            **_TIED,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "eos_token_id": 1,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
        # Only Gemma 2 caps the scores of attention.
        fixed={**_NO_MLP_BIAS, "attn_logit_softcapping": None},
        windows=all_but_every(6),
        ropes=by_kind("rope_local_base_freq", 10000.0),
        qk_norm=True,
    ),
    "smollm3": Family(
        {**_TIED, "num_key_value_heads": 4, "rope_theta": 2e6, "eos_token_id": 128001},
        windows=smollm3_windows,
        ropes=where_listed,
    ),
    "olmo2": replace(_OLMO, defaults={**_OLMO.defaults, "rope_theta": 10000.0}),
    "olmo3": replace(
        _OLMO,
        defaults={**_OLMO.defaults, "rope_theta": 500000.0, "sliding_window": 4096},
        windows=all_but_every(4),
        ropes=by_kind("rope_theta", 500000.0),
    ),
    "cohere2": Family(
        {**_TIED, "sliding_window": 4096, "layer_norm_eps": 1e-5, "eos_token_id": 255001},
        _NO_MLP_BIAS,
        all_but_every(4),
        ropes=where_sliding,
        traits=cohere_traits,
        norm_key="layer_norm_eps",
    ),
    "exaone4": Family(
        {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "eos_token_id": 2},
        _NO_BIAS,
        all_but_every(4),
        ropes=exaone_ropes,
        traits=_AFTER,
        qk_norm=True,
    ),
    "granite": Family(traits=granite_traits),
    "qwen2_5_vl_text": Family(
        {**_QWEN, "max_window_layers": 80, "num_key_value_heads": 8, "rope_theta": 1e6},
        _NO_BIAS,
        qwen_windows,
        MROPE,
        qkv_bias=True,
    ),
    "qwen3_vl_text": Family(
        {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0},
        _NO_MLP_BIAS,
        rope=MROPE,
        qk_norm=True,
    ),
    "qwen3_vl_moe_text": replace(_QWEN3_MOE, rope=MROPE, windows=whole),
}
# Models that also see, by the family of the text model within; their keys are in `text_config`.
WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}


def layer_kinds(raw: JsonObject, family: Family, num_layers: int) -> tuple[LayerKind, ...]:
    """The kind of every layer. Raises CheckpointError, naming the key, for an unsupported value."""
    windows = family.windows(raw, num_layers)
    ropes = family.ropes(raw, family.rope, windows)
    return tuple(LayerKind(*pair) for pair in zip(windows, ropes, strict=True))
