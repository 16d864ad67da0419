"""Sizes and limits of a transformers model, known before its weights are read.

transformers reads config.json, so defaults and names of keys are its own. A survey of the model
without weights (transformers.py) finds out what its layers really cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from outrider.core.errors import CheckpointError
from outrider.core.spec import DecoderConfig, ModelSpec
from outrider.models.checkpoint import CONFIG, GENERATION, Checkpoint
from outrider.models.json_object import JsonObject, bounded_window, stop_ids, unsupported
from outrider.plugins.transformers.transformers import Anatomy, read_hf_config, survey, transformers

_FFN_KEYS = ("intermediate_size", "ffn_dim", "n_inner")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_ACTIVE_KEYS = ("num_experts_per_tok", "moe_top_k", "moe_topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig(DecoderConfig):
    """Sizes of a decoder of transformers; attention is the model's own within `max_tokens`."""

    num_weights: int
    num_experts: int = 0
    num_active_experts: int = 0
    expert_parameters: int = 0

    @property
    def num_parameters(self) -> int:
        return self.num_weights

    def spec(self, name: str, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelSpec:
        sizes = {"bytes_per_weight": bytes_per_weight, "bytes_per_kv": bytes_per_kv}
        plain = DecoderConfig.spec(self, name, **sizes)
        return replace(
            plain,
            num_experts=self.num_experts,
            num_active_experts=self.num_active_experts,
            expert_parameters=self.expert_parameters,
        )


def read_adapter_config(checkpoint: Checkpoint) -> AdapterConfig:
    """Read `config.json` and, if there is one, `generation_config.json`.

    Raises CheckpointError if transformers is missing or the adapter cannot run such a model.
    """
    raw = checkpoint.document(CONFIG)
    hf = read_hf_config(raw)
    text = hf.get_text_config(decoder=True)
    anatomy = _survey(raw, hf)
    max_tokens, notes = _window(raw.where, text, anatomy.local)
    family = raw.text("model_type")
    version = transformers(family).__version__
    return AdapterConfig(
        family=family,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        ffn_size=_first(text, _FFN_KEYS) or 4 * text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=anatomy.num_heads,
        num_kv_heads=anatomy.num_kv_heads,
        head_dim=anatomy.head_dim,
        max_tokens=max_tokens,
        num_weights=anatomy.num_parameters,
        **_experts(text, anatomy),
        tie_word_embeddings=bool(text.tie_word_embeddings),
        stop_ids=_stop_ids(raw, text, checkpoint),
        dtype=str(text.dtype or "").removeprefix("torch."),
        notes=(f"{family} runs through transformers {version}, over Outrider's arena", *notes),
    )


def _first(text: Any, keys: Sequence[str]) -> int | None:
    """The value of the first of `keys` that `text` has."""
    return next((size for key in keys if (size := getattr(text, key, None))), None)


def _experts(text: Any, anatomy: Anatomy) -> dict[str, int]:
    """Sizes of a mixture as fields of AdapterConfig; unknown keys make a dense model."""
    many, active = _first(text, _EXPERT_KEYS), _first(text, _ACTIVE_KEYS)
    if not (many and active and anatomy.expert_parameters):
        return {}
    return {
        "num_experts": many,
        "num_active_experts": min(active, many),
        "expert_parameters": anatomy.expert_parameters,
    }


def _survey(raw: JsonObject, hf: Any) -> Anatomy:
    try:
        return survey(hf)
    except CheckpointError as error:
        raise CheckpointError(f"{raw.where}: {error}", hint=error.hint) from error


def _window(where: str, text: Any, local: int | None) -> tuple[int, tuple[str, ...]]:
    """The window in which the arena's attention equals the model's own, and notes on it.

    The window ends where a local mask hides a token, or where rotary frequencies change with the
    length of a text, which would need its older keys rotated again.
    """
    max_tokens = getattr(text, "max_position_embeddings", None)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise unsupported(where, "it does not say how many positions the model has")
    limits = {"its local attention": local or max_tokens}
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or max_tokens
            limits["the short factors of its rotary embedding"] = int(cast("int", original))
    reason = min(limits, key=lambda name: limits[name])
    if limits[reason] >= max_tokens:
        return bounded_window(max_tokens)
    note = f"the window is {limits[reason]} tokens, not {max_tokens}: so far reaches {reason}"
    return limits[reason], (note,)


def _ropes(parameters: object) -> Iterator[Mapping[str, object]]:
    """One set of rotary parameters, or one for each kind of layer."""
    if isinstance(parameters, Mapping):
        found = cast("Mapping[str, object]", parameters)
        yield found
        for part in found.values():
            yield from _ropes(part)


def _stop_ids(raw: JsonObject, text: Any, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Stop ids of both files; a family may have an end-of-text id that config.json leaves out."""
    own = JsonObject(raw.where, {"eos_token_id": getattr(text, "eos_token_id", None)})
    more = checkpoint.document(GENERATION) if checkpoint.has(GENERATION) else None
    return stop_ids(text.vocab_size, own, more)
