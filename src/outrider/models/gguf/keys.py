"""Metadata keys below an architecture's name: those that are read, and what others would change.

A key that llama.cpp reads for an architecture, or that another model of the same name has, and
that is not read here, is refused unless its value changes nothing. Any other unknown key is noted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from outrider.core.errors import CheckpointError
from outrider.models.gguf.reader import Header, Texts
from outrider.models.json_object import OTHER_CHECKPOINT

MIXTURES, GEMMAS = ("qwen2moe", "qwen3moe", "gpt-oss"), ("gemma2", "gemma3")
# Architectures whose layers differ in windows and in the base of their positions.
MIXED_WINDOWS = (*GEMMAS, "gpt-oss")
_READ = frozenset((
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    # They change nothing.
    "rope.scaling.finetuned", "tensor_data_layout",
))  # fmt: skip
# Keys of some architectures only.
_READ_BY: Mapping[str, tuple[str, ...]] = {
    "expert_count": MIXTURES,
    "expert_used_count": MIXTURES,
    "expert_feed_forward_length": MIXTURES,
    "expert_shared_feed_forward_length": ("qwen2moe",),
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": GEMMAS,
    "attention.sliding_window_pattern": MIXED_WINDOWS,
    "rope.freq_base_swa": MIXED_WINDOWS,
}
# Values that change nothing, besides 0 and false. None stands for another key's value.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (),
    "attention.max_alibi_bias": (),
    "attention.scale": (),
    "attention.temperature_scale": (),
    "attn_logit_softcapping": (),
    "embedding_scale": (1,),
    "expert_count": (),
    "expert_group_count": (1,),
    "expert_used_count": (),
    "expert_weights_scale": (1,),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "nextn_predict_layers": (),
    "residual_scale": (1,),
    "rope.scaling.alpha": (),
    "rope.scaling.yarn_log_multiplier": (),
    "use_parallel_residual": (),
}
# Sizes that sliding layers, or what the model gives out, have of their own, and the usual ones.
_SAME_AS = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "embedding_length_out": "embedding_length",
    "rope.dimension_count_swa": "rope.dimension_count",
}


def refuse_keys(header: Header, arch: str, sizes: Mapping[str, int]) -> None:
    """Raise CheckpointError for a key that is not read and changes the logits. `sizes` are those
    of the model by their keys."""
    for key, value in _own_keys(header, arch).items():
        if _is_read(key, arch):
            continue
        neutral = (sizes[_SAME_AS[key]],) if key in _SAME_AS else _NEUTRAL.get(key)
        if neutral is not None and not _is_neutral(key, value, neutral):
            raise CheckpointError(
                f"{header.path}: {arch}.{key} {_shown(value)} is not supported.",
                hint=OTHER_CHECKPOINT,
            )


def notes_on_keys(header: Header, arch: str) -> tuple[str, ...]:
    """A note that names the keys that nobody here knows."""
    known = _NEUTRAL.keys() | _SAME_AS.keys()
    unknown = sorted(
        f"{arch}.{key}"
        for key in _own_keys(header, arch)
        if key not in known and not _is_read(key, arch)
    )
    if not unknown:
        return ()
    more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
    return (f"the file has settings that are not read: {', '.join(unknown[:_MAX_NAMED])}{more}",)


_MAX_NAMED = 5


def _own_keys(header: Header, arch: str) -> dict[str, object]:
    prefix = f"{arch}."
    return {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }


def _is_read(key: str, arch: str) -> bool:
    return key in _READ or arch in _READ_BY.get(key, ())


def _is_neutral(key: str, value: object, neutral: tuple[object, ...]) -> bool:
    if isinstance(value, Texts | str | list):
        return False
    if key == "attention.causal":
        return value is True
    return all(not one or one in neutral for one in np.ravel(np.asarray(value)).tolist())


def _shown(value: object) -> str:
    return f"of {len(value)} texts" if isinstance(value, Texts) else f"{value!r:.40}"
