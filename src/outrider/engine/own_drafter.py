"""The drafters with which a target drafts for itself: what the settings say of them, and building.

Checked before weights are read: that the target is one that can, and that the layers exist.
"""

from __future__ import annotations

from pathlib import Path

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.rng import pick_node, race_node
from outrider.drafters.self_draft import Cheaper, SelfDrafter, skipped_layers
from outrider.engine.parts import Parts
from outrider.models.families import LLAMA_FAMILIES, LlamaConfig
from outrider.models.hf_config import DecoderConfig

QUANTISED, FEWER_LAYERS = "quantised-self", "layer-skip"


def own_copy(
    config: EngineConfig, drafter: str, folder: Path, target: DecoderConfig
) -> Cheaper | None:
    """The copy of the target in `folder` that `drafter` asks for, if it asks for one.

    Raises ConfigError for a target that cannot draft for itself, or layers that it lacks.
    """
    if drafter not in (QUANTISED, FEWER_LAYERS):
        return None
    if not isinstance(target, LlamaConfig):
        raise ConfigError(
            f"drafter {drafter!r}: a model of type {target.family} cannot draft for itself.",
            hint=f"choose another --drafter, or a target of: {', '.join(LLAMA_FAMILIES)}",
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"drafter {drafter!r}: a target that processes share cannot draft for itself.",
            hint="leave --tensor-parallel at 1, or choose another --drafter",
        )
    skipped: tuple[int, ...] = ()
    if drafter == FEWER_LAYERS or config.skip_layers:
        skipped = skipped_layers(config.skip_layers, target.num_layers)
    return Cheaper(
        folder=folder,
        quantise=config.self_quantise if drafter == QUANTISED else "none",
        skipped=skipped,
        force_reference=config.force_reference,
        threads=config.threads,
    )


def build_own(config: EngineConfig, parts: Parts) -> SelfDrafter:
    """The drafter that `parts.own` describes, with its model loaded over the target's memory."""
    if parts.own is None:
        raise ConfigError(
            f"drafter {config.drafter!r} needs the target's checkpoint, and there is none.",
            hint="load the target from a folder, or choose another --drafter",
        )
    # Drafts agree most with the coupled rule's draws when both race with the same numbers.
    draw = race_node if config.sampler == "coupled" else pick_node
    model = parts.own.of(parts.target)
    sampling = model.kernels.sampling
    return SelfDrafter(
        model, model.kernels.argmax, name=config.drafter, draw=draw, sampling=sampling
    )
