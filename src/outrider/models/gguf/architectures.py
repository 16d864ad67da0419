"""Architectures of GGUF files, with a row for each: settings, and names and layouts of tensors.

A new architecture is a row: the family that computes it, the parts that make its config.json
(config.py has those of all, settings.py the others), and the names of its tensors in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.core.errors import CheckpointError
from outrider.models.gguf import gemma4, settings
from outrider.models.gguf.config import Architecture, Part, Positions, Sizes, layered
from outrider.models.gguf.reader import Header
from outrider.models.gguf.tensor_names import (
    AFTER,
    AROUND,
    DEEPSEEK,
    DRAFTER_OUTER,
    EXPERT_NAMES,
    FFN,
    LATENT,
    LLAMA_LAYER,
    LLAMA_OUTER,
    MTP,
    NO_NORMS_BEFORE,
    NUMBERED_MTP,
    ONCE,
    ROUTED,
    SCANS,
    SHARED,
    SOME_LATENT,
)
from outrider.models.json_object import JsonObject

_EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_LAYERED, _WINDOW, _SWITCHED_WINDOW = (
    Part(layered),
    Part(settings.window),
    Part(settings.switched_window),
)
_EXPERTS = Part(settings.experts, _EXPERT_KEYS)
_GROUPS = Part(settings.groups, ("expert_group_count", "expert_group_used_count"))
_TEMPERATURE = Part(settings.temperature, ("attention.temperature_scale",))
_SCALES = Part(settings.scales, tuple(key for key, _ in settings.SCALES))
# Parts of a head that turn with time, height and width: all the same for text.
_SECTIONS = Part(lambda _: {}, ("rope.dimension_sections", "n_deepstack_layers"))
_RECURRENT = Part(
    settings.recurrences,
    (
        "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank",
        "ssm.inner_size", "full_attention_interval", "attention.recurrent_layers",
        "nextn_predict_layers",
    ),
)  # fmt: skip
_HYBRID_EXPERTS = Part(
    lambda sizes: {**settings.experts(sizes), **settings.shared_expert_of(sizes)},
    (*_EXPERT_KEYS, "expert_shared_feed_forward_length"),
)
_HYBRID: Mapping[str, Any] = {
    "names": {
        **SHARED,
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt": "linear_attn.dt_bias",
        "ssm_a": "linear_attn.A_log",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        **MTP,
    },
    "absent": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm"),
    "above_one": True,
    "turns_in_part": True,
    "mtp": True,
}


def _row(
    family: str, *parts: Part, names: Mapping[str, str] | None = None, **traits: Any
) -> Architecture:
    """An architecture with the layers of a Llama, but for `names` and `traits`."""
    own = {**LLAMA_LAYER, **(names or {})}
    traits = {"outer": LLAMA_OUTER, **traits}
    return Architecture(family=family, parts=(_LAYERED, *parts), names=own, **traits)


_GRANITE = _row(
    "granite",
    _SCALES,
    Part(settings.granite_mixture, _EXPERT_KEYS),
    names={
        **ROUTED,
        **{f"{part}_shexp": f"mlp.shared_expert.{part[4:]}_proj" for part in FFN},
    },
    paired=True,
)
_CONVOLUTIONS = Part(
    settings.short_convolutions, ("shortconv.l_cache", "attention.recurrent_layers")
)
_LFM2_NAMES = {f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")}
_LFM2: Mapping[str, Any] = {
    "names": {**DEEPSEEK, **_LFM2_NAMES},
    "outer": {**LLAMA_OUTER, "token_embd_norm": "model.norm"},
    "absent": (*ONCE, *_LFM2_NAMES, *DEEPSEEK),
    "uneven": True,
}
_NEMOTRON_H = _row(
    "nemotron_h",
    Part(
        settings.nemotron_h,
        (*settings.SCAN_KEYS, *settings.ROUTED_KEYS, "moe_latent_size", "nextn_predict_layers"),
    ),
    names={
        **DEEPSEEK,
        **SCANS,
        **MTP,
        "ffn_latent_down": "mlp.fc1_latent_proj",
        "ffn_latent_up": "mlp.fc2_latent_proj",
    },
    absent=(
        *ONCE,
        *SCANS,
        *DEEPSEEK,
        *MTP,
        "ffn_latent_down",
        "ffn_latent_up",
    ),
    uneven=True,
    # Its MTP block is not read.
    mtp=True,
)
_DEEPSEEK2 = _row(
    "deepseek_v3",
    Part(settings.latent_mixture, settings.ROUTED_KEYS),
    Part(settings.latent, settings.LATENT_KEYS),
    names={**LATENT, **NUMBERED_MTP},
    positions=Positions(log_factor="rope.scaling.yarn_log_multiplier"),
    absent=SOME_LATENT,
    numbered_mtp=True,
    latent=True,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _row(
        "llama",
        Part(settings.mistral_window),
        Part(settings.mixtral, _EXPERT_KEYS),
        names=ROUTED,
        paired=True,
    ),
    "qwen2": _row("qwen2", _SWITCHED_WINDOW, qkv_bias=True),
    "qwen3": _row("qwen3", _SWITCHED_WINDOW),
    "phi3": _row("phi3", _WINDOW, absent=("ffn_gate",), positions=Positions(has_factors=True)),
    "gpt2": Architecture(
        family="gpt2",
        parts=(Part(settings.gpt2),),
        names={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        outer={
            "token_embd": "wte",
            "position_embd": "wpe",
            "output_norm": "ln_f",
            "output": "lm_head",
        },
        stem="h.",
        absent=("ffn_gate",),
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "qwen2moe": _row(
        "qwen2_moe",
        _SWITCHED_WINDOW,
        _EXPERTS,
        Part(settings.shared_expert, ("expert_shared_feed_forward_length",)),
        names=SHARED,
        qkv_bias=True,
    ),
    "qwen3moe": _row(
        "qwen3_moe",
        _SWITCHED_WINDOW,
        _EXPERTS,
        names=ROUTED,
        settings={"norm_topk_prob": True},
    ),
    "gemma2": _row(
        "gemma2",
        settings.mixed_windows(4096),
        settings.soft_cap("attn"),
        settings.soft_cap("final"),
        settings.gemma_scale(46),
        names=AROUND,
        settings={"hidden_activation": "gelu_pytorch_tanh"},
        positions=Positions(by_kind=True),
        above_one=True,
    ),
    "gemma3": _row(
        "gemma3_text",
        settings.mixed_windows(0),
        settings.soft_cap("final"),
        settings.gemma_scale(62),
        names=AROUND,
        settings={"hidden_activation": "gelu_pytorch_tanh"},
        positions=Positions(by_kind=True, stretches_local=False, local_theta=10000.0),
        above_one=True,
    ),
    "gemma4": gemma4.architecture({**LLAMA_LAYER, **AROUND}, LLAMA_OUTER),
    "gemma4-assistant": gemma4.assistant({**LLAMA_LAYER, **AROUND}, LLAMA_OUTER),
    "gemma": _row("gemma", settings.activation("gelu_pytorch_tanh"), above_one=True),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "muse-glimmer": _row(
        "muse_glimmer_text",
        settings.mixed_windows(None),
        settings.soft_cap("final"),
        Part(settings.muse, ("logit_scale",)),
        names={**AROUND, "attn_gate": "self_attn.gate_proj"},
    ),
    "granite_swa": _row(
        "granite_swa",
        _SCALES,
        settings.mixed_windows(None),
        Part(
            settings.granite_swa,
            (*_EXPERT_KEYS, "expert_shared_feed_forward_length", "attention.rope_pattern"),
        ),
        names={
            **ROUTED,
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
            "attn_sinks": "self_attn.sinks",
        },
        paired=True,
    ),
    "minicpm": _row("granite", _SCALES, paired=True),
    "internlm2": _row("llama", paired=True),
    "xverse": _row("llama", paired=True),
    "exaone": _row("llama"),
    "pangu-embedded": _row("llama"),
    "orion": _row("orion", settings.centred("layer_norm_eps")),
    "stablelm": _row(
        "stablelm",
        settings.centred("layer_norm_eps"),
        Part(settings.stablelm),
        turns_in_part=True,
        out_bias=False,
    ),
    "apertus": _row(
        "apertus",
        Part(settings.xielu),
        settings.activation("xielu"),
        absent=("ffn_gate",),
        positions=Positions(is_silent=True),
    ),
    "hunyuan-dense": _row("hunyuan_v1_dense"),
    "hunyuan_vl": _row("hunyuan_v1_dense", _SECTIONS),
    "hunyuan-moe": _row(
        "hunyuan_v1_moe",
        Part(settings.hunyuan, (*_EXPERT_KEYS, "expert_shared_feed_forward_length")),
        names=DEEPSEEK,
        absent=("exp_probs_b",),
    ),
    "maincoder": _row("maincoder"),
    "exaone-moe": _row(
        "exaone_moe",
        settings.mixed_windows(128),
        settings.routed(has_sigmoids=True),
        _GROUPS,
        Part(settings.mtp_blocks, ("nextn_predict_layers",)),
        names={**DEEPSEEK, **NUMBERED_MTP},
        absent=(*FFN, *DEEPSEEK, *NUMBERED_MTP),
        numbered_mtp=True,
    ),
    "afmoe": _row(
        "afmoe",
        settings.mixed_windows(0),
        settings.routed(has_sigmoids=True),
        names={**DEEPSEEK, **AROUND, "attn_gate": "self_attn.gate_proj"},
        settings={"mup_enabled": True},
    ),
    "bailingmoe2": _row(
        "bailing_moe_v2",
        settings.routed(has_sigmoids=True),
        _GROUPS,
        Part(settings.mtp_blocks, ("nextn_predict_layers",)),
        names={**DEEPSEEK, **NUMBERED_MTP, "layer_output_norm": "final_layernorm"},
        turns_in_part=True,
        numbered_mtp=True,
    ),
    "hy_v3": _row(
        "hy_v3",
        settings.routed(has_sigmoids=True),
        Part(settings.mtp_blocks, ("nextn_predict_layers",)),
        names={**DEEPSEEK, **NUMBERED_MTP},
        absent=(*FFN, *DEEPSEEK, *NUMBERED_MTP),
        numbered_mtp=True,
    ),
    "chatglm": _row("glm", absent=("ffn_gate",), turns_in_part=True, out_bias=False),
    "paddleocr": _row("paddleocr_vl_text", _SECTIONS),
    "qwen": _row("qwen", Part(settings.halved_ffn), qkv_bias=True),
    "olmo2": _row(
        "olmo2",
        Part(settings.olmo3, ("attention.sliding_window_pattern", "rope.freq_base_swa")),
        names=AFTER,
        absent=NO_NORMS_BEFORE,
        positions=Positions(by_kind=True, stretches_local=False, in_windows=True),
    ),
    "olmoe": _row("olmoe", _EXPERTS, names=ROUTED),
    "exaone4": _row("exaone4", settings.mixed_windows(0), names=AFTER, absent=NO_NORMS_BEFORE),
    "cohere2": _row(
        "cohere2",
        settings.mixed_windows(4096),
        Part(settings.cohere, ("logit_scale",)),
        settings.centred("layer_norm_eps"),
        absent=("ffn_norm",),
    ),
    "command-r": _row(
        "cohere",
        Part(settings.cohere, ("logit_scale",)),
        settings.centred("layer_norm_eps"),
        absent=("ffn_norm",),
    ),
    "seed_oss": _row(
        "seed_oss",
        Part(settings.seed_oss),
        names={"post_attention_norm": "post_attention_layernorm"},
        absent=("ffn_norm",),
    ),
    "mistral3": _row("ministral3", _TEMPERATURE, paired=True),
    "qwen2vl": _row("qwen2", _SWITCHED_WINDOW, _SECTIONS, qkv_bias=True),
    "qwen3vl": _row("qwen3", _SECTIONS),
    "qwen3vlmoe": _row(
        "qwen3_moe", _EXPERTS, _SECTIONS, names=ROUTED, settings={"norm_topk_prob": True}
    ),
    "mellum": _row(
        "mellum",
        settings.mixed_windows(0),
        _EXPERTS,
        names=ROUTED,
        positions=Positions(by_kind=True),
    ),
    "deepseek": _row("deepseek", settings.routed(has_sigmoids=False), names=DEEPSEEK, paired=True),
    "deepseek2": _DEEPSEEK2,
    "mistral4": replace(_DEEPSEEK2, parts=(*_DEEPSEEK2.parts, _TEMPERATURE)),
    "dots1": _row("dots1", settings.routed(has_sigmoids=True), names=DEEPSEEK),
    "bailingmoe": _row(
        "deepseek",
        settings.routed(has_sigmoids=False, has_dense=False),
        names=DEEPSEEK,
        paired=True,
    ),
    "glm4moe": _row(
        "glm4_moe",
        settings.routed(has_sigmoids=True),
        Part(settings.glm4_moe, ("rope.dimension_sections", "nextn_predict_layers")),
        turns_in_part=True,
        out_bias=False,
        names={
            **DEEPSEEK,
            **NUMBERED_MTP,
            "post_attention_norm": "post_attention_layernorm",
        },
        absent=("ffn_norm", *NUMBERED_MTP),
        numbered_mtp=True,
    ),
    "minimax-m2": _row(
        "minimax_m2",
        settings.routed(has_sigmoids=True, normalises=True),
        names=DEEPSEEK,
        turns_in_part=True,
    ),
    "phi2": _row(
        "phi",
        settings.activation("gelu_new"),
        settings.centred("layer_norm_eps"),
        absent=("ffn_gate", "ffn_norm"),
        turns_in_part=True,
    ),
    "gptneox": _row(
        "gpt_neox",
        Part(settings.neox, ("use_parallel_residual",)),
        settings.centred("layer_norm_eps"),
        absent=("ffn_gate",),
        turns_in_part=True,
    ),
    "falcon": _row(
        "falcon",
        Part(settings.falcon),
        settings.centred("layer_norm_epsilon"),
        names={"attn_norm_2": "ln_attn"},
        absent=("ffn_gate", "ffn_norm", "attn_norm_2"),
    ),
    "olmo": _row(
        "olmo",
        Part(settings.clip, ("attention.clamp_kqv",)),
        absent=("attn_norm", "ffn_norm"),
        paired=True,
    ),
    "jais2": _row(
        "jais2",
        settings.activation("relu2"),
        settings.centred("layer_norm_eps"),
        absent=("ffn_gate",),
    ),
    "codeshell": _row(
        "codeshell",
        settings.activation("gelu_new"),
        settings.centred("layer_norm_epsilon"),
        absent=("ffn_gate",),
    ),
    "arcee": _row("arcee", settings.activation("relu2"), paired=True, absent=("ffn_gate",)),
    "nemotron": _row(
        "nemotron",
        settings.activation("relu2"),
        settings.centred("norm_eps"),
        absent=("ffn_gate",),
        above_one=True,
        turns_in_part=True,
    ),
    "starcoder2": _row(
        "starcoder2",
        _WINDOW,
        settings.activation("gelu_pytorch_tanh"),
        settings.centred("norm_epsilon"),
        absent=("ffn_gate",),
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "plamo": _row("plamo", absent=("ffn_norm",)),
    "glm4": _row(
        "glm4",
        _SECTIONS,
        names=AROUND,
        absent=("ffn_gate",),
        turns_in_part=True,
        out_bias=False,
    ),
    "ernie4_5": _row("ernie4_5", _SECTIONS),
    "ernie4_5-moe": _row(
        "ernie4_5_moe",
        settings.routed(has_sigmoids=False, normalises=True),
        names=DEEPSEEK,
    ),
    "qwen35": _row("qwen3_5_text", _RECURRENT, _SECTIONS, **_HYBRID, tiled=True),
    "qwen35moe": _row(
        "qwen3_5_moe_text", _RECURRENT, _SECTIONS, _HYBRID_EXPERTS, **_HYBRID, tiled=True
    ),
    "qwen3next": _row(
        "qwen3_next", _RECURRENT, _HYBRID_EXPERTS, **_HYBRID, settings={"norm_topk_prob": True}
    ),
    "eagle3": Architecture(
        family="llama",
        parts=(_LAYERED, settings.EAGLE3),
        names={**LLAMA_LAYER, "attn_norm_2": "hidden_norm"},
        outer={**DRAFTER_OUTER, "enc.output_norm": "input_norm"},
        stem="layers.",
        paired=True,
        drafts=True,
    ),
    "dflash": Architecture(
        family="qwen3",
        parts=(_LAYERED, settings.DFLASH),
        names={
            **LLAMA_LAYER,
            "attn_conv_base": "attention_conv.base_kernel",
            "attn_conv_proj": "attention_conv.kernel_projection",
            "ffn_conv_base": "mlp_conv.base_kernel",
            "ffn_conv_proj": "mlp_conv.kernel_projection",
        },
        outer={
            **DRAFTER_OUTER,
            "enc.output_norm": "hidden_norm",
            "markov_w1": "markov_head.markov_w1",
            "markov_w2": "markov_head.markov_w2",
            "conf_proj": "confidence_head.proj",
            "selector_predecessor": "candidate_selector.predecessor_codebook",
            "selector_successor": "candidate_selector.successor_codebook",
            "selector_hidden": "candidate_selector.hidden_projection",
        },
        stem="layers.",
        drafts=True,
    ),
    "lfm2": _row("lfm2", _WINDOW, _CONVOLUTIONS, **_LFM2),
    "lfm2moe": _row(
        "lfm2_moe",
        settings.routed(has_sigmoids=True),
        _CONVOLUTIONS,
        # Whatever the file says.
        Part(lambda _: {"norm_topk_prob": True}),
        **_LFM2,
    ),
    "granitehybrid": _row(
        "granitemoehybrid",
        _SCALES,
        Part(settings.scans, settings.SCAN_KEYS),
        Part(settings.granite_hybrid, (*_EXPERT_KEYS, "expert_shared_feed_forward_length")),
        names={**_GRANITE.names, **SCANS},
        absent=(*ONCE, *SCANS),
        paired=True,
        uneven=True,
    ),
    "falcon-h1": _row(
        "falcon_h1",
        Part(settings.scans, settings.SCAN_KEYS),
        Part(settings.falcon_h1),
        names=SCANS,
        absent=(*ONCE, *SCANS),
        positions=Positions(ignores_factors=True),
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "smollm3": _row("smollm3", _WINDOW, paired=True),
    "gpt-oss": _row(
        "gpt_oss",
        settings.mixed_windows(None),
        Part(settings.experts_alone, _EXPERT_KEYS),
        names={
            **EXPERT_NAMES,
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
        },
        positions=Positions(by_kind=True, is_yarn=True),
        absent=("ffn_norm",),
    ),
}


def sizes_of(header: Header) -> Sizes:
    """The settings of a file. Raises CheckpointError if its architecture is not supported."""
    found = JsonObject(str(header.path), header.metadata).text("general.architecture")
    if found not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: GGUF files of architecture {found!r} are not supported.",
            hint=f"supported: {', '.join(ARCHITECTURES)}. The folder with safetensors that the "
            "file was made from may run; `outrider models pull` fetches it",
        )
    return Sizes(header, found, ARCHITECTURES[found])


def first_missing(sizes: Sizes) -> str | None:
    """The GGUF name of the first missing tensor that models of this kind have; None if none."""
    row, entries = sizes.row, sizes.header.entries
    stored = {name.split(".")[2] for name in entries if name.startswith("blk.")}
    own = {part for part, name in row.names.items() if LLAMA_LAYER.get(part) != name}
    if not any(part.endswith("_exps") for part in stored):
        own = {part for part in own if "_exps" not in part and "_shexp" not in part}
        own -= {"ffn_gate_inp", "ffn_gate_inp_shexp"}
    parts = {"attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", *own}
    if not any(part.endswith("_exps") for part in own):
        parts |= {*FFN}
    if "attn_qkv" in stored:
        parts = parts - {"attn_q", "attn_k", "attn_v"} | {"attn_qkv"}
    parts -= {*row.absent}
    num_layers = sizes.integer("block_count")
    names = ["token_embd.weight"]
    names += [f"blk.{n}.{part}.weight" for n in range(num_layers) for part in sorted(parts)]
    return next((name for name in [*names, "output_norm.weight"] if name not in entries), None)
