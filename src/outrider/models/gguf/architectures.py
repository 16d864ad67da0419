"""Architectures of GGUF files, with a row for each: settings, and names and layouts of tensors.

A new architecture is a row: the family that computes it, the parts that make its config.json
(config.py has those of all, settings.py the others), and the names of its tensors in checkpoints.
Modules `architectures` of plugins have further rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from outrider.core.errors import CheckpointError
from outrider.core.plugins import plugin_modules
from outrider.models.gguf import gemma4, settings
from outrider.models.gguf.config import Architecture, Part, Positions, Sizes, layered
from outrider.models.gguf.reader import Header
from outrider.models.gguf.tensor_names import (
    AFTER,
    AROUND,
    DEEPSEEK,
    EXPERT_NAMES,
    FFN,
    LATENT,
    LLAMA_LAYER,
    LLAMA_OUTER,
    NO_NORMS_BEFORE,
    NUMBERED_MTP,
    ROUTED,
    SHARED,
    SOME_LATENT,
)
from outrider.models.json_object import JsonObject

EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
LAYERED, WINDOW, _SWITCHED_WINDOW = (
    Part(layered),
    Part(settings.window),
    Part(settings.switched_window),
)
_EXPERTS = Part(settings.experts, EXPERT_KEYS)
_GROUPS = Part(settings.groups, ("expert_group_count", "expert_group_used_count"))
_TEMPERATURE = Part(settings.temperature, ("attention.temperature_scale",))
SCALES = Part(settings.scales, tuple(key for key, _ in settings.SCALES))
# Parts of a head that turn with time, height and width: all the same for text.
SECTIONS = Part(lambda _: {}, ("rope.dimension_sections", "n_deepstack_layers"))


def row(
    family: str, *parts: Part, names: Mapping[str, str] | None = None, **traits: Any
) -> Architecture:
    """An architecture with the layers of a Llama, but for `names` and `traits`."""
    own = {**LLAMA_LAYER, **(names or {})}
    traits = {"outer": LLAMA_OUTER, **traits}
    return Architecture(family=family, parts=(LAYERED, *parts), names=own, **traits)


GRANITE = row(
    "granite",
    SCALES,
    Part(settings.granite_mixture, EXPERT_KEYS),
    names={
        **ROUTED,
        **{f"{part}_shexp": f"mlp.shared_expert.{part[4:]}_proj" for part in FFN},
    },
    paired=True,
)
_DEEPSEEK2 = row(
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
    "llama": row(
        "llama",
        Part(settings.mistral_window),
        Part(settings.mixtral, EXPERT_KEYS),
        names=ROUTED,
        paired=True,
    ),
    "qwen2": row("qwen2", _SWITCHED_WINDOW, qkv_bias=True),
    "qwen3": row("qwen3", _SWITCHED_WINDOW),
    "phi3": row("phi3", WINDOW, absent=("ffn_gate",), positions=Positions(has_factors=True)),
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
    "qwen2moe": row(
        "qwen2_moe",
        _SWITCHED_WINDOW,
        _EXPERTS,
        Part(settings.shared_expert, ("expert_shared_feed_forward_length",)),
        names=SHARED,
        qkv_bias=True,
    ),
    "qwen3moe": row(
        "qwen3_moe",
        _SWITCHED_WINDOW,
        _EXPERTS,
        names=ROUTED,
        settings={"norm_topk_prob": True},
    ),
    "gemma2": row(
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
    "gemma3": row(
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
    "gemma": row("gemma", settings.activation("gelu_pytorch_tanh"), above_one=True),
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "muse-glimmer": row(
        "muse_glimmer_text",
        settings.mixed_windows(None),
        settings.soft_cap("final"),
        Part(settings.muse, ("logit_scale",)),
        names={**AROUND, "attn_gate": "self_attn.gate_proj"},
    ),
    "granite_swa": row(
        "granite_swa",
        SCALES,
        settings.mixed_windows(None),
        Part(
            settings.granite_swa,
            (*EXPERT_KEYS, "expert_shared_feed_forward_length", "attention.rope_pattern"),
        ),
        names={
            **ROUTED,
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
            "attn_sinks": "self_attn.sinks",
        },
        paired=True,
    ),
    "minicpm": row("granite", SCALES, paired=True),
    "internlm2": row("llama", paired=True),
    "xverse": row("llama", paired=True),
    "exaone": row("llama"),
    "pangu-embedded": row("llama"),
    "orion": row("orion", settings.centred("layer_norm_eps")),
    "stablelm": row(
        "stablelm",
        settings.centred("layer_norm_eps"),
        Part(settings.stablelm),
        turns_in_part=True,
        out_bias=False,
    ),
    "apertus": row(
        "apertus",
        Part(settings.xielu),
        settings.activation("xielu"),
        absent=("ffn_gate",),
        positions=Positions(is_silent=True),
    ),
    "hunyuan-dense": row("hunyuan_v1_dense"),
    "hunyuan_vl": row("hunyuan_v1_dense", SECTIONS),
    "hunyuan-moe": row(
        "hunyuan_v1_moe",
        Part(settings.hunyuan, (*EXPERT_KEYS, "expert_shared_feed_forward_length")),
        names=DEEPSEEK,
        absent=("exp_probs_b",),
    ),
    "maincoder": row("maincoder"),
    "exaone-moe": row(
        "exaone_moe",
        settings.mixed_windows(128),
        settings.routed(has_sigmoids=True),
        _GROUPS,
        Part(settings.mtp_blocks, ("nextn_predict_layers",)),
        names={**DEEPSEEK, **NUMBERED_MTP},
        absent=(*FFN, *DEEPSEEK, *NUMBERED_MTP),
        numbered_mtp=True,
    ),
    "afmoe": row(
        "afmoe",
        settings.mixed_windows(0),
        settings.routed(has_sigmoids=True),
        names={**DEEPSEEK, **AROUND, "attn_gate": "self_attn.gate_proj"},
        settings={"mup_enabled": True},
    ),
    "bailingmoe2": row(
        "bailing_moe_v2",
        settings.routed(has_sigmoids=True),
        _GROUPS,
        Part(settings.mtp_blocks, ("nextn_predict_layers",)),
        names={**DEEPSEEK, **NUMBERED_MTP, "layer_output_norm": "final_layernorm"},
        turns_in_part=True,
        numbered_mtp=True,
    ),
    "hy_v3": row(
        "hy_v3",
        settings.routed(has_sigmoids=True),
        Part(settings.mtp_blocks, ("nextn_predict_layers",)),
        names={**DEEPSEEK, **NUMBERED_MTP},
        absent=(*FFN, *DEEPSEEK, *NUMBERED_MTP),
        numbered_mtp=True,
    ),
    "chatglm": row("glm", absent=("ffn_gate",), turns_in_part=True, out_bias=False),
    "paddleocr": row("paddleocr_vl_text", SECTIONS),
    "qwen": row("qwen", Part(settings.halved_ffn), qkv_bias=True),
    "olmo2": row(
        "olmo2",
        Part(settings.olmo3, ("attention.sliding_window_pattern", "rope.freq_base_swa")),
        names=AFTER,
        absent=NO_NORMS_BEFORE,
        positions=Positions(by_kind=True, stretches_local=False, in_windows=True),
    ),
    "olmoe": row("olmoe", _EXPERTS, names=ROUTED),
    "exaone4": row("exaone4", settings.mixed_windows(0), names=AFTER, absent=NO_NORMS_BEFORE),
    "cohere2": row(
        "cohere2",
        settings.mixed_windows(4096),
        Part(settings.cohere, ("logit_scale",)),
        settings.centred("layer_norm_eps"),
        absent=("ffn_norm",),
    ),
    "command-r": row(
        "cohere",
        Part(settings.cohere, ("logit_scale",)),
        settings.centred("layer_norm_eps"),
        absent=("ffn_norm",),
    ),
    "seed_oss": row(
        "seed_oss",
        Part(settings.seed_oss),
        names={"post_attention_norm": "post_attention_layernorm"},
        absent=("ffn_norm",),
    ),
    "mistral3": row("ministral3", _TEMPERATURE, paired=True),
    "qwen2vl": row("qwen2", _SWITCHED_WINDOW, SECTIONS, qkv_bias=True),
    "qwen3vl": row("qwen3", SECTIONS),
    "qwen3vlmoe": row(
        "qwen3_moe", _EXPERTS, SECTIONS, names=ROUTED, settings={"norm_topk_prob": True}
    ),
    "mellum": row(
        "mellum",
        settings.mixed_windows(0),
        _EXPERTS,
        names=ROUTED,
        positions=Positions(by_kind=True),
    ),
    "deepseek": row("deepseek", settings.routed(has_sigmoids=False), names=DEEPSEEK, paired=True),
    "deepseek2": _DEEPSEEK2,
    "mistral4": replace(_DEEPSEEK2, parts=(*_DEEPSEEK2.parts, _TEMPERATURE)),
    "dots1": row("dots1", settings.routed(has_sigmoids=True), names=DEEPSEEK),
    "bailingmoe": row(
        "deepseek",
        settings.routed(has_sigmoids=False, has_dense=False),
        names=DEEPSEEK,
        paired=True,
    ),
    "glm4moe": row(
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
    "minimax-m2": row(
        "minimax_m2",
        settings.routed(has_sigmoids=True, normalises=True),
        names=DEEPSEEK,
        turns_in_part=True,
    ),
    "phi2": row(
        "phi",
        settings.activation("gelu_new"),
        settings.centred("layer_norm_eps"),
        absent=("ffn_gate", "ffn_norm"),
        turns_in_part=True,
    ),
    "gptneox": row(
        "gpt_neox",
        Part(settings.neox, ("use_parallel_residual",)),
        settings.centred("layer_norm_eps"),
        absent=("ffn_gate",),
        turns_in_part=True,
    ),
    "falcon": row(
        "falcon",
        Part(settings.falcon),
        settings.centred("layer_norm_epsilon"),
        names={"attn_norm_2": "ln_attn"},
        absent=("ffn_gate", "ffn_norm", "attn_norm_2"),
    ),
    "olmo": row(
        "olmo",
        Part(settings.clip, ("attention.clamp_kqv",)),
        absent=("attn_norm", "ffn_norm"),
        paired=True,
    ),
    "jais2": row(
        "jais2",
        settings.activation("relu2"),
        settings.centred("layer_norm_eps"),
        absent=("ffn_gate",),
    ),
    "codeshell": row(
        "codeshell",
        settings.activation("gelu_new"),
        settings.centred("layer_norm_epsilon"),
        absent=("ffn_gate",),
    ),
    "arcee": row("arcee", settings.activation("relu2"), paired=True, absent=("ffn_gate",)),
    "nemotron": row(
        "nemotron",
        settings.activation("relu2"),
        settings.centred("norm_eps"),
        absent=("ffn_gate",),
        above_one=True,
        turns_in_part=True,
    ),
    "starcoder2": row(
        "starcoder2",
        WINDOW,
        settings.activation("gelu_pytorch_tanh"),
        settings.centred("norm_epsilon"),
        absent=("ffn_gate",),
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "plamo": row("plamo", absent=("ffn_norm",)),
    "glm4": row(
        "glm4",
        SECTIONS,
        names=AROUND,
        absent=("ffn_gate",),
        turns_in_part=True,
        out_bias=False,
    ),
    "ernie4_5": row("ernie4_5", SECTIONS),
    "ernie4_5-moe": row(
        "ernie4_5_moe",
        settings.routed(has_sigmoids=False, normalises=True),
        names=DEEPSEEK,
    ),
    "smollm3": row("smollm3", WINDOW, paired=True),
    "gpt-oss": row(
        "gpt_oss",
        settings.mixed_windows(None),
        Part(settings.experts_alone, EXPERT_KEYS),
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


@cache
def architectures() -> Mapping[str, Architecture]:
    """The rows of all architectures: ours, and those of plugins."""
    rows = dict(ARCHITECTURES)
    for module in plugin_modules("architectures"):
        rows |= module.ARCHITECTURES
    return rows


def sizes_of(header: Header) -> Sizes:
    """The settings of a file. Raises CheckpointError if its architecture is not supported."""
    found = JsonObject(str(header.path), header.metadata).text("general.architecture")
    rows = architectures()
    if found not in rows:
        raise CheckpointError(
            f"{header.path}: GGUF files of architecture {found!r} are not supported.",
            hint=f"supported: {', '.join(rows)}. The folder with safetensors that the "
            "file was made from may run; `outrider models pull` fetches it",
        )
    return Sizes(header, found, rows[found])


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
