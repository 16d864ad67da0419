"""DSpark: blocks of DFlash whose logits depend on the token before (nets/block_heads.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from functools import partial

    from outrider.drafters.nets.block_heads import (
        AlongPaths,
        MarkovHead,
        MarkovPath,
        block_drafter,
        load_blocks,
    )
    from outrider.drafters.nets.blocks import AtOnce
    from outrider.drafters.nets.medusa import ParallelHeadSampler

    model = "the DSpark layers"
    backbone, head = load_blocks(context, MarkovHead.read, from_anchor=True)
    if head is None:
        return block_drafter(
            context, backbone, AtOnce(backbone, ParallelHeadSampler.of(context, model))
        )
    sampler = context.sampler(model, branches=context.resolved.wants_trees)
    begin = partial(MarkovPath, backbone, head)
    return block_drafter(context, backbone, AlongPaths(sampler, begin))


KIND = DrafterKind(
    name="dspark",
    build=build,
    source="heads",
    branches=True,
    needs_words="DSpark layers",
    format=HeadFormat(
        model_types=("dspark",),
        keys=("markov_rank", "dspark_markov_rank", "dspark_config"),
        name="dspark",
        window_key="max_position_embeddings",
        layers_key="num_hidden_layers",
        spread=True,
        extends="dflash",
    ),
    keeps_apart=True,
    accepted=0.65,
    at_once=True,
)
