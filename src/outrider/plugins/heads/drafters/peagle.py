"""P-EAGLE: EAGLE 3 that drafts all tokens in one pass (../eagle.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.heads.masked import load_peagle
    from outrider.plugins.heads.medusa import ParallelHeadSampler

    return load_peagle(context, ParallelHeadSampler.of(context, "the P-EAGLE layers"))


KIND = DrafterKind(
    name="peagle",
    build=build,
    source="heads",
    branches=True,
    needs_words="P-EAGLE layers",
    format=HeadFormat(
        model_types=("peagle",),
        keys=("peagle_config", "ptd_token_id"),
        name="peagle",
        window_key="max_position_embeddings",
        layers_key="num_hidden_layers",
        three_layers=True,
        extends="eagle",
        also=("pard_token", "parallel_drafting"),
    ),
    keeps_apart=True,
    accepted=0.65,
    at_once=True,
)
