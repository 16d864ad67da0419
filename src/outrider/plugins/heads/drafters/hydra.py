"""Hydra heads, which read the target's last state and the path (../paths.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.heads.paths import hydra

    return hydra(context)


KIND = DrafterKind(
    name="hydra",
    build=build,
    source="heads",
    branches=True,
    needs_words="Hydra heads",
    format=HeadFormat(model_types=("hydra",), keys=("hydra_num_heads",), name="hydra"),
    keeps_apart=True,
)
