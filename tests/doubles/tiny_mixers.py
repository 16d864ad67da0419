"""Settings and tensors of tiny hybrids with convolutions or Mamba-2, named as on the hub.

Sizes are no multiples of each other where families allow it, groups are several, factors and biases
differ from their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]
_COMMON: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
    "tie_word_embeddings": False,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
_LFM2: Mapping[str, Any] = {
    **_COMMON,
    **_ROPE,
    "norm_eps": 2e-5,
    "conv_L_cache": 4,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
_SCANS: Mapping[str, Any] = {
    **_COMMON,
    **_ROPE,
    "rms_norm_eps": 2e-5,
    "mamba_n_heads": 6,
    "mamba_d_head": 20,
    "mamba_expand": 3,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_GRANITE: Mapping[str, Any] = {
    **_SCANS,
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
    "shared_intermediate_size": 44,
    "num_local_experts": 0,
}
_FALCON: Mapping[str, Any] = {
    **_SCANS,
    "model_type": "falcon_h1",
    "head_dim": 12,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 4,
    "mamba_d_head": 12,
    "mamba_rms_norm": False,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.5, 0.7, 1.1, 0.9, 0.8],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.3,
}
_NEMOTRON: Mapping[str, Any] = {
    **_COMMON,
    "model_type": "nemotron_h",
    "head_dim": 12,
    "layer_norm_epsilon": 2e-5,
    "hybrid_override_pattern": "M-*M",
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 3,
    "ssm_state_size": 12,
    "conv_kernel": 4,
    "chunk_size": 8,
    "use_conv_bias": True,
    "use_bias": False,
    # transformers takes this bound of training for one of the steps, and only in prompts.
    "time_step_min": 1e-12,
}
MIXERS: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {**_LFM2, "model_type": "lfm2"},
    "lfm2_odd": {
        **_LFM2,
        "model_type": "lfm2",
        "conv_bias": True,
        "conv_L_cache": 2,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 12,
        "block_ffn_dim_multiplier": 1.3,
        "tie_word_embeddings": True,
    },
    "lfm2_moe": {
        **_LFM2,
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 20,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.7,
    },
    "granite_h": _GRANITE,
    "granite_h_rope": {
        **_GRANITE,
        "position_embedding_type": "rope",
        "mamba_proj_bias": True,
        "attention_bias": True,
        "mamba_n_groups": 1,
        "tie_word_embeddings": True,
    },
    # Granite 4 without Mamba-2, such as granite-4.0-micro.
    "granite_attends": {
        **_GRANITE,
        "position_embedding_type": "rope",
        "layer_types": ["attention"] * 4,
    },
    "granite_h_moe": {
        **_GRANITE,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 36,
        "mamba_conv_bias": False,
        "mamba_n_groups": 3,
    },
    "bamba": {
        **_SCANS,
        "model_type": "bamba",
        "hidden_size": 48,
        "mamba_d_head": 24,
        "attn_layer_indices": [0, 2],
        "mamba_d_conv": 2,
    },
    "falcon_h1": _FALCON,
    "falcon_h1_norm": {
        **_FALCON,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "falcon_h1_first": {
        **_FALCON,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "mamba_conv_bias": False,
    },
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": {
        **_NEMOTRON,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
        "routed_scaling_factor": 2.5,
        "use_bias": True,
    },
    "nemotron_h_latent": {
        **_NEMOTRON,
        "hybrid_override_pattern": "ME*E",
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
        "moe_latent_size": 16,
        "norm_topk_prob": False,
        "use_conv_bias": False,
        "n_groups": 1,
    },
}
# Names of the table of tokens, of a layer's norms, of its parts, and of the last norm.
_GRANITE_NAMES = ("model.", "input_layernorm", "post_attention_layernorm", "model.norm")
_NAMES = {
    "lfm2": ("model.", "operator_norm", "ffn_norm", "model.embedding_norm"),
    "lfm2_moe": ("model.", "operator_norm", "ffn_norm", "model.embedding_norm"),
    "granitemoehybrid": _GRANITE_NAMES,
    "bamba": ("model.", "input_layernorm", "pre_ff_layernorm", "model.final_layernorm"),
    "falcon_h1": ("model.", "input_layernorm", "pre_ff_layernorm", "model.final_layernorm"),
    "nemotron_h": ("backbone.", "norm", "", "backbone.norm_f"),
}
_KINDS = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}


def kinds_of(config: Mapping[str, Any]) -> list[str]:
    """Letters of each layer: M for Mamba-2, C for a convolution, * for attention, E and - for
    FFNs."""
    family, count = config["model_type"], config["num_hidden_layers"]
    if family == "nemotron_h":
        listed = [_KINDS[kind] for kind in config.get("layers_block_type", ())]
        return listed or list(config["hybrid_override_pattern"])
    if family == "falcon_h1":
        return ["M*-"] * count
    if family == "bamba":
        attending = config["attn_layer_indices"]
        return ["*-" if index in attending else "M-" for index in range(count)]
    dense = count if family == "lfm2" else config.get("num_dense_layers", 0)
    if family == "granitemoehybrid" and not config["num_local_experts"]:
        dense = count
    letters = {"conv": "C", "mamba": "M"}
    return [
        letters.get(kind, "*") + ("-" if index < dense else "E")
        for index, kind in enumerate(config["layer_types"])
    ]


def mixer_shapes(config: Mapping[str, Any]) -> Shapes:
    """The shapes of all tensors of a checkpoint, by name."""
    family, hidden, vocab = (config[key] for key in ("model_type", "hidden_size", "vocab_size"))
    stem, first, second, last = _NAMES[family]
    table = "embeddings" if family == "nemotron_h" else "embed_tokens"
    shapes: Shapes = {f"{stem}{table}.weight": (vocab, hidden)}
    for index, kinds in enumerate(kinds_of(config)):
        layer = f"{stem}layers.{index}."
        shapes |= {f"{layer}{norm}.weight": (hidden,) for norm in (first, second) if norm}
        for kind in kinds:
            shapes |= _PARTS[kind](config, layer)
    shapes[f"{last}.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _linear(name: str, num_out: int, num_in: int, *, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (num_out, num_in)} | ({f"{name}.bias": (num_out,)} if bias else {})


def _module(config: Mapping[str, Any], own: str) -> str:
    return "mixer" if config["model_type"] == "nemotron_h" else own


def _attention(config: Mapping[str, Any], layer: str) -> Shapes:
    hidden, name = config["hidden_size"], f"{layer}{_module(config, 'self_attn')}"
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    attended, kv = (head * config[key] for key in ("num_attention_heads", "num_key_value_heads"))
    is_lfm2, bias = config["model_type"].startswith("lfm2"), config.get("attention_bias", False)
    shapes = _linear(f"{name}.q_proj", attended, hidden, bias=bias)
    for part in ("k", "v"):
        shapes |= _linear(f"{name}.{part}_proj", kv, hidden, bias=bias)
    shapes |= _linear(f"{name}.{'out' if is_lfm2 else 'o'}_proj", hidden, attended, bias=bias)
    norms = {f"{name}.{part}_layernorm.weight": (head,) for part in ("q", "k")}
    return shapes | (norms if is_lfm2 else {})


def _convolution(config: Mapping[str, Any], layer: str) -> Shapes:
    hidden, bias, name = config["hidden_size"], config.get("conv_bias", False), f"{layer}conv"
    conv = {f"{name}.conv.weight": (hidden, 1, config["conv_L_cache"])}
    conv |= {f"{name}.conv.bias": (hidden,)} if bias else {}
    first = _linear(f"{name}.in_proj", 3 * hidden, hidden, bias=bias)
    return conv | first | _linear(f"{name}.out_proj", hidden, hidden, bias=bias)


def scan_sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Heads, their size, groups, state size and taps."""
    keys = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    if config["model_type"] == "nemotron_h":
        keys = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    heads, dim, groups, state, taps = (config[key] for key in keys)
    return heads, dim, groups, state, taps


def _scan(config: Mapping[str, Any], layer: str) -> Shapes:
    hidden, name = config["hidden_size"], f"{layer}{_module(config, 'mamba')}"
    heads, dim, groups, state, taps = scan_sizes(config)
    inner, channels = heads * dim, heads * dim + 2 * groups * state
    biased = config.get("mamba_proj_bias", config.get("use_bias", False))
    out_biased = config.get("projectors_bias", biased)
    shapes = _linear(f"{name}.in_proj", inner + channels + heads, hidden, bias=biased)
    shapes |= _linear(f"{name}.out_proj", hidden, inner, bias=out_biased)
    shapes[f"{name}.conv1d.weight"] = (channels, 1, taps)
    if config.get("mamba_conv_bias", config.get("use_conv_bias")):
        shapes[f"{name}.conv1d.bias"] = (channels,)
    if config.get("mamba_rms_norm", True):
        shapes[f"{name}.norm.weight"] = (inner,)
    return shapes | {f"{name}.{part}": (heads,) for part in ("A_log", "D", "dt_bias")}


def _ffn(config: Mapping[str, Any], layer: str) -> Shapes:
    hidden, family = config["hidden_size"], config["model_type"]
    if family == "granitemoehybrid":
        return _granite_shared(config, layer)
    name, names, size = f"{layer}feed_forward", ("gate_proj", "up_proj"), ffn_size(config)
    down = "down_proj"
    if family.startswith("lfm2"):
        names, down = ("w1", "w3"), "w2"
    elif family == "nemotron_h":
        name, names = f"{layer}mixer", ("up_proj",)
    bias = config.get("mlp_bias", False)
    shapes = _linear(f"{name}.{down}", hidden, size, bias=bias)
    for part in names:
        shapes |= _linear(f"{name}.{part}", size, hidden, bias=bias)
    return shapes


def ffn_size(config: Mapping[str, Any]) -> int:
    """The size of a dense FFN; LFM2 may cut it to two thirds and round it up."""
    if not config.get("block_auto_adjust_ff_dim"):
        return int(config["intermediate_size"])
    size, step = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
    return -(-int(config["block_ffn_dim_multiplier"] * size) // step) * step


def _granite_shared(config: Mapping[str, Any], layer: str) -> Shapes:
    hidden, size = config["hidden_size"], config["shared_intermediate_size"]
    first = _linear(f"{layer}shared_mlp.input_linear", 2 * size, hidden)
    return first | _linear(f"{layer}shared_mlp.output_linear", hidden, size)


def _mixture(config: Mapping[str, Any], layer: str) -> Shapes:
    hidden, family = config["hidden_size"], config["model_type"]
    if family == "granitemoehybrid":
        count, size, name = config["num_local_experts"], config["intermediate_size"], "block"
        name = f"{layer}block_sparse_moe"
        return _granite_shared(config, layer) | {
            f"{name}.router.layer.weight": (count, hidden),
            f"{name}.input_linear.weight": (count, 2 * size, hidden),
            f"{name}.output_linear.weight": (count, hidden, size),
        }
    size = config["moe_intermediate_size"]
    if family == "lfm2_moe":
        name, count = f"{layer}feed_forward", config["num_experts"]
        shapes: Shapes = {f"{name}.gate.weight": (count, hidden), f"{name}.expert_bias": (count,)}
        for expert in range(count):
            shapes |= _linear(f"{name}.experts.{expert}.w1", size, hidden)
            shapes |= _linear(f"{name}.experts.{expert}.w3", size, hidden)
            shapes |= _linear(f"{name}.experts.{expert}.w2", hidden, size)
        return shapes
    name, count, latent = f"{layer}mixer", config["n_routed_experts"], config.get("moe_latent_size")
    shapes = {f"{name}.gate.{part}": (count,) for part in ("e_score_correction_bias",)}
    shapes[f"{name}.gate.weight"] = (count, hidden)
    for expert in range(count):
        shapes |= _linear(f"{name}.experts.{expert}.up_proj", size, latent or hidden)
        shapes |= _linear(f"{name}.experts.{expert}.down_proj", latent or hidden, size)
    if latent:
        shapes |= _linear(f"{name}.fc1_latent_proj", latent, hidden)
        shapes |= _linear(f"{name}.fc2_latent_proj", hidden, latent)
    shared = config["moe_shared_expert_intermediate_size"]
    shapes |= _linear(f"{name}.shared_experts.up_proj", shared, hidden)
    return shapes | _linear(f"{name}.shared_experts.down_proj", hidden, shared)


_PARTS = {"*": _attention, "C": _convolution, "M": _scan, "-": _ffn, "E": _mixture}
