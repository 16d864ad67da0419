"""config.json of a GGUF file: its sizes and settings under the names of Hugging Face.

What would change the logits and has no name there is refused, as it is in a config.json. Numbers
were rounded to float32 in the file; the shortest decimal that rounds alike is the original's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outrider.core.errors import CheckpointError, nearest
from outrider.models.gguf.reader import Entry, Header, map_file
from outrider.models.gguf.vocabulary import special_ids
from outrider.models.json_object import CONTRADICTION, OTHER_CHECKPOINT, JsonObject
from outrider.models.rope import frequencies
from outrider.models.rope_config import Rope

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Architectures by the families that their config.json names.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "smollm3": "smollm3",
    "gpt-oss": "gpt_oss",
}
MIXTURES, GEMMAS = ("qwen2moe", "qwen3moe", "gpt-oss"), ("gemma2", "gemma3")
# Settings of other models that share an architecture's name, and the architectures that have them.
_REFUSED: Mapping[str, tuple[str, ...]] = {
    "expert_count": MIXTURES,
    "expert_group_count": (),
    "expert_weights_scale": (),
    "use_parallel_residual": (),
    "attn_logit_softcapping": GEMMAS,
    "final_logit_softcapping": GEMMAS,
    "logit_scale": (),
    "residual_scale": (),
    "embedding_scale": (),
    "attention.scale": (),
    "attention.clamp_kqv": (),
    "attention.max_alibi_bias": (),
    "attention.temperature_scale": (),
    "rope.scaling.yarn_log_multiplier": (),
}
# Layers of Gemma's largest models, whose queries are scaled by another size than that of a head.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
_MAX_FACTORS = 4096


def architecture_of(header: Header) -> str:
    """Raises CheckpointError for one that we do not read."""
    found = JsonObject(str(header.path), header.metadata).text("general.architecture")
    if found not in MODEL_TYPES:
        raise CheckpointError(
            f"{header.path}: GGUF files of architecture {found!r} are not supported.",
            hint=nearest(
                found,
                MODEL_TYPES,
                f"Supported: {', '.join(MODEL_TYPES)}. The folder with safetensors that the file "
                "was made from may run; `outrider models pull` fetches it",
            ),
        )
    return found


def head_dim_of(header: Header) -> int:
    return _Sizes(header).head_dim


def config_of(header: Header) -> dict[str, Any]:
    """Raises CheckpointError, naming file and key, for what is missing or not supported."""
    sizes = _Sizes(header)
    raw, arch = sizes.raw, sizes.arch
    for key, known in _REFUSED.items():
        value = raw.values.get(f"{arch}.{key}")
        if value and arch not in known:
            raise CheckpointError(
                f"{raw.where}: {arch}.{key} {value!r:.40} is not supported.", hint=OTHER_CHECKPOINT
            )
    common = {
        "model_type": MODEL_TYPES[arch],
        "vocab_size": sizes.vocab_size,
        "tie_word_embeddings": HEAD not in header.entries,
        "dtype": _dtype(header),
        **special_ids(header),
    }
    return common | (_gpt2(sizes) if arch == "gpt2" else _llama(sizes))


class _Sizes:
    """What several settings are made of."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.arch = architecture_of(header)
        self.raw = JsonObject(str(header.path), header.metadata)
        self.hidden = self.integer("embedding_length")
        self.num_heads = self.integer("attention.head_count")
        self.head_dim = self.integer("attention.key_length", max(1, self.hidden // self.num_heads))
        if self.integer("attention.value_length", self.head_dim) != self.head_dim:
            raise CheckpointError(
                f"{self.raw.where}: keys and values of different sizes are not supported.",
                hint=OTHER_CHECKPOINT,
            )
        embedding = header.entries.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(
                f"{self.raw.where}: the matrix {EMBEDDING} is missing.",
                hint="is it the file of a whole language model?",
            )
        self.vocab_size = embedding.shape[0]

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        return self.raw.integer(f"{self.arch}.{key}", default, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        return _shortest(self.raw.number(f"{self.arch}.{key}", default))


def _llama(sizes: _Sizes) -> dict[str, Any]:
    entries = sizes.header.entries
    found: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.integer("feed_forward_length"),
        "num_hidden_layers": sizes.integer("block_count"),
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.integer("attention.head_count_kv", sizes.num_heads),
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.integer("context_length"),
        "rms_norm_eps": sizes.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": sizes.number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        # Qwen 2 has biases that no key tells, of queries, keys and values only.
        "attention_bias": sizes.arch not in ("qwen2", "qwen2moe")
        and "blk.0.attn_q.bias" in entries,
        "mlp_bias": "blk.0.ffn_down.bias" in entries,
    }
    found |= _window(sizes) | _turning(sizes) | _experts(sizes) | _gemma(sizes)
    if scaling := _scaling(sizes, found):
        found["rope_scaling"] = scaling
        # Phi-3 has it beside the others.
        key = "original_max_position_embeddings"
        found |= {key: scaling[key]} if key in scaling else {}
    return found


def _experts(sizes: _Sizes) -> dict[str, Any]:
    if sizes.arch not in MIXTURES:
        return {}
    ffn = sizes.integer("expert_feed_forward_length")
    found: dict[str, Any] = {
        "num_local_experts": sizes.integer("expert_count"),
        "num_experts_per_tok": sizes.integer("expert_used_count"),
        "moe_intermediate_size": ffn,
        "norm_topk_prob": sizes.arch == "qwen3moe",
    }
    if sizes.arch == "gpt-oss":
        found["intermediate_size"] = ffn
    if sizes.arch == "qwen2moe":
        shared = sizes.integer("expert_shared_feed_forward_length")
        found["shared_expert_intermediate_size"] = shared
    return found


def _gemma(sizes: _Sizes) -> dict[str, Any]:
    if sizes.arch not in GEMMAS:
        return {}
    found: dict[str, Any] = {
        f"{name}_logit_softcapping": None
        if not sizes.raw.has(f"{sizes.arch}.{name}_logit_softcapping")
        else sizes.number(f"{name}_logit_softcapping")
        for name in ("attn", "final")
    }
    largest = sizes.integer("block_count") == _LARGEST_GEMMA[sizes.arch]
    scalar = sizes.hidden // sizes.num_heads if largest else sizes.head_dim
    local = {"rope_local_base_freq": sizes.number("rope.freq_base_swa", 10000.0)}
    found |= {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}
    return found | (local if sizes.arch == "gemma3" else {})


def _gpt2(sizes: _Sizes) -> dict[str, Any]:
    return {
        "n_embd": sizes.hidden,
        "n_inner": sizes.integer("feed_forward_length"),
        "n_layer": sizes.integer("block_count"),
        "n_head": sizes.num_heads,
        "n_positions": sizes.integer("context_length"),
        "layer_norm_epsilon": sizes.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _window(sizes: _Sizes) -> dict[str, Any]:
    """Layers that slide, under the names of the family; in `llama` they make it a Mistral."""
    window = sizes.integer("attention.sliding_window", 0, least=0)
    if sizes.arch.startswith("qwen"):
        return {
            "use_sliding_window": window > 0,
            "sliding_window": window or None,
            "max_window_layers": 0,
        }
    if not window:
        return {}
    found = {"sliding_window": window}
    return found | ({"model_type": "mistral"} if sizes.arch == "llama" else {})


def _turning(sizes: _Sizes) -> dict[str, Any]:
    turning = sizes.integer("rope.dimension_count", sizes.head_dim)
    share = turning / sizes.head_dim
    return {} if share == 1 else {"partial_rotary_factor": share}


def _scaling(sizes: _Sizes, found: Mapping[str, Any]) -> dict[str, Any]:
    """How positions are stretched, as `rope_scaling` says it."""
    raw, header = sizes.raw, sizes.header
    if (entry := header.entries.get("rope_freqs.weight")) is not None:
        return _by_factors(found, _factors(header, entry))
    if (entry := header.entries.get("rope_factors_short.weight")) is not None:
        original = sizes.integer("rope.scaling.original_context_length")
        return {
            "rope_type": "longrope",
            "short_factor": [_shortest(factor) for factor in _factors(header, entry)],
            "long_factor": _long_factors(header),
            "original_max_position_embeddings": original,
            "attention_factor": sizes.number("rope.scaling.attn_factor", 1.0),
        }
    kind = raw.text(f"{sizes.arch}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{raw.where}: {sizes.arch}.rope.scaling.type {kind!r} is not supported.",
            hint=OTHER_CHECKPOINT,
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": sizes.number("rope.scaling.factor")}
    if kind == "yarn":
        key = "rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = sizes.integer(key)
        for name in ("beta_fast", "beta_slow"):
            if raw.has(f"{sizes.arch}.rope.scaling.yarn_{name}"):
                scaling[name] = sizes.number(f"rope.scaling.yarn_{name}")
        if sizes.arch == "gpt-oss":
            scaling["truncate"] = False
    return scaling


def _long_factors(header: Header) -> list[float] | None:
    entry = header.entries.get("rope_factors_long.weight")
    return None if entry is None else [_shortest(factor) for factor in _factors(header, entry)]


def _by_factors(found: Mapping[str, Any], factors: list[float]) -> dict[str, Any]:
    """Frequencies that are divided one by one: Llama 3's, if its own formula gives them, so that
    they have the bits of its checkpoints; any others as short factors that hold everywhere."""
    window = found["max_position_embeddings"]
    dim = 2 * len(factors)
    theta, plain = found["rope_theta"], frequencies(Rope(theta=found["rope_theta"]), dim)
    divided = plain / torch.tensor(factors)
    for original in (1 << exponent for exponent in range(4, 21)):
        stretched = Rope(
            kind="llama3",
            theta=theta,
            factor=max(factors),
            original_tokens=original,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        )
        if torch.allclose(frequencies(stretched, dim), divided, rtol=1e-5, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": max(factors),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "original_max_position_embeddings": window,
        "attention_factor": 1.0,
    }


def _factors(header: Header, entry: Entry) -> list[float]:
    if len(entry.shape) != 1 or entry.num_values > _MAX_FACTORS or entry.kind.name != "F32":
        raise CheckpointError(
            f"{header.path}: {entry.name} is no short list of float32.", hint=CONTRADICTION
        )
    with map_file(entry.path) as memory:
        raw = memory[entry.offset : entry.offset + entry.num_bytes]
    found: list[float] = np.frombuffer(raw, "<f4").tolist()
    if not all(0 < factor < 1e9 for factor in found):
        raise CheckpointError(
            f"{header.path}: {entry.name} has a factor that is not above 0.", hint=CONTRADICTION
        )
    return found


def _shortest(number: float) -> float:
    return float(str(np.float32(number)))


def _dtype(header: Header) -> str:
    """What the matrices are held in: as they are stored, quantised ones as bfloat16."""
    kinds = {entry.kind for entry in header.entries.values() if len(entry.shape) > 1}
    names = {kind.name for kind in kinds}
    if any(kind.is_quantised for kind in kinds) or "BF16" in names:
        return "bfloat16"
    return "float16" if "F16" in names else "float32"
