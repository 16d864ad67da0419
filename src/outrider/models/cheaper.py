"""Cheaper copies of a loaded target that draft in its memory: fewer bits, or fewer layers.

A quantised copy reads the checkpoint once more and holds its matrices as integers; norms, biases,
positions and the table of tokens are as they were. A copy with fewer layers holds nothing of its
own but buffers. Either reads the keys and values that the target's own layers left, so what it
computes is near to the target's as long as its residual is.

Layers are left out as a user names them. Where none are named they are spread over the middle:
first and last layers change the residual most. (Zhang et al. 2023, "Draft & Verify", search for the
best set; `outrider bench drafters` compares those you name.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.core.protocols import CausalLM
from outrider.kernels.registry import choose
from outrider.models.llama import CheaperParts, LlamaModel
from outrider.models.llama_config import LLAMA_FAMILIES
from outrider.models.llama_weights import read_layer
from outrider.models.weight_reader import Placement, WeightReader
from outrider.models.weights import Weights

# Of the layers, where the settings name none: one in so many is left out.
SKIP_ONE_IN = 4
_RANGE = re.compile(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Cheaper:
    """How a target drafts for itself: `quantise` is none, int8 or int4; `skipped` are the layers
    that it leaves out. `folder` is its checkpoint."""

    folder: Path
    quantise: str = "none"
    skipped: tuple[int, ...] = ()
    force_reference: bool = False
    threads: int = 0

    def of(self, target: CausalLM) -> LlamaModel:
        """Load it over the memory of `target`. Raises ConfigError for a target that cannot be
        copied so, CheckpointError if its files changed."""
        if not isinstance(target, LlamaModel):
            raise ConfigError(
                "this target cannot draft for itself: only our own decoders of the Llama family "
                "can, in one process.",
                hint=f"choose another --drafter, or a target of: {', '.join(LLAMA_FAMILIES)}",
            )
        depths = [d for d in range(target.config.num_layers) if d not in self.skipped]
        if self.quantise == "none":
            return target.cheaper(_fewer_layers(target, depths))
        return target.cheaper(self._quantised(target, depths))

    def _quantised(self, target: LlamaModel, depths: Sequence[int]) -> CheaperParts:
        config, arena = target.config, target.state.arena
        kernels = choose(
            device=arena.device,
            dtype=arena.dtype,
            force_reference=self.force_reference,
            threads=self.threads,
            quantise=self.quantise,
        )
        place = Placement(target.spec.name, arena.dtype, arena.device, self.quantise)
        own = target.layers
        with Weights(self.folder) as weights:
            reader = WeightReader(weights, kernels, place)
            return CheaperParts(
                kernels=kernels,
                head=reader.head(target.tables.embedding_VD, tied=config.tie_word_embeddings),
                layers=[
                    read_layer(reader, config, depth) if depth in depths else own[depth]
                    for depth in range(config.num_layers)
                ],
                depths=depths,
            )


def _fewer_layers(target: LlamaModel, depths: Sequence[int]) -> CheaperParts:
    if target.kernels.twin is None:
        raise ConfigError(
            "drafter 'layer-skip': these kernels serve one model at a time.",
            hint="choose another --drafter",
        )
    return CheaperParts(target.kernels.twin(), target.tables.head, target.layers, depths)


def skipped_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """The layers that `text` names, as in "2,5-7"; if it names none, some of the middle.

    Raises ConfigError for what names no layer of `num_layers`, or leaves none.
    """
    if not text.strip():
        return tuple(range(SKIP_ONE_IN // 2, num_layers - 1, SKIP_ONE_IN))
    named: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < num_layers:
            raise ConfigError(
                f"skip_layers: {part.strip()!r} names no layers of a model that has layers 0 to "
                f"{num_layers - 1}.",
                hint="name some as in --skip-layers 2,5-7",
            )
        named |= set(range(first, last + 1))
    if len(named) == num_layers:
        raise ConfigError(
            f"skip_layers={text!r} leaves none of {num_layers} layers.",
            hint="leave out fewer of them",
        )
    return tuple(sorted(named))
