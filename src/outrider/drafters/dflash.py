"""DFlash and DFlash2: layers that write a block of tokens in one pass (nets/blocks.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from functools import partial

    from outrider.drafters.nets.block_heads import (
        AlongPaths,
        SelectedPath,
        Selector,
        block_drafter,
        load_blocks,
    )
    from outrider.drafters.nets.blocks import AtOnce
    from outrider.drafters.nets.medusa import ParallelHeadSampler

    model = "the DFlash layers"
    backbone, selector = load_blocks(context, Selector.read)
    if selector is None:
        return block_drafter(
            context, backbone, AtOnce(backbone, ParallelHeadSampler.of(context, model))
        )
    sampler = context.sampler(model, branches=context.resolved.wants_trees)
    begin = partial(SelectedPath, backbone, selector)
    return block_drafter(context, backbone, AlongPaths(sampler, begin))


KIND = DrafterKind(
    name="dflash",
    build=build,
    source="heads",
    branches=True,
    needs_words="DFlash layers",
    format=HeadFormat(
        model_types=("dflash", "dflash2"),
        keys=("dflash_config",),
        name="dflash",
        window_key="max_position_embeddings",
        layers_key="num_hidden_layers",
        spread=True,
    ),
    keeps_apart=True,
    accepted=0.65,
    at_once=True,
)
