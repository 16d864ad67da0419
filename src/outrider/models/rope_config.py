"""Rotary positions as a `config.json` describes them. No tensors: rope.py makes the tables.

Both generations of files are read: `rope_theta` with `rope_scaling`, or one `rope_parameters`.
Defaults of absent keys are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from outrider.core.errors import CheckpointError, ConfigError, did_you_mean
from outrider.core.spec import RopeScaling
from outrider.models.json_object import JsonObject, contradictory, unsupported

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: `kind` names the method that stretches frequencies (models/rope.py).

    `attention_factor` multiplies both tables, `score_factor` attention scores. The first
    `partial_rotary_factor` of each head rotates, the rest does not. Fields that `kind` does not use
    have their default. Longrope divides by its short factors, or by its long ones if `is_long`.
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
    score_factor: float = 1.0
    partial_rotary_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False

    def __str__(self) -> str:
        stretched = "" if self.kind == "default" else f" ({self.kind}, factor {self.factor:g})"
        return f"theta {self.theta:g}{stretched}"

    def rotary_dim(self, head_dim: int) -> int:
        """Number of dimensions of a head that rotate."""
        if self.kind == "proportional":
            return 2 * int(self.partial_rotary_factor * head_dim // 2)
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True, slots=True)
class RopeRules:
    """A family's rules: `kinds` maps names in files to ours; `partial` allows partial rotation.
    With `scales_scores`, stretched positions may scale attention scores, too."""

    kinds: Mapping[str, str]
    partial: bool = False
    scales_scores: bool = False


COMMON_ROPE = RopeRules({kind: kind for kind in ROPE_KINDS})
PARTIAL_ROPE = RopeRules(COMMON_ROPE.kinds, partial=True)
PROPORTIONAL_ROPE = RopeRules({"proportional": "proportional"}, partial=True)
LATENT_ROPE = RopeRules(COMMON_ROPE.kinds, scales_scores=True)
# Pictures have positions in three directions, which are one and the same for text.
MROPE = RopeRules({**COMMON_ROPE.kinds, "mrope": "default"})
# Phi-3's first files say "su" or "yarn" and mean longrope.
PHI3_ROPE = RopeRules(
    {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    partial=True,
)


def parse_rope(raw: JsonObject, rules: RopeRules = COMMON_ROPE) -> Rope:
    """Parse rotary positions. Raises CheckpointError, naming the key, for an unsupported value."""
    key = "rope_scaling" if raw.has("rope_scaling") else "rope_parameters"
    part = raw.child(key) or JsonObject(f"{raw.where}: rope_parameters", {})
    kind = _kind(part, rules)
    theta = part.number("rope_theta", raw.number("rope_theta", 10000.0))
    if theta <= 1:
        raise CheckpointError(f"{part.where}: rope_theta must be above 1, got {theta}.")
    rope = _scaled(raw, part, Rope(kind, theta))
    if rules.scales_scores and kind != "default" and _is_set(part, "mscale_all_dim"):
        scale = _mscale(part.number("factor"), part.number("mscale_all_dim"))
        rope = replace(rope, score_factor=scale * scale)
    return replace(rope, partial_rotary_factor=_partial(raw, part, rules))


def rope_scaled(rope: Rope, max_tokens: int, scaling: RopeScaling) -> tuple[Rope, int]:
    """The stretched positions of a model with the window `max_tokens`, and their window: what a
    `rope_scaling` of these values in config.json gives. Raises ConfigError for positions with
    factors of their own for each dimension."""
    if rope.kind not in ("default", "linear", "yarn"):
        raise ConfigError(
            f"rope_scaling={scaling.kind}: the model's positions are of type {rope.kind}, whose "
            "factors belong to the model.",
            hint="leave --rope-scaling at auto; --context sets the window",
        )
    usual = rope.original_tokens if rope.kind == "yarn" else max_tokens
    original = scaling.original_tokens or usual
    part = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": original,
    }
    raw = JsonObject("--rope-scaling", {"max_position_embeddings": max_tokens})
    plain = Rope(scaling.kind, rope.theta, partial_rotary_factor=rope.partial_rotary_factor)
    found = _scaled(raw, JsonObject(raw.where, part), plain)
    return found, max(max_tokens, int(original * scaling.factor))


def check_rotary(where: str, rope: Rope, head_dim: int) -> None:
    """Raise CheckpointError unless `rope` fits heads of this size."""
    dim = rope.rotary_dim(head_dim)
    for name, value in (("head_dim", head_dim), ("the rotated part of a head", dim)):
        if value % 2 or value < 1:
            raise contradictory(where, f"{name} must be even for rotary positions, got {value}")
    if rope.kind != "longrope":
        return
    for name, factors in (("short", rope.short_factors), ("long", rope.long_factors)):
        if len(factors) != dim // 2 and (factors or name == "short"):
            raise contradictory(
                where,
                f"{name}_factor has {len(factors)} numbers, but {dim} rotated "
                f"dimensions of a head need {dim // 2}",
            )


def _kind(part: JsonObject, rules: RopeRules) -> str:
    if any(isinstance(value, dict) for value in part.values.values()):
        raise unsupported(part.where, "rope settings per kind of layer are not supported")
    name = part.text("rope_type", part.text("type", "default"))
    if name not in rules.kinds:
        raise CheckpointError(
            f"{part.where}: rope type {name!r} is not supported.",
            hint=did_you_mean(name, rules.kinds),
        )
    return rules.kinds[name]


def _partial(raw: JsonObject, part: JsonObject, rules: RopeRules) -> float:
    key = "partial_rotary_factor"
    found = part.number(key, raw.number(key, 1.0))
    if found != 1.0 and not rules.partial:
        raise unsupported(
            raw.where, f"{key} is not supported for model_type {raw.text('model_type')!r}"
        )
    if found > 1:
        raise CheckpointError(f"{raw.where}: {key} must be at most 1, got {found}.")
    return found


def _scaled(raw: JsonObject, part: JsonObject, plain: Rope) -> Rope:
    if plain.kind == "default":
        return plain
    if plain.kind in ("linear", "proportional"):
        usual = 1.0 if plain.kind == "proportional" else None
        return replace(plain, factor=part.number("factor", usual))
    max_tokens = raw.integer("max_position_embeddings")
    pretrained = part.integer("original_max_position_embeddings", max_tokens)
    original = raw.integer("original_max_position_embeddings", pretrained)
    rope = replace(plain, original_tokens=original)
    if rope.kind == "yarn":
        return _yarn(part, rope, max_tokens)
    if rope.kind == "longrope":
        return _longrope(part, rope, max_tokens)
    return replace(
        rope,
        factor=part.number("factor"),
        low_freq_factor=part.number("low_freq_factor"),
        high_freq_factor=part.number("high_freq_factor"),
    )


def _yarn(part: JsonObject, rope: Rope, max_tokens: int) -> Rope:
    """Peng et al., "YaRN", 2023; the attention factor is inferred when the file has none."""
    if "factor" not in part.values:
        raise CheckpointError(f"{part.where}: the key factor is missing.")
    factor = part.number("factor", max_tokens / rope.original_tokens)
    inferred = _mscale(factor, 1.0)
    if _is_set(part, "mscale") and _is_set(part, "mscale_all_dim"):
        whole = _mscale(factor, part.number("mscale_all_dim"))
        inferred = _mscale(factor, part.number("mscale")) / whole
    return replace(
        rope,
        factor=factor,
        beta_fast=part.number("beta_fast", 32.0),
        beta_slow=part.number("beta_slow", 1.0),
        truncate=part.flag("truncate", default=True),
        attention_factor=part.number("attention_factor", inferred),
    )


def _is_set(part: JsonObject, key: str) -> bool:
    return part.values.get(key) not in (None, 0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(part: JsonObject, rope: Rope, max_tokens: int) -> Rope:
    """Ding et al., "LongRoPE", 2024: short factors for texts within the original window.

    For longer texts the long factors hold for all positions, also of keys already in memory; so
    loading decides which factors hold. The attention factor is always that of the whole range.
    """
    original = rope.original_tokens
    if original < 2:
        raise CheckpointError(
            f"{part.where}: original_max_position_embeddings must be above 1 for longrope, "
            f"got {original}."
        )
    factor = part.number("factor", max_tokens / original)
    inferred = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        rope,
        factor=factor,
        short_factors=part.numbers("short_factor"),
        long_factors=part.numbers("long_factor") if part.has("long_factor") else (),
        attention_factor=part.number("attention_factor", inferred),
    )
