"""What a folder of EAGLE heads says of itself, and whether it fits a target.

Published heads call themselves a Llama of one layer, so the sizes of the layer are read as those of
a Llama; the `speculators` library puts them into `transformer_layer_config`. EAGLE 3 adds
`draft_vocab_size`, the number of ids that it drafts, and some trainers `norm_before_residual`.
Which layers of the target are read is models/heads.py's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import CheckpointError, VocabularyError
from outrider.core.spec import ModelSpec
from outrider.models.families import LlamaConfig, parse_llama
from outrider.models.heads import is_eagle3
from outrider.models.json_object import JsonObject

_OTHER_TARGET = (
    "choose heads that were trained for this very target, or train some: `outrider train eagle`"
)


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """`layer` has the sizes of the one layer; its window is what the heads were trained on.

    `fused` heads (EAGLE 3) read several layers of the target and have a vocabulary of
    `draft_vocab_size`; others read what the target's output head reads, and use that head.
    `norm_before_residual` says that the residual starts from the normed state.
    """

    layer: LlamaConfig
    fused: bool
    draft_vocab_size: int
    norm_before_residual: bool = False


def read_eagle_config(folder: Path, target: ModelSpec) -> EagleConfig:
    """Raises CheckpointError for a file that is wrong or says it belongs to another target, and
    VocabularyError if its ids mean other text."""
    raw = JsonObject.read(folder / "config.json")
    layer = parse_llama(_as_llama(raw))
    fused = is_eagle3(raw)
    _check_sizes(raw.where, layer, target)
    if layer.num_layers != 1:
        raise CheckpointError(
            f"{raw.where}: num_hidden_layers is {layer.num_layers}; EAGLE heads have one layer.",
            hint="is it a folder of heads? A draft model goes without --drafter eagle",
        )
    draft_vocab_size = raw.integer("draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > target.vocab_size:
        raise VocabularyError(
            f"{raw.where}: draft_vocab_size {draft_vocab_size} is above the target's vocabulary of "
            f"{target.vocab_size}.",
            hint=_OTHER_TARGET,
        )
    return EagleConfig(
        layer=layer,
        fused=fused,
        draft_vocab_size=draft_vocab_size if fused else target.vocab_size,
        norm_before_residual=raw.flag("norm_before_residual", default=False),
    )


def config_values(config: EagleConfig, hidden_layers: tuple[int, ...]) -> dict[str, object]:
    """What `config.json` holds for heads that were trained here."""
    layer = config.layer
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.ffn_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": layer.max_tokens,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope.theta,
        "tie_word_embeddings": False,
        "hidden_layers": list(hidden_layers),
        "eagle_aux_hidden_state_layer_ids": list(hidden_layers),
    }


def _as_llama(raw: JsonObject) -> JsonObject:
    """Its layer is a Llama's, whatever the heads call themselves, and wherever it is described."""
    layer = raw.child("transformer_layer_config")
    described: Mapping[str, object] = layer.values if layer else {}
    return JsonObject(raw.where, {**raw.values, **described, "model_type": "llama"})


def _check_sizes(where: str, layer: LlamaConfig, target: ModelSpec) -> None:
    if layer.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{where}: the heads have hidden_size {layer.hidden_size}, the target "
            f"{target.hidden_size}.",
            hint=_OTHER_TARGET,
        )
    if layer.vocab_size != target.vocab_size:
        raise VocabularyError(
            f"{where}: the heads know {layer.vocab_size} ids and the target {target.vocab_size}.",
            hint=_OTHER_TARGET,
        )
