"""From a configuration to the drafter that it means."""

from __future__ import annotations

from typing import cast

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.noise import pick_node, race_node
from outrider.core.protocols import Drafter
from outrider.drafters.ahead import build
from outrider.drafters.ahead.choices import AheadChoices
from outrider.drafters.ahead.fallback import Kind
from outrider.drafters.ahead.forecast import Policy
from outrider.drafters.ahead.room import AheadRoom, room_needed
from outrider.drafters.ahead.tree import Drawing
from outrider.drafters.bridge import BridgeDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.process.client import Home, ProcessDrafter
from outrider.engine.parts import Parts


def resolve_drafter(config: EngineConfig, *, has_draft: bool) -> str:
    """The drafter that `config` means. Raises ConfigError if it needs a draft model, or cannot live
    in a process."""
    if config.k == 0:
        return "none"
    if config.drafter == "auto":
        return "model" if has_draft else "ngram"
    if config.drafter in ("model", "bridge") and not has_draft:
        raise ConfigError(
            f"drafter {config.drafter!r} needs a draft model, and none was given.",
            hint="name one with --draft, or use --drafter ngram; `outrider pairs` lists pairs",
        )
    if config.drafter == "bridge" and config.drafter_home == "process":
        raise ConfigError(
            "a draft model with another vocabulary cannot live in a process of its own.",
            hint="leave --drafter-home at thread",
        )
    return config.drafter


def ahead_room(config: EngineConfig, *, ahead: bool) -> AheadRoom:
    """What the draft model's memory needs besides, nothing if it does not draft `ahead`."""
    if not ahead:
        return AheadRoom(0, 0, 0)
    return room_needed(config.k, config.fan_out, config.batch_size)


def ahead_choices(config: EngineConfig) -> AheadChoices:
    """What the settings decide about drafting ahead."""
    return AheadChoices(
        k=config.k,
        fan_out=config.fan_out,
        policy=cast("Policy", config.fan_policy),
        fallback=cast("Kind", config.fallback),
        saguaro=config.saguaro,
        force_hits=config.force_hits,
        max_ngram=config.max_ngram,
        min_ngram=config.min_ngram,
    )


def build_drafter(config: EngineConfig, parts: Parts, *, ahead: bool) -> Drafter:
    """With `ahead` a draft model prepares for verdicts; other drafters have no use for that."""
    match resolve_drafter(config, has_draft=parts.has_draft):
        case "model" if parts.child is not None:
            home = Home(timeout=config.drafter_timeout, laws_device=parts.laws_device)
            drafter = ProcessDrafter(parts.child, home)
            drafter.wait_ready()
            return drafter
        case "model":
            return _with_model(config, parts, ahead=ahead)
        case "bridge":
            assert parts.draft is not None
            assert parts.translator is not None
            return BridgeDrafter(
                parts.draft,
                parts.argmax,
                parts.translator,
                chunk=config.prefill_chunk,
                page_size=config.page_size,
            )
        case "prediction":
            return PredictionDrafter()
        case "ngram":
            return NgramDrafter(max_n=config.max_ngram, min_n=config.min_ngram)
        case _:
            return NoDrafter()


def _with_model(config: EngineConfig, parts: Parts, *, ahead: bool) -> Drafter:
    assert parts.draft is not None
    # Drafts agree most with the coupled rule's draws when both race with the same numbers.
    draw = race_node if config.sampler == "coupled" else pick_node
    drawing = Drawing(parts.argmax, draw, parts.sampling)
    if not ahead:
        return build.in_turns(parts.draft, drawing, chunk=config.prefill_chunk)
    room = ahead_room(config, ahead=True)
    choices = ahead_choices(config)
    return build.ahead(parts.draft, drawing, choices, room, chunk=config.prefill_chunk)
