"""Outrider: speculative decoding that never changes the text.

The names below import their modules when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.api.async_llm import AsyncLLM
    from outrider.api.llm import LLM
    from outrider.core.config import EngineConfig
    from outrider.core.params import SamplingParams
    from outrider.pairs.catalog import ModelPair, get_pair, list_pairs
    from outrider.plugins.compat.autoregressive import AutoregressiveDecoder
    from outrider.plugins.compat.wrapper import ModelWrapper, load_wrapper

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "AutoregressiveDecoder",
    "EngineConfig",
    "ModelPair",
    "ModelWrapper",
    "SamplingParams",
    "__version__",
    "get_pair",
    "list_pairs",
    "load_wrapper",
]

_HOMES = {
    "LLM": "outrider.api.llm",
    "AsyncLLM": "outrider.api.async_llm",
    "AutoregressiveDecoder": "outrider.plugins.compat.autoregressive",
    "EngineConfig": "outrider.core.config",
    "ModelPair": "outrider.pairs.catalog",
    "ModelWrapper": "outrider.plugins.compat.wrapper",
    "SamplingParams": "outrider.core.params",
    "get_pair": "outrider.pairs.catalog",
    "list_pairs": "outrider.pairs.catalog",
    "load_wrapper": "outrider.plugins.compat.wrapper",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    from importlib import import_module

    from outrider.core.process import uncollected

    with uncollected():
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
