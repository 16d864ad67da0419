"""Architectures of GGUF files, with a row for each: settings, and names and layouts of tensors.

A new architecture is a row: the family that computes it, the parts that make its config.json
(config.py has those of all, settings.py the others), and the names of its tensors in checkpoints.
Modules `architectures` of plugins have further rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from outrider.core.errors import CheckpointError
from outrider.core.plugins import plugin_modules
from outrider.models.gguf import settings
from outrider.models.gguf.config import Architecture, Part, Positions, Sizes, layered
from outrider.models.gguf.reader import Header
from outrider.models.gguf.settings import (
    AROUND,
    EXPERT_NAMES,
    FFN,
    LLAMA_LAYER,
    LLAMA_OUTER,
    ROUTED,
    SHARED,
)
from outrider.models.json_object import JsonObject

EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
LAYERED, WINDOW, SWITCHED_WINDOW = (
    Part(layered),
    Part(settings.window),
    Part(settings.switched_window),
)
EXPERTS = Part(settings.experts, EXPERT_KEYS)
TEMPERATURE = Part(settings.temperature, ("attention.temperature_scale",))
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
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": row(
        "llama",
        Part(settings.mistral_window),
        Part(settings.mixtral, EXPERT_KEYS),
        names=ROUTED,
        paired=True,
    ),
    "qwen2": row("qwen2", SWITCHED_WINDOW, qkv_bias=True),
    "qwen3": row("qwen3", SWITCHED_WINDOW),
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
        SWITCHED_WINDOW,
        EXPERTS,
        Part(settings.shared_expert, ("expert_shared_feed_forward_length",)),
        names=SHARED,
        qkv_bias=True,
    ),
    "qwen3moe": row(
        "qwen3_moe",
        SWITCHED_WINDOW,
        EXPERTS,
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
    "gemma": row("gemma", settings.activation("gelu_pytorch_tanh"), above_one=True),
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "mistral3": row("ministral3", TEMPERATURE, paired=True),
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
