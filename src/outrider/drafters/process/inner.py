"""The drafter inside a drafter's process, built from its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outrider.core.env import make_cublas_deterministic
from outrider.core.noise import Pick, pick_node, race_node
from outrider.core.protocols import DraftAhead, Drafter
from outrider.drafters.ahead.drafter import AheadDrafter, AheadOptions
from outrider.drafters.ahead.room import room_needed
from outrider.drafters.ahead.saguaro import Saguaro
from outrider.drafters.ahead.tree import Drawing
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.process.options import AheadChoices, ChildOptions
from outrider.models.decoder import Decoder, Room
from outrider.models.loading import LoadOptions, load_model


@dataclass(frozen=True, slots=True)
class Inner:
    """`pick` is what its noise draws with. `ahead` is the drafter again if it can draft ahead."""

    drafter: Drafter
    vocab_size: int
    pick: Pick
    ahead: DraftAhead | None = None


def build_inner(options: ChildOptions) -> Inner:
    """Load the draft model and wire it. Raises what `load_model` does."""
    if options.deterministic:
        make_cublas_deterministic()
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = load_model(Path(options.folder), _load_options(options), name=options.name)
    drawing = Drawing(
        model.kernels.argmax,
        race_node if options.draw == "race" else pick_node,
        model.kernels.sampling,
        _saguaro(options.ahead),
    )
    drafter = ModelDrafter(
        model,
        drawing.argmax,
        chunk=options.chunk,
        draw=drawing.draw,
        sampling=drawing.sampling,
        change=drawing.change,
    )
    inner = Inner(drafter, model.spec.vocab_size, drawing.sampling.pick)
    if options.ahead is None:
        return inner
    ahead = _ahead(model, drafter, drawing, options, options.ahead)
    return replace(inner, drafter=ahead, ahead=ahead)


def _load_options(options: ChildOptions) -> LoadOptions:
    room = Room(
        num_slots=options.num_slots,
        page_size=options.page_size,
        max_rows=options.max_rows,
        max_logits=options.max_logits,
    )
    return LoadOptions(
        room=room,
        dtype=options.dtype,
        device=options.device,
        force_reference=options.force_reference,
        threads=options.threads,
    )


def _saguaro(choices: AheadChoices | None) -> Saguaro | None:
    if choices is None or choices.saguaro == 1:
        return None
    return Saguaro.planned(choices.saguaro, budget=choices.fan_out, depth=choices.k)


def _ahead(
    model: Decoder,
    jit: ModelDrafter,
    drawing: Drawing,
    options: ChildOptions,
    choices: AheadChoices,
) -> AheadDrafter:
    needed = room_needed(choices.k, choices.fan_out, 1)
    room = replace(needed, num_rows=options.max_rows, num_logits=options.max_logits)
    wished = AheadOptions(
        room=room,
        fan_out=choices.fan_out,
        policy=choices.policy,
        fallback=choices.fallback,
        force_hits=choices.force_hits,
    )
    fast = NgramDrafter(max_n=choices.max_ngram, min_n=choices.min_ngram)
    return AheadDrafter(model, jit, drawing, wished, fast=fast)
