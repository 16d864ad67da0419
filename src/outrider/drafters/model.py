"""A draft model (drafters/common/draft_model.py): chains, trees, in a process, or ahead of
verdicts.

A PARD model drafts all tokens in one pass (plugins/heads/masked.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    """Build the drafter of a draft model: in a process, ahead of verdicts, trees or chains."""
    from outrider.drafters.common.draft_model import ModelDrafter
    from outrider.drafters.common.growth import CommonIds
    from outrider.drafters.common.native import fused_model_drafts

    config, models = context.config, context.models
    if models.child is not None:
        from outrider.plugins.lanes.process.client import Home, ProcessDrafter

        home = Home(timeout=config.drafter_timeout, probs_device=models.device)
        drafter = ProcessDrafter(models.child, home)
        drafter.wait_ready()
        return drafter
    size, trees = models.target.spec.vocab_size, context.resolved.wants_trees and not context.ahead
    draft = CommonIds.over(context.draft, vocab_size=size, num_common=models.num_common)
    sampler = context.sampler("the draft model", branches=trees)
    if context.ahead:
        from outrider.plugins.lanes.ahead.drafter import ahead_of

        return ahead_of(config, draft, sampler)
    if models.mask_token is not None:
        from outrider.plugins.heads.masked import masked_model_drafter

        return masked_model_drafter(context, draft, models.mask_token)
    fused = None
    if trees or config.fused_round:
        fused = fused_model_drafts(draft, sampler, batch_size=config.most_batch)
    return ModelDrafter(draft, sampler, chunk=config.most_chunk, fused=fused)


KIND = DrafterKind(
    name="model",
    build=build,
    source="model",
    branches=True,
    settings=("drafter_home",),
    drafts_ahead=True,
    needs_words="a draft model",
    keeps_apart=True,
    accepted=0.65,
)
