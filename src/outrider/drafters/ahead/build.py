"""A draft model's drafter, in turns or ahead, wherever it lives."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

from outrider.core.protocols import CausalLM
from outrider.drafters.ahead.choices import AheadChoices
from outrider.drafters.ahead.drafter import AheadDrafter, AheadOptions
from outrider.drafters.ahead.room import AheadRoom
from outrider.drafters.ahead.saguaro import Saguaro
from outrider.drafters.ahead.tree import Drawing
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter


@runtime_checkable
class Foretold(Protocol):
    """A model whose words can be had without its work, for study."""

    def without_cost(self) -> CausalLM:
        """One that says the same and takes no time, with a memory of its own."""
        ...


def in_turns(model: CausalLM, drawing: Drawing, *, chunk: int) -> ModelDrafter:
    """Drafts with `model` as `drawing` says; reads at most `chunk` prompt tokens in one pass."""
    return ModelDrafter(
        model,
        drawing.argmax,
        chunk=chunk,
        draw=drawing.draw,
        sampling=drawing.sampling,
        change=drawing.change,
    )


def ahead(
    model: CausalLM, drawing: Drawing, choices: AheadChoices, room: AheadRoom, *, chunk: int
) -> AheadDrafter:
    """The same, ahead of verdicts too, in the `room` that the model was given."""
    if choices.saguaro < 1:
        change = Saguaro.planned(choices.saguaro, budget=choices.fan_out, depth=choices.k)
        drawing = replace(drawing, change=change)
    free = None
    if choices.force_hits >= 0 and isinstance(model, Foretold):
        free = in_turns(model.without_cost(), drawing, chunk=chunk)
    options = AheadOptions(
        room=room,
        fan_out=choices.fan_out,
        policy=choices.policy,
        fallback=choices.fallback,
        force_hits=choices.force_hits,
        free=free,
        always=choices.always,
    )
    fast = NgramDrafter(max_n=choices.max_ngram, min_n=choices.min_ngram)
    return AheadDrafter(model, in_turns(model, drawing, chunk=chunk), drawing, options, fast=fast)
