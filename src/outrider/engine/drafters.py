"""Which drafter a configuration means, and building it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, ContractError
from outrider.core.protocols import Drafter
from outrider.core.rng import pick_node, race_node
from outrider.drafters.ahead import drafter as build
from outrider.drafters.ahead.choices import AheadChoices, AheadRoom, room_needed
from outrider.drafters.ahead.forecast import Kind, Policy
from outrider.drafters.ahead.tree import Drawing
from outrider.drafters.bridge import BridgeDrafter
from outrider.drafters.growth import pick_in_tree, race_in_tree
from outrider.drafters.model import ModelTreeDrafter
from outrider.drafters.native import model_trees
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.process.client import Home, ProcessDrafter
from outrider.engine.drafter_builders import (
    FEWER_LAYERS,
    QUANTISED,
    Parts,
    build_own,
    build_portfolio,
    build_recycling,
    build_suffix,
    build_with_heads,
    build_without_weights,
)
from outrider.models.heads import HEAD_KINDS, MAX_WIDTH, DraftKind

# Whatever the nodes of a draft may be, these draft chains.
CHAINS_ONLY = (
    "bridge", "ngram", "prediction", "eagle-lite", QUANTISED, FEWER_LAYERS,
)  # fmt: skip


def resolve_drafter(config: EngineConfig, *, has_draft: bool, kind: DraftKind = "model") -> str:
    """The drafter that `config` means, where a draft is a model or heads of this `kind`.

    Raises ConfigError if it needs a draft model or heads of another kind, or cannot live in a
    process."""
    if config.k == 0:
        return "none"
    if config.drafter == "auto":
        return kind if has_draft else "ngram"
    if config.drafter == "portfolio":
        return _portfolio_name(config, has_draft=has_draft)
    wanted = "model" if config.drafter == "bridge" else config.drafter
    if wanted in ("model", *HEAD_KINDS) and not (has_draft and wanted == kind):
        raise _no_source(config.drafter, wanted, kind if has_draft else None)
    if config.drafter == "bridge" and config.drafter_home == "process":
        raise ConfigError(
            "a draft model with another vocabulary cannot live in a process of its own.",
            hint="leave --drafter-home at thread",
        )
    return config.drafter


def _portfolio_name(config: EngineConfig, *, has_draft: bool) -> str:
    """Without a draft a portfolio is its lookups."""
    if has_draft and config.drafter_home == "process":
        raise ConfigError(
            "the draft model of a portfolio cannot live in a process of its own.",
            hint="leave --drafter-home at thread",
        )
    return "portfolio" if has_draft else "lookup"


def _no_source(drafter: str, wanted: str, given: DraftKind | None) -> ConfigError:
    """What a drafter reads is missing, or --draft names something else."""
    names = {"model": "a draft model", "mtp": "an MTP block"}
    needed = names.get(wanted, f"{wanted} heads")
    if given is None:
        made = "draft" if wanted == "model" else wanted
        return ConfigError(
            f"drafter {drafter!r} needs {needed}, and none was given.",
            hint="name a folder with --draft; `outrider draft suggest TARGET` says what there is, "
            f"`outrider train {made}` makes one, --drafter ngram needs none",
        )
    return ConfigError(
        f"drafter {drafter!r} needs {needed}, and --draft names {names.get(given, given)}.",
        hint="leave --drafter at auto, which follows --draft, or name another folder",
    )


def ahead_room(config: EngineConfig, *, ahead: bool) -> AheadRoom:
    """What the draft model's memory needs besides, for drafting `ahead` or for trees."""
    if not ahead and branches(config):
        rows = config.batch_size * MAX_WIDTH
        return AheadRoom(rows, rows, config.k * MAX_WIDTH)
    if not ahead:
        return AheadRoom(0, 0, 0)
    return room_needed(config.k, config.fan_out, config.batch_size)


def branches(config: EngineConfig) -> bool:
    """Whether drafts are trees, where the drafter can branch."""
    return config.tree_nodes > config.k


def never_branches(config: EngineConfig, drafter: Drafter) -> bool:
    """Whether `drafter` never branches, whatever the budget."""
    if not branches(config) or drafter.name in CHAINS_ONLY:
        return True
    return drafter.name == "model" and not isinstance(drafter, ModelTreeDrafter)


def ahead_choices(config: EngineConfig) -> AheadChoices:
    """What the settings decide about drafting ahead."""
    return AheadChoices(
        k=config.k,
        fan_out=config.fan_out,
        policy=cast("Policy", config.fan_policy),
        fallback=cast("Kind", config.fallback),
        saguaro=config.saguaro,
        force_hits=config.force_hits,
        always=config.hybrid_threshold == 0,
        max_ngram=config.max_ngram,
        min_ngram=config.min_ngram,
    )


def build_drafter(config: EngineConfig, parts: Parts, *, ahead: bool) -> Drafter:
    """With `ahead` a draft model prepares for verdicts; other drafters have no use for that."""
    name = _resolved(config, parts)
    if name == "portfolio":
        neural = build_drafter(replace(config, drafter="auto"), parts, ahead=False)
        return build_portfolio(config, parts, neural)
    if parts.heads is not None:
        return build_with_heads(config, parts)
    if name == "model" and parts.child is not None:
        home = Home(timeout=config.drafter_timeout, laws_device=parts.laws_device)
        drafter = ProcessDrafter(parts.child, home)
        drafter.wait_ready()
        return drafter
    if name == "model":
        return _with_model(config, parts, ahead=ahead)
    return _other(name, config, parts)


def _other(name: str, config: EngineConfig, parts: Parts) -> Drafter:
    """Each is made by a function here."""
    makers: Mapping[str, Callable[[], Drafter]] = {
        "bridge": lambda: _bridge(config, parts),
        "eagle-lite": lambda: build_without_weights(config, parts),
        "medusa-lite": lambda: build_without_weights(config, parts),
        "lookup": lambda: build_portfolio(config, parts, None),
        "ngram": lambda: NgramDrafter(max_n=config.max_ngram, min_n=config.min_ngram),
        "none": NoDrafter,
        **dict.fromkeys((QUANTISED, FEWER_LAYERS), lambda: build_own(config, parts)),
        "prediction": PredictionDrafter,
        "recycling": lambda: build_recycling(parts),
        "suffix": lambda: build_suffix(config, parts),
    }
    return makers[name]()


def _bridge(config: EngineConfig, parts: Parts) -> Drafter:
    if parts.draft is None:
        raise ContractError("there is no draft")
    if parts.translator is None:
        raise ContractError("there is no translator")
    return BridgeDrafter(
        parts.draft,
        parts.argmax,
        parts.translator,
        chunk=config.prefill_chunk,
        page_size=config.page_size,
    )


def _resolved(config: EngineConfig, parts: Parts) -> str:
    if parts.heads is not None:
        return resolve_drafter(config, has_draft=True, kind=parts.heads.kind)
    return resolve_drafter(config, has_draft=parts.has_draft)


def _with_model(config: EngineConfig, parts: Parts, *, ahead: bool) -> Drafter:
    if parts.draft is None:
        raise ContractError("there is no draft")
    # Drafts agree most with the coupled rule's draws when both race with the same numbers.
    draw = race_node if config.sampler == "coupled" else pick_node
    drawing = Drawing(parts.argmax, draw, parts.sampling)
    if not ahead and branches(config):
        in_tree = race_in_tree if config.sampler == "coupled" else pick_in_tree
        return ModelTreeDrafter(
            parts.draft,
            chunk=config.prefill_chunk,
            draw=in_tree,
            sampling=parts.sampling,
            whole=model_trees(parts.draft, batch_size=config.batch_size),
        )
    if not ahead:
        return build.in_turns(parts.draft, drawing, chunk=config.prefill_chunk)
    room = ahead_room(config, ahead=True)
    choices = ahead_choices(config)
    return build.ahead(parts.draft, drawing, choices, room, chunk=config.prefill_chunk)
