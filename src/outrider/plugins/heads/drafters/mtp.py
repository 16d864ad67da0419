"""MTP blocks: a decoder layer that was trained with the target (../mtp.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.heads.mtp import mtp_drafter

    config = context.config
    return mtp_drafter(
        context.heads,
        context.models.target,
        context.sampler("the MTP block", branches=context.resolved.wants_trees),
        chunk=config.most_chunk,
        batch_size=config.most_batch,
        num_ids=config.draft_vocab,
    )


KIND = DrafterKind(
    name="mtp",
    build=build,
    source="heads",
    branches=True,
    needs_words="an MTP block",
    in_target=True,
    format=HeadFormat(model_types=("outrider_mtp", "mtp")),
    keeps_apart=True,
    accepted=0.65,
)
