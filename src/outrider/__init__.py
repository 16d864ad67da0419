"""Outrider: speculative decoding that never changes the text.

The names below load what they need when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.core.config import EngineConfig
    from outrider.core.params import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "outrider.api.llm",
    "EngineConfig": "outrider.core.config",
    "SamplingParams": "outrider.core.params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
