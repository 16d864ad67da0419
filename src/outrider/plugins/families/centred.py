"""Families whose norms are layer norms, with a row for each, as in models/family_table.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outrider.models import layer_kinds as kinds
from outrider.models.configs import Family
from outrider.models.expert_kinds import renamed
from outrider.models.json_object import JsonObject, unsupported
from outrider.models.rope_config import PARTIAL_ROPE
from outrider.plugins.families import kinds as own

_NO_MLP_BIAS = {"mlp_bias": False}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_TIED = {"tie_word_embeddings": True}
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_CENTRED = kinds.LayerTraits(centred=True, norm_bias=True)
_DENSE = {"mlp.up_proj.": "mlp.dense_h_to_4h.", "mlp.down_proj.": "mlp.dense_4h_to_h."}


def _refuse(raw: JsonObject, key: str, only: bool) -> None:
    if raw.flag(key, default=only) is not only:
        raise unsupported(
            raw.where,
            f"{key} {str(not only).lower()} is not supported for model_type "
            f"{raw.text('model_type')!r}",
        )


def _stablelm(raw: JsonObject) -> kinds.LayerTraits:
    for key in ("use_parallel_residual", "qk_layernorm"):
        _refuse(raw, key, only=False)
    return _CENTRED


def _phi(raw: JsonObject) -> kinds.LayerTraits:
    _refuse(raw, "qk_layernorm", only=False)
    gate, norms = kinds.Gate.NONE, kinds.Norms.PARALLEL
    return replace(_CENTRED, gate=gate, norms=norms, head_bias=True)


def _olmo(raw: JsonObject) -> kinds.LayerTraits:
    clip = raw.number("clip_qkv") if raw.has("clip_qkv") else 0.0
    return kinds.LayerTraits(centred=True, bare=True, qkv_clip=clip)


def _neox(raw: JsonObject) -> kinds.LayerTraits:
    parallel = raw.flag("use_parallel_residual", default=True)
    return replace(
        _CENTRED,
        gate=_plain_gate(raw, "hidden_act"),
        norms=kinds.Norms.TWO_PARALLEL if parallel else kinds.Norms.BEFORE,
        by_group=raw.flag("qkv_by_group", default=True),
    )


def _plain_gate(raw: JsonObject, key: str) -> kinds.Gate:
    return kinds.Gate.ERF if raw.text(key, "gelu") == "gelu" else kinds.Gate.NONE


def _neox_settings(raw: JsonObject) -> Mapping[str, object]:
    own = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    return {"num_key_value_heads": raw.integer("num_attention_heads"), **renamed(raw, own)}


def _falcon(raw: JsonObject) -> kinds.LayerTraits:
    """Falcon's traits: its second generation has two norms of one residual, or one as the first."""
    _refuse(raw, "alibi", only=False)
    is_new = raw.flag("new_decoder_architecture", default=False)
    if is_new:
        _refuse(raw, "parallel_attn", only=True)
    norms = kinds.Norms.PARALLEL
    if is_new and raw.integer("num_ln_in_parallel_attn", 2) > 1:
        norms = kinds.Norms.TWO_PARALLEL
    if not raw.flag("parallel_attn", default=True):
        norms = kinds.Norms.BEFORE
    by_group = raw.flag("qkv_by_group", default=True)
    gate = _plain_gate(raw, "activation")
    return replace(_CENTRED, gate=gate, norms=norms, by_group=by_group)


def _falcon_settings(raw: JsonObject) -> Mapping[str, object]:
    """Sizes under the usual keys, which folders of the family do not mean and GGUF files have."""
    if raw.has("qkv_by_group"):
        return {}
    heads, hidden = raw.integer("num_attention_heads"), raw.integer("hidden_size")
    kv = raw.integer("num_kv_heads", heads)
    is_new = raw.flag("new_decoder_architecture", default=False)
    if not is_new and raw.flag("multi_query", default=True):
        kv = 1
    ffn = raw.integer("ffn_hidden_size", 4 * hidden)
    return {"num_key_value_heads": kv, "intermediate_size": ffn}


CENTRED_TABLE: Mapping[str, Family] = {
    "cohere2": Family(
        {**_TIED, "sliding_window": 4096, "layer_norm_eps": 1e-5, "eos_token_id": 255001},
        _NO_MLP_BIAS,
        kinds.all_but_every(4),
        ropes=own.where_sliding,
        traits=own.cohere_traits,
        norm_key="layer_norm_eps",
    ),
    "cohere": Family(
        {**_TIED, "layer_norm_eps": 1e-5, "eos_token_id": 255001, "rope_theta": 500000.0},
        _NO_MLP_BIAS,
        traits=own.cohere_traits,
        norm_key="layer_norm_eps",
    ),
    "stablelm": Family(
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "num_key_value_heads": 32},
        _NO_MLP_BIAS,
        rope=PARTIAL_ROPE,
        traits=_stablelm,
        norm_key="layer_norm_eps",
        qkv_bias_key="use_qkv_bias",
    ),
    # Of GGUF files: transformers has no such family.
    "orion": Family(traits=kinds.always(_CENTRED), norm_key="layer_norm_eps"),
    "nemotron": Family(
        {"norm_eps": 1e-5, "partial_rotary_factor": 0.5, "head_dim": 128},
        rope=PARTIAL_ROPE,
        traits=kinds.always(
            kinds.LayerTraits(centred=True, norm_bias=True, from_one=True, gate=kinds.Gate.SQUARED)
        ),
        activations=("relu2",),
        norm_key="norm_eps",
    ),
    "starcoder2": Family(
        {**_TIED, "norm_epsilon": 1e-5, "num_key_value_heads": 2, "use_bias": True},
        windows=kinds.in_all_layers,
        traits=kinds.always(kinds.BIASED_LAYERS),
        activations=("gelu_pytorch_tanh", "gelu_new"),
        norm_key="norm_epsilon",
        bias_key="use_bias",
    ),
    "phi": Family(
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        _BIASES,
        rope=PARTIAL_ROPE,
        traits=_phi,
        activations=_TANH,
        norm_key="layer_norm_eps",
        fused_tensors=True,
        names={
            "model.norm.": "model.final_layernorm.",
            "self_attn.o_proj.": "self_attn.dense.",
            "mlp.up_proj.": "mlp.fc1.",
            "mlp.down_proj.": "mlp.fc2.",
        },
    ),
    "gpt_neox": Family(
        {"layer_norm_eps": 1e-5, "rotary_pct": 0.25, "attention_bias": True},
        {"mlp_bias": True},
        rope=PARTIAL_ROPE,
        traits=_neox,
        derived=_neox_settings,
        activations=("gelu", *_TANH),
        norm_key="layer_norm_eps",
        fused_tensors=True,
        names={
            "model.norm.": "gpt_neox.final_layer_norm.",
            "model.embed_tokens.": "gpt_neox.embed_in.",
            "model.layers.": "gpt_neox.layers.",
            "lm_head.": "embed_out.",
            "self_attn.qkv_proj.": "attention.query_key_value.",
            "self_attn.o_proj.": "attention.dense.",
            **_DENSE,
        },
    ),
    "falcon": Family(
        {**_TIED, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 11},
        traits=_falcon,
        derived=_falcon_settings,
        activation_key="activation",
        activations=("gelu", *_TANH),
        norm_key="layer_norm_epsilon",
        bias_key="bias",
        fused_tensors=True,
        names={
            "model.norm.": "transformer.ln_f.",
            "model.embed_tokens.": "transformer.word_embeddings.",
            "model.layers.": "transformer.h.",
            "self_attn.qkv_proj.": "self_attention.query_key_value.",
            "self_attn.o_proj.": "self_attention.dense.",
            **_DENSE,
        },
    ),
    "olmo": Family(
        {"eos_token_id": 50279},
        {**_NO_MLP_BIAS, "layer_norm_eps": 1e-5},
        traits=_olmo,
        norm_key="layer_norm_eps",
    ),
    "jais2": Family(
        {"layer_norm_eps": 1e-5, **_BIASES, "eos_token_id": 150024},
        traits=kinds.always(replace(_CENTRED, gate=kinds.Gate.SQUARED)),
        activations=("relu2",),
        norm_key="layer_norm_eps",
    ),
    # Of GGUF files: transformers has no such family.
    "codeshell": Family(
        traits=kinds.always(kinds.BIASED_LAYERS),
        activations=_TANH,
        norm_key="layer_norm_epsilon",
        fused_tensors=True,
    ),
}
