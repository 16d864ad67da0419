"""config.json of a GGUF file: its sizes and settings under the names of Hugging Face.

What would change the logits and has no name there is refused, as it is in a config.json. Numbers
were rounded to float32 in the file; the shortest decimal that rounds alike is the original's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.core.errors import CheckpointError
from outrider.models.gguf.keys import GEMMAS, MIXED_WINDOWS, MIXTURES, notes_on_keys, refuse_keys
from outrider.models.gguf.positions import Positions, shortest
from outrider.models.gguf.reader import Header
from outrider.models.gguf.vocabulary import special_ids
from outrider.models.json_object import CONTRADICTION, OTHER_CHECKPOINT, JsonObject

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
# Layers of Gemma's largest models, whose queries are scaled by another size than that of a head.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
# Settings that may have a value for each layer.
_BY_LAYER = (
    "attention.head_count",
    "attention.head_count_kv",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
)


def architecture_of(header: Header) -> str:
    """Raises CheckpointError for one that we do not read."""
    found = JsonObject(str(header.path), header.metadata).text("general.architecture")
    if found not in MODEL_TYPES:
        raise CheckpointError(
            f"{header.path}: GGUF files of architecture {found!r} are not supported.",
            hint=f"supported: {', '.join(MODEL_TYPES)}. The folder with safetensors that the file "
            "was made from may run; `outrider models pull` fetches it",
        )
    return found


def head_dim_of(header: Header) -> int:
    return _Sizes(header).head_dim


def config_of(header: Header) -> dict[str, Any]:
    """Raises CheckpointError, naming file and key, for what is missing or not supported."""
    sizes = _Sizes(header)
    arch = sizes.arch
    refuse_keys(header, arch, sizes.usual)
    common = {
        "model_type": MODEL_TYPES[arch],
        "vocab_size": sizes.vocab_size,
        "tie_word_embeddings": HEAD not in header.entries,
        "dtype": _dtype(header),
        **special_ids(header),
    }
    return common | (_gpt2(sizes) if arch == "gpt2" else _llama(sizes))


def notes_of(header: Header) -> tuple[str, ...]:
    """Notes on settings of the file that no model here reads."""
    return notes_on_keys(header, architecture_of(header))


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

    @property
    def turning(self) -> int:
        """How much of a head turns with positions."""
        return self.integer("rope.dimension_count", self.head_dim)

    @property
    def usual(self) -> dict[str, int]:
        """Sizes that other keys may repeat."""
        return {
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "embedding_length": self.hidden,
            "rope.dimension_count": self.turning,
        }

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        full = f"{self.arch}.{key}"
        listed = self.raw.values.get(full)
        if key not in _BY_LAYER or not isinstance(listed, np.ndarray):
            return self.raw.integer(full, default, least=least)
        values: list[object] = listed.tolist()
        if len(values) != self.integer("block_count") or values.count(values[0]) < len(values):
            raise CheckpointError(
                f"{self.raw.where}: {full} has no one value for all layers, which is not "
                f"supported: {values!r:.60}.",
                hint=OTHER_CHECKPOINT,
            )
        return JsonObject(self.raw.where, {full: values[0]}).integer(full, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        return shortest(self.raw.number(f"{self.arch}.{key}", default))

    def has(self, key: str) -> bool:
        return self.raw.has(f"{self.arch}.{key}")

    def is_set(self, key: str) -> bool:
        """Whether the file has the key, and not 0 for it."""
        return self.raw.values.get(f"{self.arch}.{key}") not in (None, 0)


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
    found |= _window(sizes) | _experts(sizes) | _gemma(sizes)
    if sizes.turning != sizes.head_dim:
        found["partial_rotary_factor"] = sizes.turning / sizes.head_dim
    return found | _positions(sizes, found)


def _experts(sizes: _Sizes) -> dict[str, Any]:
    if sizes.arch not in MIXTURES:
        return {}
    chosen = sizes.integer("expert_used_count")
    usual = None if sizes.arch == "gpt-oss" else sizes.integer("feed_forward_length")
    ffn = sizes.integer("expert_feed_forward_length", usual and max(1, usual // chosen))
    found: dict[str, Any] = {
        "num_local_experts": sizes.integer("expert_count"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": ffn,
        "norm_topk_prob": sizes.arch == "qwen3moe",
    }
    if sizes.arch == "gpt-oss":
        found["intermediate_size"] = ffn
    if sizes.arch == "qwen2moe":
        shared = sizes.integer("expert_shared_feed_forward_length", usual)
        found["shared_expert_intermediate_size"] = shared
    return found


def _gemma(sizes: _Sizes) -> dict[str, Any]:
    if sizes.arch not in GEMMAS:
        return {}
    found: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}
    for name in ("attn", "final"):
        key = f"{name}_logit_softcapping"
        if sizes.has(key) or sizes.arch == "gemma3":
            found[key] = sizes.number(key) if sizes.is_set(key) else None
    largest = sizes.integer("block_count") == _LARGEST_GEMMA[sizes.arch]
    scalar = sizes.hidden // sizes.num_heads if largest else sizes.head_dim
    return found | {"query_pre_attn_scalar": scalar}


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
    if sizes.arch in MIXED_WINDOWS:
        return _mixed_windows(sizes)
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


def _mixed_windows(sizes: _Sizes) -> dict[str, Any]:
    """Some layers slide: all but each so many, or those that a list says."""
    usual = {"gemma2": 4096, "gemma3": 0}
    window = sizes.integer("attention.sliding_window", usual.get(sizes.arch), least=0)
    key = "attention.sliding_window_pattern"
    if not window or not sizes.has(key):
        return {"sliding_window": window or None}
    num_layers = sizes.integer("block_count")
    given = sizes.raw.values[f"{sizes.arch}.{key}"]
    if isinstance(given, np.ndarray):
        slides = [bool(one) for one in given.tolist()]
    else:
        every = sizes.integer(key, least=0)
        slides = [not every or index % every < every - 1 for index in range(num_layers)]
    if len(slides) != num_layers:
        raise CheckpointError(
            f"{sizes.raw.where}: {sizes.arch}.{key} has {len(slides)} entries for {num_layers} "
            "layers.",
            hint=CONTRADICTION,
        )
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return {"sliding_window": window, "layer_types": kinds}


def _positions(sizes: _Sizes, found: Mapping[str, Any]) -> dict[str, Any]:
    """How positions are stretched, by kind of layer where the kinds differ."""
    window, theta = found["max_position_embeddings"], found["rope_theta"]
    positions = Positions(sizes.header, sizes.arch, sizes.turning, window, theta)
    whole = positions.scaling()
    if sizes.arch in MIXED_WINDOWS:
        local = positions.local_scaling() if sizes.arch == "gemma3" else whole
        usual = 10000.0 if sizes.arch == "gemma3" else theta
        local = {**local, "rope_theta": sizes.number("rope.freq_base_swa", usual)}
        whole = {**whole, "rope_theta": theta}
        return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}
    if not whole:
        return {}
    # Phi-3 has it beside the others.
    key = "original_max_position_embeddings"
    return {"rope_scaling": whole} | ({key: whole[key]} if key in whole else {})


def _dtype(header: Header) -> str:
    """What the matrices are held in: as they are stored, quantised ones as bfloat16."""
    kinds = {entry.kind for entry in header.entries.values() if len(entry.shape) > 1}
    names = {kind.name for kind in kinds}
    if any(kind.is_quantised for kind in kinds) or "BF16" in names:
        return "bfloat16"
    return "float16" if "F16" in names else "float32"
