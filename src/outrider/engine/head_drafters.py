"""From a folder of heads to the drafter that reads it; each kind is a function here.

Heads share tables with the target, so they are loaded when the target is there. Their modules are
imported here: a run needs those of one kind at most.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

from outrider.core.config import EngineConfig
from outrider.core.errors import ContractError
from outrider.core.protocols import Drafter
from outrider.core.rng import pick_node, race_node
from outrider.drafters.eagle.weights import eagle_drafter
from outrider.drafters.growth import Growth, pick_in_tree, race_in_tree
from outrider.drafters.heads import normed_target
from outrider.drafters.hidden_tree import Plant, planted
from outrider.drafters.parallel_heads import Places, TreeKind
from outrider.engine.parts import Parts


def build_with_heads(config: EngineConfig, parts: Parts) -> Drafter:
    """The drafter of `parts.heads`. Raises CheckpointError for heads that do not fit the target,
    ConfigError for a target that shares nothing with heads."""
    if parts.heads is None:
        raise ContractError("the target comes without heads")
    match parts.heads.kind:
        case "eagle":
            return _eagle(config, parts)
        case "medusa":
            return _medusa(config, parts)
        case "block":
            return _block(config, parts)
        case "mtp":
            return _mtp(config, parts)


def build_without_weights(config: EngineConfig, parts: Parts) -> Drafter:
    """eagle-lite and medusa-lite: they read the target's last layer; nobody trained them."""
    if config.drafter == "medusa-lite":
        return _medusa_lite(config, parts)
    from outrider.drafters.eagle.lite import LiteDrafter

    target, growth = normed_target(parts.target), growth_of(config, parts, "eagle-lite")
    return LiteDrafter(target, growth, alpha=config.lite_alpha)


def growth_of(config: EngineConfig, parts: Parts, whose: str) -> Growth:
    """How chains choose their tokens. Drafts agree most with the coupled rule's draws when both
    race with the same numbers."""
    draw = race_node if config.sampler == "coupled" else pick_node
    return Growth(parts.argmax, whose, draw, parts.sampling)


def _eagle(config: EngineConfig, parts: Parts) -> Drafter:
    from outrider.drafters.eagle.weights import load_eagle
    from outrider.drafters.hidden import ChainLimits
    from outrider.drafters.native import head_trees, whole_chains

    if parts.heads is None:
        raise ContractError("the target comes without heads")
    net = load_eagle(parts.heads, normed_target(parts.target))
    limits = ChainLimits(
        chunk=config.prefill_chunk,
        reach=config.k + 1,
        window=parts.target.spec.max_tokens,
        first=1,
    )
    growth = growth_of(config, parts, "the EAGLE heads")
    whole = whole_chains(net.native, net.fuse, growth, batch_size=config.batch_size)
    trees = head_trees(net.native, net.fuse, batch_size=config.batch_size)
    return eagle_drafter(net, growth, limits, _plant(config, parts, growth.whose), whole, trees)


def _plant(config: EngineConfig, parts: Parts, whose: str) -> Plant | None:
    """None where chains are asked for."""
    if config.tree_nodes <= config.k:
        return None
    draw = race_in_tree if config.sampler == "coupled" else pick_in_tree
    return partial(planted, whose=whose, draw=draw, sampling=parts.sampling)


def _medusa(config: EngineConfig, parts: Parts) -> Drafter:
    from outrider.drafters.medusa import load_medusa, read_medusa_config
    from outrider.drafters.parallel_heads import MedusaDrafter

    if parts.heads is None:
        raise ContractError("the target comes without heads")
    target = normed_target(parts.target)
    heads = read_medusa_config(parts.heads.folder, target.spec)
    net = load_medusa(parts.heads.folder, heads, target)
    places = places_of(config, parts, "the Medusa heads")
    return MedusaDrafter(net, replace(places, chances=heads.chances))


def _medusa_lite(config: EngineConfig, parts: Parts) -> Drafter:
    from outrider.drafters.medusa import HeadInit, lite_heads
    from outrider.drafters.parallel_heads import MedusaDrafter

    init = cast("HeadInit", config.head_init)
    net = lite_heads(normed_target(parts.target), num_heads=config.lite_heads, init=init)
    return MedusaDrafter(net, places_of(config, parts, "medusa-lite"), name="medusa-lite")


def _block(config: EngineConfig, parts: Parts) -> Drafter:
    from outrider.drafters.block import load_block, read_block_config
    from outrider.drafters.parallel_heads import BlockDrafter

    if parts.heads is None:
        raise ContractError("the target comes without heads")
    target = normed_target(parts.target)
    own = read_block_config(parts.heads.folder, target.spec)
    net = load_block(parts.heads.folder, own, target)
    places = places_of(config, parts, "the block net")
    return BlockDrafter(net, places, least=config.least_confidence)


def places_of(config: EngineConfig, parts: Parts, whose: str) -> Places:
    """How drafts are made of several places' laws."""
    return Places(
        parts.argmax,
        whose,
        race_in_tree if config.sampler == "coupled" else pick_in_tree,
        parts.sampling,
        cast("TreeKind", config.tree_shape),
    )


def _mtp(config: EngineConfig, parts: Parts) -> Drafter:
    from outrider.drafters.mtp.net import mtp_drafter

    if parts.heads is None:
        raise ContractError("the target comes without heads")
    growth = growth_of(config, parts, "the MTP block")
    return mtp_drafter(
        parts.heads,
        parts.target,
        growth,
        chunk=config.prefill_chunk,
        batch_size=config.batch_size,
        plant=_plant(config, parts, growth.whose),
    )
