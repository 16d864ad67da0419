"""A Hugging Face `config.json`, reduced to what a Llama-shaped decoder needs. No tensors.

Both generations of files are read: `rope_theta` beside `rope_scaling`, or one `rope_parameters`;
`torch_dtype` or `dtype`. Defaults of absent keys are those of transformers. A setting that would
change the logits and is not implemented is refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import CheckpointError
from outrider.core.nearest import did_you_mean
from outrider.core.spec import ModelSpec
from outrider.models.json_object import JsonObject

_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
FAMILIES = tuple(_DEFAULTS)
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: `kind` says how the plain frequencies are stretched (models/rope.py).

    `attention_factor` multiplies both tables. Fields that `kind` does not use keep their default.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_tokens: int = 1
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and options of a decoder of the Llama family.

    `max_tokens` is the window in which this decoder equals the original; `notes` are sentences
    for the user on what the loader decided. `dtype` is the checkpoint's own, "" if unsaid.
    """

    family: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_tokens: int
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    stop_ids: tuple[int, ...] = ()
    dtype: str = ""
    notes: tuple[str, ...] = ()

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        attention = self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim)
        attention += self.attention_bias * (self.qkv_size + self.hidden_size)
        ffn = 3 * self.hidden_size * self.ffn_size
        ffn += self.mlp_bias * (2 * self.ffn_size + self.hidden_size)
        layer = attention + ffn + 2 * self.hidden_size
        tables = 1 if self.tie_word_embeddings else 2
        embeddings = tables * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    def spec(self, name: str, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelSpec:
        return ModelSpec(
            name=name,
            family=self.family,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_size=self.ffn_size,
            max_tokens=self.max_tokens,
            num_parameters=self.num_parameters,
            bytes_per_weight=bytes_per_weight,
            bytes_per_kv=bytes_per_kv,
            stop_ids=self.stop_ids,
        )


def read_config(folder: Path) -> LlamaConfig:
    """Read `config.json` and, if there is one, `generation_config.json`."""
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder} has no config.json.", hint="is it a Hugging Face model folder?"
        )
    generation = folder / "generation_config.json"
    return parse_config(
        JsonObject.read(folder / "config.json"),
        JsonObject.read(generation) if generation.exists() else None,
    )


def parse_config(raw: JsonObject, generation: JsonObject | None = None) -> LlamaConfig:
    """Raises CheckpointError, naming file and key, for anything missing, ill-typed or unknown."""
    family = raw.text("model_type")
    if family not in _DEFAULTS:
        raise CheckpointError(
            f"{raw.where}: model_type {family!r} is not supported.",
            hint=did_you_mean(family, FAMILIES),
        )
    raw = JsonObject(raw.where, {**_DEFAULTS[family], **raw.values})
    _refuse_unknown_arithmetic(raw)
    num_heads = raw.integer("num_attention_heads")
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    hidden_size = raw.integer("hidden_size")
    vocab_size = raw.integer("vocab_size")
    max_tokens, notes = _window(raw, family)
    config = LlamaConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        ffn_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=raw.integer("head_dim", max(1, hidden_size // num_heads)),
        max_tokens=max_tokens,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=_rope(raw),
        tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
        attention_bias=family == "llama" and raw.flag("attention_bias", default=False),
        mlp_bias=family == "llama" and raw.flag("mlp_bias", default=False),
        stop_ids=_stop_ids(vocab_size, raw, generation),
        dtype=raw.text("dtype", raw.text("torch_dtype", "")).removeprefix("torch."),
        notes=notes,
    )
    _check_heads(raw.where, config)
    return config


def _refuse_unknown_arithmetic(raw: JsonObject) -> None:
    activation = raw.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(
            f"{raw.where}: hidden_act {activation!r} is not supported; this decoder has silu."
        )
    if raw.has("quantization_config"):
        raise CheckpointError(
            f"{raw.where}: quantization_config says that the weights are quantised, "
            "which is not supported.",
            hint="use the unquantised checkpoint",
        )


def _check_heads(where: str, config: LlamaConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}."
        )
    if config.head_dim % 2:
        raise CheckpointError(
            f"{where}: head_dim must be even for rotary positions, got {config.head_dim}."
        )


def _window(raw: JsonObject, family: str) -> tuple[int, tuple[str, ...]]:
    """Within its sliding window such a model attends to everything, as this decoder does."""
    max_tokens = raw.integer("max_position_embeddings")
    if family != "mistral" or not raw.has("sliding_window"):
        return max_tokens, ()
    window = raw.integer("sliding_window")
    if window >= max_tokens:
        return max_tokens, ()
    note = (
        f"sliding-window attention is not supported: the window is {window} tokens, "
        f"not {max_tokens}"
    )
    return window, (note,)


def _stop_ids(vocab_size: int, *files: JsonObject | None) -> tuple[int, ...]:
    """End-of-text ids of all files. Ids outside the vocabulary are dropped: none can be drawn."""
    ids = [item for file in files if file for item in file.integers("eos_token_id")]
    return tuple(dict.fromkeys(item for item in ids if 0 <= item < vocab_size))


def _rope(raw: JsonObject) -> Rope:
    key = "rope_scaling" if raw.has("rope_scaling") else "rope_parameters"
    part = raw.child(key) or JsonObject(f"{raw.where}: rope_parameters", {})
    kind = part.text("rope_type", part.text("type", "default"))
    _check_rope(raw, part, kind)
    theta = part.number("rope_theta", raw.number("rope_theta", 10000.0))
    if theta <= 1:
        raise CheckpointError(f"{part.where}: rope_theta must be above 1, got {theta}.")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(kind, theta, part.number("factor"))
    max_tokens = raw.integer("max_position_embeddings")
    pretrained = part.integer("original_max_position_embeddings", max_tokens)
    original = raw.integer("original_max_position_embeddings", pretrained)
    if kind == "yarn":
        return _yarn(part, theta, original, max_tokens)
    return Rope(
        kind,
        theta,
        part.number("factor"),
        original,
        low_freq_factor=part.number("low_freq_factor"),
        high_freq_factor=part.number("high_freq_factor"),
    )


def _check_rope(raw: JsonObject, part: JsonObject, kind: str) -> None:
    if any(isinstance(value, dict) for value in part.values.values()):
        raise CheckpointError(f"{part.where}: rope settings per kind of layer are not supported.")
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{part.where}: rope type {kind!r} is not supported.",
            hint=did_you_mean(kind, ROPE_KINDS),
        )
    for holder in (raw, part):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(f"{holder.where}: partial_rotary_factor is not supported.")


def _yarn(part: JsonObject, theta: float, original: int, max_tokens: int) -> Rope:
    """Peng et al., "YaRN", 2023; the attention factor is inferred when the file has none."""
    if "factor" not in part.values:
        raise CheckpointError(f"{part.where}: the key factor is missing.")
    factor = part.number("factor", max_tokens / original)
    inferred = _mscale(factor, 1.0)
    if part.has("mscale") and part.has("mscale_all_dim"):
        whole = _mscale(factor, part.number("mscale_all_dim"))
        inferred = _mscale(factor, part.number("mscale")) / whole
    return Rope(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=part.number("beta_fast", 32.0),
        beta_slow=part.number("beta_slow", 1.0),
        truncate=part.flag("truncate", default=True),
        attention_factor=part.number("attention_factor", inferred),
    )


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
