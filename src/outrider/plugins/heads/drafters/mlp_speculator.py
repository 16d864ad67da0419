"""MLP speculators: heads that read the target's last state and the path (../paths.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.heads.paths import mlp_speculator

    return mlp_speculator(context)


KIND = DrafterKind(
    name="mlp-speculator",
    build=build,
    source="heads",
    branches=True,
    needs_words="MLP speculator",
    format=HeadFormat(model_types=("mlp_speculator",), name="mlpspeculator", arena=False),
    keeps_apart=True,
)
