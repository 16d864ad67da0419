"""Builders of drafters: one function a kind, from what loading has to the drafter.

Heads share tables with the target, so they are built when the target is there. Their modules are
imported inside the functions, since a run needs one kind at most. Settings of a target that drafts
for itself are checked before weights are read: the target must be able to, and the layers exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, ContractError
from outrider.core.protocols import CausalLM, Drafter
from outrider.core.rng import pick_node, race_node
from outrider.core.sampling import PLAIN, Sampling
from outrider.drafters.bridge import Translator
from outrider.drafters.eagle.weights import eagle_drafter
from outrider.drafters.growth import Growth, pick_in_tree, race_in_tree
from outrider.drafters.heads import normed_target
from outrider.drafters.hidden_tree import Plant, planted
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.parallel_heads import Places, TreeKind
from outrider.drafters.portfolio import ForcedDrafter, PortfolioDrafter, Shadowed
from outrider.drafters.portfolio_model import Neural
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.process.options import ChildOptions
from outrider.drafters.proposals import Offerer
from outrider.drafters.recycling import RecyclingDrafter
from outrider.drafters.self_draft import Cheaper, SelfDrafter, skipped_layers
from outrider.drafters.suffix.drafter import SuffixDrafter
from outrider.engine.lane_build import Machine
from outrider.models.families import LLAMA_FAMILIES, LlamaConfig
from outrider.models.heads import Heads
from outrider.models.hf_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Parts:
    """Models and their operators. `argmax` is the greedy choice: the first maximum wins.
    `translator` is for a draft model with a vocabulary of its own. `sampling` makes laws and judges
    by them; what draws from them comes with each sequence. Without a `machine` lanes take turns.
    With `child` a process of its own loads the draft model. `heads` are loaded when the drafter is
    built, for they share tables with the target; so is `own`, with which the target drafts for
    itself. `corpus` has texts, as tokens, for the suffix drafter. `exact` says
    that a row of the target's logits does not depend on what it is computed beside."""

    target: CausalLM
    draft: CausalLM | None
    argmax: Callable[[Tensor], list[int]]
    translator: Translator | None = None
    sampling: Sampling = PLAIN
    machine: Machine | None = None
    child: ChildOptions | None = None
    heads: Heads | None = None
    own: Cheaper | None = None
    corpus: Sequence[Sequence[int]] = ()
    exact: bool = True

    @property
    def has_draft(self) -> bool:
        return self.draft is not None or self.child is not None

    @property
    def draft_window(self) -> int | None:
        """Positions that the draft model has; None if there is none, or if it counts tokens of a
        vocabulary of its own."""
        if self.translator is not None:
            return None
        if self.draft is not None:
            return self.draft.spec.max_tokens
        return None if self.child is None else self.child.max_tokens

    @property
    def laws_device(self) -> str:
        """Where the target's laws are."""
        return "cpu" if self.machine is None else str(self.machine.device)


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


def build_suffix(config: EngineConfig, parts: Parts) -> SuffixDrafter:
    return SuffixDrafter(num_tokens=config.suffix_tokens, corpus=parts.corpus)


def build_recycling(parts: Parts) -> Drafter:
    return RecyclingDrafter(vocab_size=parts.target.spec.vocab_size)


def build_portfolio(config: EngineConfig, parts: Parts, neural: Drafter | None) -> Drafter:
    ngram = NgramDrafter(max_n=config.max_ngram, min_n=config.min_ngram)
    members = lookup_members(build_suffix(config, parts), ngram)
    return PortfolioDrafter(members, None if neural is None else Neural(neural))


def lookup_members(suffix: SuffixDrafter, ngram: NgramDrafter) -> tuple[Offerer, ...]:
    """What is surer comes first: of equal offers the first one is taken."""
    guessed = Shadowed(PredictionDrafter(), serves=lambda row: bool(row.prediction))
    return (ForcedDrafter(), guessed, suffix, ngram)


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
