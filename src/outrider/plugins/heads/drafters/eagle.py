"""EAGLE heads: a layer that predicts the next state of the target (../eagle.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.heads.eagle import load_eagle
    from outrider.plugins.heads.hidden import HeadLimits, HiddenDrafter
    from outrider.plugins.heads.passes import fused_head_drafts
    from outrider.plugins.heads.target import normed_target

    config, models = context.config, context.models
    net = load_eagle(context.heads, normed_target(models.target))
    limits = HeadLimits(
        chunk=config.most_chunk,
        reach=config.most_k + 1,
        window=models.target.spec.max_tokens,
        first=1,
    )
    sampler = context.sampler("the EAGLE heads", branches=context.resolved.wants_trees)
    fused = fused_head_drafts(net.native, net.fuse, sampler, batch_size=config.most_batch)
    return HiddenDrafter("eagle", [net], sampler, limits, fused)


KIND = DrafterKind(
    name="eagle",
    build=build,
    source="heads",
    branches=True,
    needs_words="eagle heads",
    format=HeadFormat(
        model_types=("eagle", "eagle3"),
        keys=("draft_vocab_size",),
        name="eagle",
        tensors=("fc.weight",),
        window_key="max_position_embeddings",
        layers_key="num_hidden_layers",
        three_layers=True,
    ),
    keeps_apart=True,
    accepted=0.65,
)
