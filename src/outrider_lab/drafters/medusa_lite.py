"""medusa-lite: untrained heads that reuse the output matrix of the target
(plugins/heads/medusa.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from outrider.core.plugins import DrafterKind
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext

if TYPE_CHECKING:
    from outrider.plugins.heads.medusa import MedusaNet
    from outrider.plugins.heads.target import NormedTarget

HeadInit = Literal["tie", "copy", "random"]


def lite_heads(target: NormedTarget, *, num_heads: int = 2, init: HeadInit = "tie") -> MedusaNet:
    """Return untrained heads. A tied head repeats the target's guess of the pending token, so it is
    right where a token is repeated; random ones show the cost of useless heads. A copy only differs
    from a tie once it is trained.

    The lite heads need no training and no folder: their last matrix is the target's (tie), a copy
    of it (copy) or random, and they have no blocks.
    """
    import torch

    from outrider.kernels.operators import own_kernels
    from outrider.plugins.heads.medusa import MedusaHead, MedusaNet
    from outrider.plugins.heads.target import placement_of

    if init != "random":
        return MedusaNet(target, (MedusaHead((), None),) * num_heads)
    rng = torch.Generator().manual_seed(0)
    placement, pack = placement_of(target), own_kernels(target.kernels).pack
    shape = (target.spec.vocab_size, target.spec.hidden_size)
    heads: list[MedusaHead] = []
    for _ in range(num_heads):
        matrix_VD = torch.randn(shape, generator=rng) / target.spec.hidden_size**0.5
        matrix_VD = matrix_VD.to(device=placement.device, dtype=placement.dtype)
        heads.append(MedusaHead((), pack(matrix_VD)))
    return MedusaNet(target, tuple(heads))


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.heads.medusa import MedusaDrafter, ParallelHeadSampler
    from outrider.plugins.heads.target import normed_target

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
