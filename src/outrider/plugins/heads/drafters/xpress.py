"""XPress: blocks of DFlash that a small net refines in rounds (../block_heads.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from functools import partial

    from outrider.plugins.heads.block_drafts import AtOnce
    from outrider.plugins.heads.block_heads import Refiner, block_drafter, load_blocks
    from outrider.plugins.heads.medusa import ParallelHeadSampler

    backbone, refiner = load_blocks(context, Refiner.read)
    sampler = ParallelHeadSampler.of(context, "the XPress layers")
    backbone.choose(sampler.sampler, refiner=refiner, trees=sampler)
    write = AtOnce(backbone, sampler, partial(refiner.refine, backbone))
    return block_drafter(context, backbone, write, whole=True)


KIND = DrafterKind(
    name="xpress",
    build=build,
    source="heads",
    branches=True,
    needs_words="XPress layers",
    format=HeadFormat(
        model_types=("xpress",),
        keys=("xpress_rank",),
        name="xpress",
        window_key="max_position_embeddings",
        layers_key="num_hidden_layers",
        spread=True,
        extends="dflash",
    ),
    keeps_apart=True,
    accepted=0.65,
    at_once=True,
)
