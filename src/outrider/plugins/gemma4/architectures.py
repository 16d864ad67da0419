"""Settings of Gemma 4 in a GGUF file, whose layers differ in sizes, as config.json has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.core.errors import CheckpointError
from outrider.models.gguf.architectures import (
    AROUND,
    LLAMA_LAYER,
    LLAMA_OUTER,
    mixed_windows,
    soft_cap,
)
from outrider.models.gguf.config import Architecture, Part, Sizes
from outrider.models.gguf.reader import map_file
from outrider.models.json_object import contradictory, unsupported

_KEYS = (
    "attention.shared_kv_layers", "attention.key_length_swa", "attention.value_length_swa",
    "embedding_length_per_layer_input", "rope.dimension_count_swa",
    "attention.sliding_window_pattern", "rope.freq_base_swa", "expert_count", "expert_used_count",
    "expert_feed_forward_length",
)  # fmt: skip
# Factors of frequencies of at least so much keep a pair of a head still.
_STILL = 1e29
_FULL, _SLIDING = "full_attention", "sliding_attention"


# Tensors that not every file or layer has.
_OWN = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    **{f"ffn_{part}_exps": f"experts.{part}_proj" for part in ("gate_up", "gate", "up", "down")},
}
_OUTER = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


def architecture(layer: Mapping[str, str], outer: Mapping[str, str]) -> Architecture:
    """The row of Gemma 4, with the names that its tensors share with other models."""
    return Architecture(
        family="gemma4_text",
        parts=(Part(gemma4, _KEYS), soft_cap("final")),
        names={**layer, **_OWN},
        outer={**outer, **_OUTER},
        absent=("attn_k", "attn_v", "attn_k_norm", *_OWN),
    )


def assistant(layer: Mapping[str, str], outer: Mapping[str, str]) -> Architecture:
    """The row of assistants, whose layers read the keys and values of their target."""
    return Architecture(
        family="gemma4_assistant",
        parts=(Part(_assistant, (*_KEYS, "embedding_length_out", "nextn_predict_layers")),),
        names={**layer, **_OWN},
        outer={
            **outer,
            "nextn.pre_projection": "pre_projection",
            "nextn.post_projection": "post_projection",
        },
        absent=("attn_k", "attn_v", "attn_k_norm", *_OWN),
        drafts=True,
    )


def _assistant(sizes: Sizes) -> dict[str, Any]:
    text = {"vocab_size": sizes.vocab_size, "tie_word_embeddings": True, **gemma4(sizes)}
    return {
        "backbone_hidden_size": sizes.integer("embedding_length_out"),
        "text_config": text | {"model_type": "gemma4_text"},
    }


def gemma4(sizes: Sizes) -> dict[str, Any]:
    """The settings of config.json. Raises CheckpointError for sizes that no checkpoint of Gemma 4
    has."""
    windows = mixed_windows(None).read(sizes)
    kinds: Sequence[str] = windows.get("layer_types", ())
    if not kinds:
        raise _unsupported(sizes, "no window or no attention.sliding_window_pattern")
    found: dict[str, Any] = {
        **windows,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "max_position_embeddings": sizes.integer("context_length"),
        "rms_norm_eps": sizes.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "num_kv_shared_layers": sizes.integer("attention.shared_kv_layers", 0, least=0),
        **_heads(sizes, kinds),
        **_ffns(sizes),
        "attention_k_eq_v": _has_no_values(sizes, kinds),
        "rope_parameters": _positions(sizes),
        **_inputs(sizes),
    }
    if sizes.is_set("expert_count"):
        found |= {
            "enable_moe_block": True,
            "num_experts": sizes.integer("expert_count"),
            "top_k_experts": sizes.integer("expert_used_count"),
            "moe_intermediate_size": sizes.integer("expert_feed_forward_length"),
        }
    return found


def _heads(sizes: Sizes, kinds: Sequence[str]) -> dict[str, Any]:
    local = sizes.integer("attention.key_length_swa", sizes.head_dim)
    if sizes.integer("attention.value_length_swa", local) != local:
        raise _unsupported(sizes, "keys and values of different sizes")
    num_heads = sizes.by_layer("attention.head_count_kv")
    listed = {
        str(index): {"head_dim": sizes.head_dim, "num_key_value_heads": num_heads[index]}
        for index, kind in enumerate(kinds)
        if kind == _FULL
    }
    sliding = [num_heads[index] for index, kind in enumerate(kinds) if kind == _SLIDING]
    if len({*sliding}) > 1:
        raise _unsupported(sizes, "layers with a window that differ in key heads")
    own = {"head_dim": local, "num_key_value_heads": (sliding or num_heads)[0]}
    return {**own, "per_layer_config": listed}


def _ffns(sizes: Sizes) -> dict[str, Any]:
    """The size of FFNs, which may be twice as large in layers that share keys."""
    found = sizes.by_layer("feed_forward_length")
    first = sizes.num_layers - sizes.integer("attention.shared_kv_layers", 0, least=0)
    wide = found[-1] == 2 * found[0] and first < sizes.num_layers
    if found != [found[0] * (2 if wide and n >= first else 1) for n in range(sizes.num_layers)]:
        raise _unsupported(sizes, f"feed_forward_length {found!r:.60}")
    return {"intermediate_size": found[0], "use_double_wide_mlp": wide}


def _has_no_values(sizes: Sizes, kinds: Sequence[str]) -> bool:
    """True if layers that see the whole text have no matrix of values."""
    entries = sizes.header.entries
    missing = {
        kind
        for index, kind in enumerate(kinds)
        if f"blk.{index}.attn_k.weight" in entries and f"blk.{index}.attn_v.weight" not in entries
    }
    return _FULL in missing


def _positions(sizes: Sizes) -> dict[str, Any]:
    """Positions by kind of layers; factors of frequencies say which part of a head turns."""
    if sizes.raw.text(f"{sizes.arch}.rope.scaling.type", "none") != "none":
        raise _unsupported(sizes, "rope.scaling.type")
    local = sizes.integer("attention.key_length_swa", sizes.head_dim)
    turning = {
        "rope.dimension_count": sizes.head_dim,
        "rope.dimension_count_swa": local,
    }
    for key, size in turning.items():
        if sizes.integer(key, size) != size:
            raise _unsupported(sizes, f"{key} {sizes.integer(key)}")
    theta = sizes.number("rope.freq_base", 10000.0)
    # A quarter of a pair more, so that a rounded share never gives one less.
    share = (_turning(sizes) + 0.25) / (sizes.head_dim // 2)
    whole = {
        "rope_type": "proportional",
        "partial_rotary_factor": min(1.0, share),
        "rope_theta": theta,
    }
    own = {"rope_type": "default", "rope_theta": sizes.number("rope.freq_base_swa", theta)}
    return {_FULL: whole, _SLIDING: own}


def _turning(sizes: Sizes) -> int:
    """Number of pairs of a head that turn with positions, in layers that see the whole text."""
    half, entry = sizes.head_dim // 2, sizes.header.entries.get("rope_freqs.weight")
    if entry is None:
        return half
    if entry.shape != (half,) or entry.kind.name != "F32":
        raise contradictory(sizes.raw.where, f"rope_freqs.weight is no list of {half} float32")
    with map_file(entry.path) as memory:
        raw = memory[entry.offset : entry.offset + entry.num_bytes]
    factors = np.frombuffer(raw, "<f4")
    num_turning = int((factors == 1).sum())
    if not (factors[:num_turning] == 1).all() or not (factors[num_turning:] >= _STILL).all():
        raise _unsupported(sizes, "rope_freqs.weight with other factors than 1 and 1e30")
    return num_turning


def _inputs(sizes: Sizes) -> dict[str, Any]:
    size = sizes.integer("embedding_length_per_layer_input", 0, least=0)
    table = sizes.header.entries.get("per_layer_token_embd.weight")
    if not size or table is None:
        return {"hidden_size_per_layer_input": size}
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": table.shape[0]}


def _unsupported(sizes: Sizes, what: str) -> CheckpointError:
    return unsupported(sizes.raw.where, f"a {sizes.arch} with {what} is not supported")


ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma4": architecture({**LLAMA_LAYER, **AROUND}, LLAMA_OUTER),
    "gemma4-assistant": assistant({**LLAMA_LAYER, **AROUND}, LLAMA_OUTER),
}
