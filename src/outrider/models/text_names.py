"""Names of a text model's tensors, by itself or within a model for text and pictures."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

# Beginnings of the names of a text model and of its output head.
_PREFIXES = (
    ("model.", "lm_head."),
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
)
_EMBEDDING = "embed_tokens.weight"
# Names of the table of tokens in all families' files.
EMBEDDINGS = (
    *(f"{prefix}{_EMBEDDING}" for prefix, _ in _PREFIXES),
    "transformer.wte.weight",
    "wte.weight",
)
# Prefixes of the other tensors of a model for text and pictures.
VISION_PREFIXES = tuple(
    f"{outer}{part}"
    for outer in ("model.", "")
    for part in ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.")
)


@dataclass(frozen=True, slots=True)
class TextNames:
    """The prefixes that the files have instead of `model.` and `lm_head.`."""

    model: str = "model."
    head: str = "lm_head."

    @classmethod
    def of(cls, weights: Container[str]) -> TextNames:
        """The names of the files; plain names if the files have no table of tokens."""
        found = (pair for pair in _PREFIXES if f"{pair[0]}{_EMBEDDING}" in weights)
        return cls(*next(found, _PREFIXES[0]))

    def stored(self, name: str) -> str:
        for plain, own in (("model.", self.model), ("lm_head.", self.head)):
            if name.startswith(plain):
                return own + name.removeprefix(plain)
        return name


def without_mtp(names: Iterable[str], config: Any) -> list[str]:
    """`names` without those of MTP blocks, which are numbered on after the last layer. `config`,
    the settings of transformers, has the number of blocks."""
    text = config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    num_blocks = getattr(text, "num_nextn_predict_layers", None) or 0
    behind = range(num_layers, num_layers + num_blocks)
    blocks = tuple(f"{prefix}layers.{index}." for prefix, _ in _PREFIXES for index in behind)
    return [name for name in names if not name.startswith(blocks)]
