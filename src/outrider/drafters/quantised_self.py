"""quantised-self: the target drafts for itself in fewer bits (drafters/common/draft_model.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    """Build the drafter of the copy `own`, with its model loaded over the target's memory."""
    from outrider.drafters.common.draft_model import self_drafter

    branches = context.resolved.num_nodes > 0
    return self_drafter(
        context.models.own,
        context.models.target,
        context.sampler("the draft model", branches=branches),
        name=context.kind.name,
        batch_size=context.config.most_batch,
    )


KIND = DrafterKind(
    name="quantised-self",
    build=build,
    source="copy",
    branches=True,
    settings=("skip_layers",),
    fewer_bits=True,
    keeps_apart=True,
    accepted=0.95,
    advice="the target's own matrices in fewer bits draft over its memory: no file, high "
    "acceptance; pays where the target is read from memory and not from a cache",
)
