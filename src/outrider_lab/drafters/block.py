"""Block nets: several positions in one pass, each with a confidence (models/block_net.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.heads.medusa import ParallelHeadSampler
    from outrider.plugins.heads.target import normed_target
    from outrider_lab.models.block_net import BlockDrafter, load_block, read_block_config

    folder, target = context.heads.folder, normed_target(context.models.target)
    net = load_block(folder, read_block_config(folder, target.spec), target)
    sampler = ParallelHeadSampler.of(context, "the block net")
    return BlockDrafter(net, sampler, least=context.config.least_confidence)


KIND = DrafterKind(
    name="block",
    build=build,
    source="heads",
    branches=True,
    needs_words="block heads",
    format=HeadFormat(model_types=("outrider_block",)),
    keeps_apart=True,
    accepted=0.55,
    at_once=True,
)
