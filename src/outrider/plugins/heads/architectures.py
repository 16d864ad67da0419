"""GGUF files of heads: rows of the architectures of EAGLE 3 and DFlash, and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.core.errors import CheckpointError
from outrider.models.gguf.architectures import LAYERED, LLAMA_LAYER, layer_types
from outrider.models.gguf.config import Architecture, Part, Sizes

DRAFTER_OUTER = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "fc": "fc",
    "d2t": "d2t",
}


def _drafter(sizes: Sizes, name: str) -> dict[str, Any]:
    """Settings of every drafter, whose class is `name`: hidden layers by the number of layers
    before them, and the size of its vocabulary."""
    listed = sizes.raw.values.get(f"{sizes.arch}.target_layers")
    layers = listed.tolist() if isinstance(listed, np.ndarray) else listed
    table = sizes.header.entries.get("d2t")
    return {
        "architectures": [name],
        "hidden_layers": layers,
        "draft_vocab_size": sizes.vocab_size if table is None else table.shape[0],
    }


def _eagle3(sizes: Sizes) -> dict[str, Any]:
    flags = {
        key: sizes.raw.flag(f"{sizes.arch}.{key}", default=False)
        for key in ("norm_before_residual", "norm_before_fc")
    }
    return {**_drafter(sizes, "LlamaForCausalLMEagle3"), **flags}


def _dflash(sizes: Sizes) -> dict[str, Any]:
    found, entries = _drafter(sizes, "DFlashDraftModel"), sizes.header.entries
    found["mask_token_id"] = sizes.raw.values.get("tokenizer.ggml.mask_token_id")
    found["dflash_config"] = {}
    for key in _DFLASH_SIZES:
        if sizes.is_set(key):
            found[key] = sizes.integer(key)
    if "markov_w1.weight" in entries:
        found["markov_rank"] = entries["markov_w1.weight"].shape[1]
    if sizes.has("sample_from_anchor"):
        found["sample_from_anchor"] = sizes.raw.flag(
            f"{sizes.arch}.sample_from_anchor", default=True
        )
    if sizes.has("attention.causal"):
        found["is_causal"] = sizes.raw.flag(f"{sizes.arch}.attention.causal", default=False)
    for key, name in _DFLASH_SCALES:
        if sizes.is_set(key):
            found[name] = sizes.number(key)
    pattern = "attention.sliding_window_pattern"
    if sizes.is_set("attention.sliding_window"):
        found["sliding_window"] = sizes.integer("attention.sliding_window")
        found["layer_types"] = layer_types(sizes, pattern)
        if "markov_w1.weight" in entries and "sliding_attention" in found["layer_types"]:
            raise CheckpointError(
                f"{sizes.header.path}: DSpark with a sliding window: the file does not say whether "
                "the window ends at the token (DeepSpec) or begins before the block (speculators).",
                hint="name the folder with safetensors that the file was made from",
            )
    return found


_DFLASH_SIZES = (
    "block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
)  # fmt: skip


_DFLASH_SCALES = (
    ("embedding_scale", "input_embedding_scale"),
    ("logit_scale", "output_multiplier"),
    ("final_logit_softcapping", "final_logit_softcapping"),
)


EAGLE3 = Part(
    _eagle3, ("target_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc")
)


DFLASH = Part(
    _dflash,
    (
        "target_layers", *_DFLASH_SIZES, *(key for key, _ in _DFLASH_SCALES), "attention.causal",
        "attention.sliding_window_pattern", "sample_from_anchor", "has_confidence_head",
        "rope.dimension_sections",
    ),
)  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "eagle3": Architecture(
        family="llama",
        parts=(LAYERED, EAGLE3),
        names={**LLAMA_LAYER, "attn_norm_2": "hidden_norm"},
        outer={**DRAFTER_OUTER, "enc.output_norm": "input_norm"},
        stem="layers.",
        paired=True,
        drafts=True,
    ),
    "dflash": Architecture(
        family="qwen3",
        parts=(LAYERED, DFLASH),
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
}
