"""The drafter inside a drafter's process, built from its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.core.protocols import DraftAhead, Drafter
from outrider.core.rng import Pick, pick_node, race_node
from outrider.drafters.ahead.build import ahead, in_turns
from outrider.drafters.ahead.room import room_needed
from outrider.drafters.ahead.tree import Drawing
from outrider.drafters.process.options import ChildOptions
from outrider.models.decoder import Room
from outrider.models.loading import LoadOptions, load_model, prepare_torch


@dataclass(frozen=True, slots=True)
class Inner:
    """`pick` is what its noise draws with. `ahead` is the drafter again if it can draft ahead."""

    drafter: Drafter
    vocab_size: int
    pick: Pick
    ahead: DraftAhead | None = None


def build_inner(options: ChildOptions) -> Inner:
    """Load the draft model and wire it. Raises what `load_model` does."""
    prepare_torch(deterministic=options.deterministic, threads=options.threads)
    model = load_model(Path(options.folder), _load_options(options), name=options.name)
    kernels = model.kernels
    draw = race_node if options.draw == "race" else pick_node
    drawing = Drawing(kernels.argmax, draw, kernels.sampling)
    size, pick, choices = model.spec.vocab_size, kernels.sampling.pick, options.ahead
    if choices is None:
        return Inner(in_turns(model, drawing, chunk=options.chunk), size, pick)
    needed = room_needed(choices.k, choices.fan_out, 1)
    room = replace(needed, num_rows=options.max_rows, num_logits=options.max_logits)
    drafter = ahead(model, drawing, choices, room, chunk=options.chunk)
    return Inner(drafter, size, pick, drafter)


def _load_options(options: ChildOptions) -> LoadOptions:
    room = Room(
        num_slots=options.num_slots,
        page_size=options.page_size,
        max_rows=options.max_rows,
        max_logits=options.max_logits,
    )
    states = replace(room.states, **dict[str, Any](options.states))
    return LoadOptions(
        room=replace(room, states=states),
        dtype=options.dtype,
        device=options.device,
        force_reference=options.force_reference,
        threads=options.threads,
    )
