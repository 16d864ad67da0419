"""Medusa heads: several tokens predicted from one state of the target (../medusa.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.heads.medusa import (
        MedusaDrafter,
        ParallelHeadSampler,
        load_medusa,
        read_medusa_config,
    )
    from outrider.plugins.heads.target import normed_target

    folder, target = context.heads.folder, normed_target(context.models.target)
    heads = read_medusa_config(folder, target.spec)
    net = load_medusa(folder, heads, target)
    sampler = ParallelHeadSampler.of(context, "the Medusa heads", heads.chances)
    return MedusaDrafter(net, sampler)


KIND = DrafterKind(
    name="medusa",
    build=build,
    source="heads",
    branches=True,
    needs_words="medusa heads",
    format=HeadFormat(
        model_types=("outrider_medusa", "medusa"), keys=("medusa_num_heads",), arena=False
    ),
    keeps_apart=True,
    at_once=True,
)
