"""The families of our decoders, with a row for each: the meaning of its config.json. Modules
`families` of plugins have further rows.

A row has the defaults of absent keys, the keys that are never read, and how the layers differ
(layer_kinds.py). Defaults are those of transformers. No tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outrider.models import expert_kinds
from outrider.models import layer_kinds as kinds
from outrider.models.configs import Family
from outrider.models.rope_config import PHI3_ROPE

NO_BIAS = {"attention_bias": False, "mlp_bias": False}
NO_MLP_BIAS = {"mlp_bias": False}
TIED = {"tie_word_embeddings": True}
QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_QWEN2 = Family(QWEN, NO_BIAS, kinds.qwen_windows, qkv_bias=True)
_QWEN3 = {**QWEN, "head_dim": 128}
GELU = ("gelu_pytorch_tanh", "gelu_new")
_GEMMA2 = Family(
    {
        **TIED,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "eos_token_id": 1,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    NO_MLP_BIAS,
    kinds.all_but_every(2),
    ropes=kinds.named_or_one,
    traits=kinds.gemma_traits,
    activation_key="hidden_activation",
    activations=GELU,
)
QWEN3_MOE = Family(
    {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    NO_MLP_BIAS,
    kinds.by_switch,
    experts=expert_kinds.qwen_experts,
    qk_norm=True,
)
GRANITE_MOE = Family(
    {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 32},
    traits=kinds.granite_traits,
    experts=expert_kinds.granite_experts,
)
FAMILY_TABLE: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096}, NO_BIAS, kinds.in_all_layers
    ),
    "ministral": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096},
        NO_BIAS,
        lambda raw, num_layers: kinds.by_kinds(
            raw, num_layers, lambda _: raw.has("sliding_window")
        ),
    ),
    "ministral3": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        NO_BIAS,
        kinds.in_all_layers,
        traits=kinds.growing_traits,
        reach=kinds.query_reach,
    ),
    "qwen2": _QWEN2,
    # MiMo is a Qwen2 with MTP blocks.
    "mimo": _QWEN2,
    "qwen3": Family(_QWEN3, NO_MLP_BIAS, kinds.qwen_windows, qk_norm=True),
    "phi3": Family(
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "eos_token_id": 32000},
        NO_BIAS,
        kinds.in_all_layers,
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
        NO_BIAS,
        kinds.qwen2_moe_windows,
        experts=expert_kinds.qwen_experts,
        qkv_bias=True,
    ),
    "qwen3_moe": QWEN3_MOE,
    "mixtral": Family(
        {
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        NO_BIAS,
        kinds.in_all_layers,
        experts=expert_kinds.mixtral_experts,
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
        NO_MLP_BIAS,
        kinds.all_but_every(2),
        ropes=kinds.gpt_oss_rope,
        traits=kinds.always(kinds.LayerTraits(sinks=True)),
        experts=expert_kinds.gpt_oss_experts,
    ),
    "gemma": Family(
        {**TIED, "num_key_value_heads": 16, "head_dim": 256, "eos_token_id": 1},
        NO_MLP_BIAS,
        traits=kinds.gemma1_traits,
        # The first files say gelu and mean the approximation.
        activations=(*GELU, "gelu"),
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        defaults={
            **TIED,
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
        fixed={**NO_MLP_BIAS, "attn_logit_softcapping": None},
        windows=kinds.all_but_every(6),
        ropes=kinds.by_kind("rope_local_base_freq", 10000.0),
        qk_norm=True,
    ),
    "smollm3": Family(
        {**TIED, "num_key_value_heads": 4, "rope_theta": 2e6, "eos_token_id": 128001},
        windows=kinds.smollm3_windows,
        ropes=kinds.where_listed,
    ),
    "granite": Family(traits=kinds.granite_traits),
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE,
}
# Models that also see, by the family of the text model within; their keys are in `text_config`.
WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
}
