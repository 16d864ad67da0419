"""medusa-lite: untrained heads that reuse the output matrix of the target (nets/medusa.py)."""

from __future__ import annotations

from typing import cast

from outrider.core.plugins import DrafterKind
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.drafters.nets.medusa import (
        HeadInit,
        MedusaDrafter,
        ParallelHeadSampler,
        lite_heads,
    )
    from outrider.models.heads import normed_target

    config, name = context.config, "medusa-lite"
    init = cast("HeadInit", config.head_init)
    net = lite_heads(normed_target(context.models.target), num_heads=config.lite_heads, init=init)
    return MedusaDrafter(net, ParallelHeadSampler.of(context, name), name=name)


KIND = DrafterKind(
    name="medusa-lite",
    build=build,
    branches=True,
    reads=("last layer",),
    keeps_apart=True,
    accepted=0.2,
)
