"""DSpark: blocks of DFlash whose logits depend on the token before (../block_heads.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.heads.block_heads import MarkovHead, MarkovPath, path_drafter

    return path_drafter(
        context, MarkovHead.read, MarkovPath, model="the DSpark layers", from_anchor=True
    )


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
