"""Rows of hybrid families, with readers of their recurrent layers.

A reader of recurrences returns fields of HybridConfig (models/configs.py): the layers that attend,
the shape of the recurrent states, and how layers are built. Defaults of absent keys of a
`config.json` are those of transformers. No tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from outrider.core.errors import given
from outrider.core.spec import StateShape
from outrider.models import expert_kinds
from outrider.models import layer_kinds as kinds
from outrider.models.configs import Family, FamilyFile, HybridConfig, Mechanism, MixerTraits
from outrider.models.expert_kinds import Experts, deepseek_experts, renamed
from outrider.models.json_object import JsonObject, contradictory, unsupported
from outrider.models.layer_kinds import GATED_LAYERS, Gate, LayerTraits, Scales, of_kinds, one_rope
from outrider.models.rope_config import PARTIAL_ROPE, Rope, RopeRules


def _config(file: FamilyFile) -> HybridConfig:
    """The config of a hybrid. Raises CheckpointError, naming the key, for a bad value."""
    read = given(file.family.recurrences, "recurrences")
    return HybridConfig(**{**file.fields, **read(file.raw, file.fields["num_layers"])})


def _gated_traits(raw: JsonObject) -> LayerTraits:
    if raw.flag("attention_bias", default=False):
        raise unsupported(
            raw.where, f"attention_bias is not supported for model_type {raw.text('model_type')!r}"
        )
    return GATED_LAYERS


def _decoder() -> type[Any]:
    from outrider.plugins.hybrids.model import HybridModel

    return HybridModel


def delta_rules(raw: JsonObject, num_layers: int) -> Mapping[str, Any]:
    """Gated delta rules by `layer_types`, or in all but each `full_attention_interval`-th layer."""
    every = raw.integer("full_attention_interval", 4)
    attend = of_kinds(
        raw, num_layers, _LINEAR[:1], _FULL[:1], lambda index: (index + 1) % every == 0
    )
    attending = _attending(raw, attend)
    key_heads, heads = raw.integer("linear_num_key_heads"), raw.integer("linear_num_value_heads")
    _check_multiple(raw, ("linear_num_value_heads", heads), ("linear_num_key_heads", key_heads))
    key_dim, value_dim = raw.integer("linear_key_head_dim"), raw.integer("linear_value_head_dim")
    return {
        "attention_layers": attending,
        "tiled_values": raw.flag("linear_tiled_values", default=False),
        "delta": StateShape(
            num_layers=num_layers - len(attending),
            num_taps=raw.integer("linear_conv_kernel_dim", least=2),
            num_channels=2 * key_heads * key_dim + heads * value_dim,
            num_key_heads=key_heads,
            num_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
        ),
    }


_LINEAR, _FULL = ("linear_attention", "mamba"), ("full_attention", "attention")


def _attending(raw: JsonObject, attend: Sequence[bool]) -> tuple[int, ...]:
    attending = tuple(index for index, attends in enumerate(attend) if attends)
    if not attending:
        raise unsupported(raw.where, "no layer attends, which is not supported")
    return attending


def _check_multiple(raw: JsonObject, whole: tuple[str, int], part: tuple[str, int]) -> None:
    if whole[1] % part[1]:
        raise contradictory(
            raw.where, f"{whole[0]} {whole[1]} is not a multiple of {part[0]} {part[1]}"
        )


def short_convolutions(raw: JsonObject, num_layers: int) -> Mapping[str, Any]:
    """LFM2's gated short convolutions, in the layers that do not attend."""
    attend = of_kinds(raw, num_layers, ("conv",), _FULL[:1], _listed(raw, "full_attn_idxs", True))
    attending = _attending(raw, attend)
    biased = raw.flag("conv_bias", default=False)
    return {
        "attention_layers": attending,
        "mechanism": Mechanism.CONVOLUTION,
        "mixers": MixerTraits(in_bias=biased, conv_bias=biased, out_bias=biased),
        "delta": StateShape(
            num_layers=num_layers - len(attending),
            num_taps=raw.integer("conv_L_cache", 3, least=2),
            num_channels=raw.integer("hidden_size"),
            num_key_heads=0,
            num_heads=0,
            key_dim=0,
            value_dim=0,
        ),
    }


def _listed(raw: JsonObject, key: str, default: bool) -> Callable[[int], bool]:
    """True for the layers in the list `key`, or `default` for all if there is no list."""
    listed = raw.integers(key)
    return lambda index: index in listed if raw.has(key) else default


def lfm2_settings(raw: JsonObject) -> Mapping[str, object]:
    """Settings under LFM2's own keys; the FFN's size may be one to be cut and rounded up."""
    ffn = raw.integer("block_ff_dim", raw.integer("intermediate_size"))
    if raw.text("model_type") == "lfm2" and raw.flag("block_auto_adjust_ff_dim", default=True):
        ffn = int(raw.number("block_ffn_dim_multiplier", 1.0) * int(2 * ffn / 3))
        ffn += -ffn % raw.integer("block_multiple_of", 256)
    tied = raw.flag("tie_embedding", default=raw.flag("tie_word_embeddings", default=True))
    own = {"intermediate_size": ffn, "tie_word_embeddings": tied}
    return own | renamed(raw, _LFM2_KEYS)


_LFM2_KEYS = {
    "num_experts": "n_routed_experts",
    "num_dense_layers": "first_k_dense_replace",
    "use_expert_bias": "has_choice_bias",
}


def granite_scans(raw: JsonObject, num_layers: int) -> Mapping[str, Any]:
    """Mamba-2 in the layers of Granite 4 and Bamba that do not attend."""
    usual = _listed(raw, "attn_layer_indices", False)
    attending = _attending(raw, of_kinds(raw, num_layers, _LINEAR, _FULL, usual))
    biased = raw.flag("mamba_proj_bias", default=False)
    mixers = MixerTraits(
        in_bias=biased, conv_bias=raw.flag("mamba_conv_bias", default=True), out_bias=biased
    )
    own = {"attention_layers": attending, "mixers": mixers}
    return own | _scans(raw, num_layers - len(attending), raw.integer("hidden_size"))


def falcon_scans(raw: JsonObject, num_layers: int) -> Mapping[str, Any]:
    """Mamba-2 next to the attention of every layer of Falcon H1."""
    scales = raw.numbers("ssm_multipliers") if raw.has("ssm_multipliers") else ()
    if scales and len(scales) != _NUM_PARTS:
        raise contradictory(
            raw.where, f"ssm_multipliers has {len(scales)} numbers, not {_NUM_PARTS}"
        )
    mixers = MixerTraits(
        in_bias=raw.flag("mamba_proj_bias", default=False),
        conv_bias=raw.flag("mamba_conv_bias", default=True),
        out_bias=raw.flag("projectors_bias", default=False),
        has_norm=raw.flag("mamba_rms_norm", default=False),
        norm_first=raw.flag("mamba_norm_before_gate", default=True),
        in_scale=raw.number("ssm_in_multiplier", 1.0),
        part_scales=scales if set(scales) - {1.0} else (),
        out_scale=raw.number("ssm_out_multiplier", 1.0),
    )
    own = {"attention_layers": tuple(range(num_layers)), "parallel": True, "mixers": mixers}
    return own | _scans(raw, num_layers, raw.integer("hidden_size"))


def falcon_h1_traits(raw: JsonObject) -> LayerTraits:
    gates = raw.numbers("mlp_multipliers") if raw.has("mlp_multipliers") else (1.0, 1.0)
    if len(gates) != len(("gate", "down")):
        raise contradictory(raw.where, f"mlp_multipliers has {len(gates)} numbers, not 2")
    return LayerTraits(
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        logit_scale=raw.number("lm_head_multiplier", 1.0),
        scales=Scales(
            attention_in=raw.number("attention_in_multiplier", 1.0),
            key=raw.number("key_multiplier", 1.0),
            attended=raw.number("attention_out_multiplier", 1.0),
            gate=gates[0],
            fed=gates[1],
        ),
    )


# Parts of the first product of Mamba-2: z, x, B, C and the steps.
_NUM_PARTS = 5


def _scans(raw: JsonObject, num_recurrent: int, hidden_size: int) -> dict[str, Any]:
    """The states of `num_recurrent` Mamba-2 layers, by the keys of Granite's config.json."""
    _check_steps(raw)
    heads, groups = raw.integer("mamba_n_heads"), raw.integer("mamba_n_groups", 1)
    inner = raw.integer("mamba_d_ssm", raw.integer("mamba_expand", 2) * hidden_size)
    sized = raw.values.get("mamba_d_head", "auto") != "auto"
    dim = raw.integer("mamba_d_head") if sized else max(1, inner // heads)
    if heads * dim != inner:
        raise contradictory(
            raw.where,
            f"mamba_n_heads {heads} of mamba_d_head {dim} are not the {inner} "
            "channels of the layer",
        )
    _check_multiple(raw, ("mamba_n_heads", heads), ("mamba_n_groups", groups))
    state = raw.integer("mamba_d_state")
    return {
        "mechanism": Mechanism.MAMBA,
        "delta": StateShape(
            num_layers=num_recurrent,
            num_taps=raw.integer("mamba_d_conv", 4, least=2),
            num_channels=inner + 2 * groups * state,
            num_key_heads=groups,
            num_heads=heads,
            key_dim=state,
            value_dim=dim,
        ),
    }


def _check_steps(raw: JsonObject) -> None:
    """Raise CheckpointError for bounds of the steps. Files write infinity as a number or object."""
    if not isinstance(found := raw.values.get("time_step_limit"), list):
        return
    limits = cast("list[object]", found)
    least, *others = limits
    if least or any(isinstance(one, int | float) and one < math.inf for one in others):
        raise unsupported(raw.where, f"time_step_limit {limits!r:.60} is not supported")


def no_rope(raw: JsonObject, rules: RopeRules, windows: Sequence[int]) -> Sequence[Rope | None]:
    del raw, rules
    return [None] * len(windows)


def granite_rope(
    raw: JsonObject, rules: RopeRules, windows: Sequence[int]
) -> Sequence[Rope | None]:
    """One rope if `position_embedding_type` says so; Granite's hybrids have none."""
    is_rope = raw.text("position_embedding_type", "none") == "rope"
    return (one_rope if is_rope else no_rope)(raw, rules, windows)


def granite_settings(raw: JsonObject) -> Mapping[str, object]:
    """The size of the FFN of a Granite without experts: that of the shared one."""
    if raw.integer("num_local_experts", least=0):
        return {}
    return {"intermediate_size": raw.integer("shared_intermediate_size", 1024)}


def nemotron_layers(raw: JsonObject, num_layers: int) -> Mapping[str, Any]:
    """Layers of Nemotron H, each of one kind: attention, Mamba-2, a dense FFN or a mixture."""
    kinds = _nemotron_kinds(raw)[:num_layers]
    if raw.text("mamba_hidden_act", "silu") != "silu":
        raise unsupported(
            raw.where, f"mamba_hidden_act {raw.text('mamba_hidden_act')!r} is not supported"
        )
    biased = raw.flag("use_bias", default=False)
    conv_bias = raw.flag("use_conv_bias", default=raw.flag("mamba_conv_bias", default=True))
    own = {
        "attention_layers": _attending(raw, [kind == "*" for kind in kinds]),
        "ffn_layers": tuple(i for i, kind in enumerate(kinds) if kind in "-E"),
        "sparse_layers": tuple(i for i, kind in enumerate(kinds) if kind == "E"),
        "mixers": MixerTraits(in_bias=biased, conv_bias=conv_bias, out_bias=biased),
    }
    return own | _scans(raw, kinds.count("M"), raw.integer("hidden_size"))


_NEMOTRON_KINDS = {
    **dict.fromkeys(_LINEAR, "M"),
    **dict.fromkeys(_FULL, "*"),
    "mlp": "-",
    "moe": "E",
}


def _nemotron_kinds(raw: JsonObject) -> str:
    """The kind of each layer: M, *, - or E."""
    keys = ("layers_block_type", "layer_types")
    listed = next((raw.texts(key) for key in keys if raw.has(key)), ())
    pattern = raw.text("hybrid_override_pattern", "ME*-")
    kinds = [_NEMOTRON_KINDS.get(name, name) for name in listed] or list(pattern)
    if unknown := sorted(set(kinds) - {*"M*-E"}):
        raise unsupported(raw.where, f"layers of kind {unknown[0]!r:.40} are not supported")
    return "".join(kinds)


def nemotron_settings(raw: JsonObject) -> Mapping[str, object]:
    """Settings of Nemotron H under the keys of other families."""
    heads, dim = raw.integer("mamba_num_heads"), raw.integer("mamba_head_dim")
    sizes = {"mamba_n_heads": heads, "mamba_d_head": dim, "mamba_d_ssm": heads * dim}
    own: dict[str, object] = {"num_hidden_layers": len(_nemotron_kinds(raw)), **sizes}
    return own | renamed(raw, _NEMOTRON_KEYS)


_NEMOTRON_KEYS = {
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}


def nemotron_experts(raw: JsonObject) -> Experts | None:
    """The mixture of Nemotron H, whose experts have no gate and may work in a smaller space."""
    if "E" not in _nemotron_kinds(raw):
        return None
    return replace(
        deepseek_experts(raw),
        gate=Gate.SQUARED,
        latent_size=raw.integer("moe_latent_size", 0, least=0),
    )


_QWEN_HYBRID = Family(
    {
        "partial_rotary_factor": 0.25,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 0,
        "shared_expert_intermediate_size": 512,
    },
    {"mlp_bias": False},
    rope=PARTIAL_ROPE,
    traits=_gated_traits,
    experts=expert_kinds.qwen_experts,
    recurrences=delta_rules,
    qk_norm=True,
)


_SCANS = {"mamba_n_heads": 128, "mamba_d_state": 256, "eos_token_id": 2}
_FALCON_NAMES = {
    "model.norm.": "model.final_layernorm.",
    "post_attention_layernorm.": "pre_ff_layernorm.",
    "mlp.": "feed_forward.",
}
_LFM2 = Family(
    {
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "eos_token_id": 2,
    },
    windows=kinds.in_all_layers,
    recurrences=short_convolutions,
    derived=lfm2_settings,
    qk_norm=True,
    norm_key="norm_eps",
    names={
        "model.norm.": "model.embedding_norm.",
        "input_layernorm.": "operator_norm.",
        "post_attention_layernorm.": "ffn_norm.",
        "self_attn.q_norm.": "self_attn.q_layernorm.",
        "self_attn.k_norm.": "self_attn.k_layernorm.",
        "self_attn.o_proj.": "self_attn.out_proj.",
        "gate_proj.": "w1.",
        "up_proj.": "w3.",
        "down_proj.": "w2.",
        "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
        "mlp.": "feed_forward.",
    },
)


def _hybrid(**defaults: object) -> Family:
    return replace(_QWEN_HYBRID, defaults={**_QWEN_HYBRID.defaults, **defaults})


_ROWS: Mapping[str, Family] = {
    "qwen3_next": _hybrid(
        intermediate_size=5632, num_experts=512, num_experts_per_tok=10, decoder_sparse_step=1
    ),
    "qwen3_5_text": _hybrid(num_key_value_heads=4),
    "qwen3_5_moe_text": _hybrid(num_experts=256, num_experts_per_tok=8),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        defaults={
            **_LFM2.defaults,
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_dense_layers": 2,
            "use_expert_bias": True,
        },
        experts=expert_kinds.deepseek_experts,
    ),
    "granitemoehybrid": Family(
        {**_SCANS, "num_local_experts": 8, "num_experts_per_tok": 2},
        ropes=granite_rope,
        traits=kinds.granite_traits,
        experts=expert_kinds.granite_experts,
        recurrences=granite_scans,
        derived=granite_settings,
        fused_tensors=True,
        names={
            "mlp.gate_up_proj.": "shared_mlp.input_linear.",
            "mlp.down_proj.": "shared_mlp.output_linear.",
        },
    ),
    "bamba": Family(
        {**_SCANS, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        rope=PARTIAL_ROPE,
        recurrences=granite_scans,
        names=_FALCON_NAMES,
    ),
    "falcon_h1": Family(
        {**_SCANS, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        traits=falcon_h1_traits,
        recurrences=falcon_scans,
        names=_FALCON_NAMES,
    ),
    "nemotron_h": Family(
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "eos_token_id": 2,
        },
        ropes=no_rope,
        traits=kinds.always(kinds.LayerTraits(norms=kinds.Norms.PARALLEL, gate=kinds.Gate.SQUARED)),
        experts=nemotron_experts,
        recurrences=nemotron_layers,
        derived=nemotron_settings,
        activation_key="mlp_hidden_act",
        activations=("relu2",),
        norm_key="layer_norm_epsilon",
        names={
            "model.norm.": "backbone.norm_f.",
            "model.embed_tokens.": "backbone.embeddings.",
            "model.layers.": "backbone.layers.",
            "input_layernorm.": "norm.",
            "self_attn.": "mixer.",
            "mamba.": "mixer.",
            "mlp.": "mixer.",
        },
    ),
}
FAMILIES = {
    name: replace(row, config=_config, decoder=_decoder, has_mtp=row.recurrences is delta_rules)
    for name, row in _ROWS.items()
}
# Models that also see, by the family of the text model within.
WRAPPERS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
