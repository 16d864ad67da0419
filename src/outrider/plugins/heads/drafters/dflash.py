"""DFlash and DFlash2: layers that write a block of tokens in one pass (../blocks.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.heads.block_heads import SelectedPath, Selector, path_drafter

    return path_drafter(context, Selector.read, SelectedPath, model="the DFlash layers")


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
