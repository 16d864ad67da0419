"""Assistants of Gemma 4, which read the target's own keys and values (../assistant.py)."""

from __future__ import annotations

from outrider.core.plugins import DrafterKind, HeadFormat
from outrider.core.protocols import Drafter
from outrider.drafters.common.context import BuildContext


def build(context: BuildContext) -> Drafter:
    from outrider.plugins.gemma4.assistant import assistant

    return assistant(context)


KIND = DrafterKind(
    name="assistant",
    build=build,
    source="heads",
    branches=True,
    needs_words="an assistant of Gemma 4",
    format=HeadFormat(
        model_types=("gemma4_assistant", "gemma4_unified_assistant"),
        name="gemma4assistant",
        arena=False,
    ),
    keeps_apart=True,
    accepted=0.65,
)
