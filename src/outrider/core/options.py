"""Keywords of `LLM`, `generate`, `stream`, `submit` and `chat`.

Editors and type checkers read options.pyi, which scripts/settings_page.py writes.
"""

from __future__ import annotations

from typing import Any, TypedDict, get_type_hints

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams

# `LLM` takes these by parameters of their own, which may be objects too.
OWN_PARAMETERS = ("controller",)


def _keywords(name: str, kind: type) -> Any:
    hints = {key: hint for key, hint in get_type_hints(kind).items() if key not in OWN_PARAMETERS}
    return TypedDict(name, hints, total=False)  # pyright: ignore[reportArgumentType]


EngineOptions = _keywords("EngineOptions", EngineConfig)
SamplingOptions = _keywords("SamplingOptions", SamplingParams)
