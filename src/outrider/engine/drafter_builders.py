"""Builders of drafters: the functions that the lines of core/drafter_kinds.py name.

Heads share tables with the target, so they are built after it. Modules of heads and of models are
imported inside the functions, since a run needs one kind at most. Before weights are read, it is
checked that a target can draft for itself and has the named layers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from outrider.core.config import EngineConfig
from outrider.core.drafter_kinds import DrafterKind
from outrider.core.errors import CheckpointError, ConfigError, given
from outrider.core.protocols import Drafter
from outrider.core.resolve import ResolvedConfig
from outrider.core.rng import draw_for
from outrider.core.spec import DecoderConfig, DraftCapacity, RecurrentCapacity
from outrider.core.tree import MAX_WIDTH
from outrider.drafters.catalog import BuildContext
from outrider.drafters.common_ids import CommonIds
from outrider.drafters.growth import DraftSampler
from outrider.drafters.heads import normed_target
from outrider.drafters.model import ModelDrafter
from outrider.drafters.native import fused_model_drafts
from outrider.drafters.none import NoDrafter
from outrider.drafters.parallel_heads import ParallelHeadSampler, TreeKind
from outrider.drafters.portfolio import ForcedDrafter, PortfolioDrafter, ReplayScored
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.self_draft import SelfDrafter, SelfDraftSpec, gain_notes, skipped_layers
from outrider.kernels.kinds import pick_device
from outrider.models.decoder import ModelCapacity
from outrider.models.families import LLAMA_FAMILIES, LlamaConfig

if TYPE_CHECKING:
    from outrider.drafters.ngram import NgramDrafter
    from outrider.drafters.proposals import ScoredDrafter
    from outrider.drafters.suffix import SuffixDrafter


def build_none(context: BuildContext) -> Drafter:
    del context
    return NoDrafter()


def build_with_model(context: BuildContext) -> Drafter:
    """Build the drafter of a draft model: in a process, ahead of verdicts, trees or chains."""
    config, models = context.config, context.models
    if models.child is not None:
        from outrider.plugins.lanes.process.client import Home, ProcessDrafter

        home = Home(timeout=config.drafter_timeout, probs_device=models.device)
        drafter = ProcessDrafter(models.child, home)
        drafter.wait_ready()
        return drafter
    size, trees = models.target.spec.vocab_size, context.resolved.wants_trees and not context.ahead
    draft = CommonIds.over(context.draft, vocab_size=size, num_common=models.num_common)
    sampler = sampler_of(context, "the draft model", branches=trees)
    if context.ahead:
        from outrider.plugins.lanes.ahead.drafter import ahead_of

        return ahead_of(config, draft, sampler)
    fused = None
    if trees or config.fused_round:
        fused = fused_model_drafts(draft, sampler, batch_size=config.most_batch)
    return ModelDrafter(draft, sampler, chunk=config.prefill_chunk, fused=fused)


def sampler_of(context: BuildContext, model_name: str, *, branches: bool = False) -> DraftSampler:
    """Return the sampler that chooses draft tokens by the logits of `model_name`."""
    models, draw = context.models, draw_for(context.config.sampler)
    return DraftSampler(models.argmax, model_name, draw, models.sampling, branches=branches)


def build_bridge(context: BuildContext) -> Drafter:
    from outrider.drafters.bridge import BridgeDrafter

    config = context.config
    return BridgeDrafter(
        context.draft,
        sampler_of(context, "the draft model"),
        given(context.models.translator, "translator"),
        chunk=config.prefill_chunk,
        page_size=config.page_size,
    )


def build_ngram(context: BuildContext) -> NgramDrafter:
    from outrider.drafters.ngram import NgramDrafter

    config = context.config
    return NgramDrafter(
        max_n=config.max_ngram, min_n=config.min_ngram, native=context.models.lookups
    )


def build_prediction(context: BuildContext) -> Drafter:
    del context
    return PredictionDrafter()


def build_eagle_lite(context: BuildContext) -> Drafter:
    """Build the untrained drafter that reads the target's last layer."""
    from outrider.drafters.eagle_lite import LiteDrafter

    target = normed_target(context.models.target)
    sampler = sampler_of(context, context.drafter)
    return LiteDrafter(target, sampler, alpha=context.config.lite_alpha)


def build_eagle(context: BuildContext) -> Drafter:
    from outrider.drafters.eagle import load_eagle
    from outrider.drafters.hidden import HeadLimits, HiddenDrafter
    from outrider.drafters.native import fused_head_drafts

    config, models = context.config, context.models
    net = load_eagle(context.heads, normed_target(models.target))
    limits = HeadLimits(
        chunk=config.prefill_chunk,
        reach=config.most_k + 1,
        window=models.target.spec.max_tokens,
        first=1,
    )
    sampler = sampler_of(context, "the EAGLE heads", branches=context.resolved.wants_trees)
    fused = fused_head_drafts(net.native, net.fuse, sampler, batch_size=config.most_batch)
    return HiddenDrafter("eagle", [net], sampler, limits, fused)


def build_medusa(context: BuildContext) -> Drafter:
    from outrider.drafters.medusa import load_medusa, read_medusa_config
    from outrider.drafters.parallel_heads import MedusaDrafter

    folder, target = context.heads.folder, normed_target(context.models.target)
    heads = read_medusa_config(folder, target.spec)
    net = load_medusa(folder, heads, target)
    sampler = parallel_sampler_of(context, "the Medusa heads")
    return MedusaDrafter(net, replace(sampler, chances=heads.chances))


def build_medusa_lite(context: BuildContext) -> Drafter:
    from outrider.drafters.medusa import HeadInit, lite_heads
    from outrider.drafters.parallel_heads import MedusaDrafter

    config, name = context.config, context.drafter
    init = cast("HeadInit", config.head_init)
    net = lite_heads(normed_target(context.models.target), num_heads=config.lite_heads, init=init)
    return MedusaDrafter(net, parallel_sampler_of(context, name), name=name)


def build_block(context: BuildContext) -> Drafter:
    from outrider.drafters.block import load_block, read_block_config
    from outrider.drafters.parallel_heads import BlockDrafter

    folder, target = context.heads.folder, normed_target(context.models.target)
    net = load_block(folder, read_block_config(folder, target.spec), target)
    sampler = parallel_sampler_of(context, "the block net")
    return BlockDrafter(net, sampler, least=context.config.least_confidence)


def parallel_sampler_of(context: BuildContext, model_name: str) -> ParallelHeadSampler:
    """Return the sampler that makes drafts of the distributions of several positions."""
    trees = cast("TreeKind", context.config.tree_shape)
    return ParallelHeadSampler(sampler_of(context, model_name), trees)


def build_mtp(context: BuildContext) -> Drafter:
    from outrider.drafters.mtp import mtp_drafter

    config = context.config
    return mtp_drafter(
        context.heads,
        context.models.target,
        sampler_of(context, "the MTP block", branches=context.resolved.wants_trees),
        chunk=config.prefill_chunk,
        batch_size=config.most_batch,
    )


def build_suffix(context: BuildContext) -> SuffixDrafter:
    from outrider.drafters.suffix import SuffixDrafter

    models = context.models
    return SuffixDrafter(
        num_tokens=context.config.suffix_tokens, corpus=models.corpus, native=models.lookups
    )


def build_recycling(context: BuildContext) -> Drafter:
    from outrider.drafters.recycling import RecyclingDrafter

    return RecyclingDrafter(vocab_size=context.models.target.spec.vocab_size)


def build_lookup(context: BuildContext) -> Drafter:
    return PortfolioDrafter(lookup_members(build_suffix(context), build_ngram(context)))


def build_portfolio(context: BuildContext) -> Drafter:
    from outrider.drafters.portfolio_model import ModelMember

    members = lookup_members(build_suffix(context), build_ngram(context))
    left_to_us = context.resolved.left_to_us
    try:
        neural = ModelMember(context.member(), branches=not left_to_us)
    except (CheckpointError, ConfigError) as error:
        if not left_to_us:
            raise
        return PortfolioDrafter(members, notes=(alone_for(error),))
    return PortfolioDrafter(members, neural)


def alone_for(error: Exception) -> str:
    """Return a note for look-ups whose model could not be loaded."""
    return f"look-ups draft alone, since the draft model that was found cannot be used: {error}"


def lookup_members(suffix: SuffixDrafter, ngram: NgramDrafter) -> tuple[ScoredDrafter, ...]:
    """Return the look-ups, the most reliable first: of equal offers the first one is used."""
    predicted = ReplayScored(PredictionDrafter(), serves=lambda row: bool(row.prediction))
    return (ForcedDrafter(), predicted, suffix, ngram)


def draft_capacity(resolved: ResolvedConfig) -> DraftCapacity:
    """Return the additional memory that the draft model needs for drafting ahead or for trees."""
    config = resolved.settings
    if resolved.ahead:
        from outrider.plugins.lanes.ahead.choices import capacity_needed

        return capacity_needed(config.most_k, config.fan_out, config.most_batch)
    if not resolved.wants_trees or resolved.left_to_us:
        return DraftCapacity()
    rows = config.most_batch * MAX_WIDTH
    return DraftCapacity(rows, rows, config.most_k * MAX_WIDTH)


def own_copy(
    config: EngineConfig, kind: DrafterKind | None, folder: Path, target: DecoderConfig
) -> SelfDraftSpec | None:
    """Return the copy of the target in `folder` that a drafter of this `kind` requires, or None.

    Raises ConfigError for a target that cannot draft for itself, or layers that it lacks.
    """
    if kind is None or kind.source != "copy":
        return None
    if not isinstance(target, LlamaConfig):
        raise ConfigError(
            f"drafter {kind.name!r}: a model of type {target.family} cannot draft for itself.",
            hint=f"choose another --drafter, or a target of: {', '.join(LLAMA_FAMILIES)}",
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"drafter {kind.name!r}: a target shared by processes cannot draft for itself.",
            hint="leave --tensor-parallel at 1, or choose another --drafter",
        )
    skipped: tuple[int, ...] = ()
    if not kind.fewer_bits or config.skip_layers:
        skipped = skipped_layers(config.skip_layers, target.num_layers)
    return SelfDraftSpec(
        folder=folder,
        quantise=config.self_quantise if kind.fewer_bits else "none",
        skipped=skipped,
        force_reference=config.force_reference,
        threads=config.threads,
    )


def build_own(context: BuildContext) -> Drafter:
    """Build the drafter that `own` describes, with its model loaded over the target's memory."""
    name, own = context.drafter, context.models.own
    if own is None:
        raise ConfigError(
            f"drafter {name!r} needs the target's checkpoint, and there is none.",
            hint="load the target from a folder, or choose another --drafter",
        )
    target = context.models.target
    model = own.of(target)
    branches, batch = context.resolved.num_nodes > 0, context.config.most_batch
    sampler = sampler_of(context, "the draft model", branches=branches)
    sampler = replace(sampler, argmax=model.kernels.argmax, sampling=model.kernels.sampling)
    fused = fused_model_drafts(model, sampler, batch_size=batch)
    notes = gain_notes(target, model) if context.kind.fewer_bits else ()
    return SelfDrafter(model, sampler, name=name, fused=fused, notes=notes)


def room_of(
    config: EngineConfig,
    num_slots: int,
    *,
    max_rows: int,
    max_logits: int,
    window: int = 0,
    num_staged: int = 0,
) -> ModelCapacity:
    """Return the capacity of a model that is loaded. With `num_staged`, the most staged tokens of a
    text, local layers have memory of their own: on CPUs and in one process."""
    apart = num_staged and config.tensor_parallel == 1 and pick_device(config.device).type == "cpu"
    return ModelCapacity(
        num_slots=num_slots,
        page_size=config.page_size,
        max_rows=max_rows,
        max_logits=max_logits,
        states=states_of(config),
        window=window,
        frees_pages=True,
        num_texts=config.most_batch if apart else 0,
        num_staged=num_staged,
    )


def most_staged(resolved: ResolvedConfig) -> int:
    """Return the most tokens of one text that a job reads and a round stages behind them."""
    return resolved.settings.prefill_chunk + resolved.staged_rows + 1


def states_of(config: EngineConfig) -> RecurrentCapacity:
    """Return the capacity for the recurrent states of a hybrid, if the model is one."""
    return RecurrentCapacity(
        rollback=config.state_rollback,
        history=config.state_history or max(1, config.most_k, config.tree_nodes),
        num_sequences=config.most_batch,
        num_checkpoints=config.state_checkpoints,
    )


def whole_pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size) * page_size
