"""layer-skip: the target drafts for itself without some of its layers
(drafters/common/draft_model.py).
"""

from __future__ import annotations

from outrider.core.plugins import DrafterKind
from outrider.drafters import quantised_self

KIND = DrafterKind(
    name="layer-skip",
    build=quantised_self.build,
    source="copy",
    branches=True,
    settings=("skip_layers",),
    keeps_apart=True,
    accepted=0.4,
    advice="the target drafts with some of its layers left out: no file and no memory; loses "
    "unless the checkpoint was trained to end early",
)
