"""Named target and draft pairs that share one vocabulary. Numbers only, no weights."""

from __future__ import annotations

from dataclasses import dataclass

EMBEDDED_TARGET = "outrider/embedded"
EMBEDDED_DRAFT = "outrider/embedded-draft"


@dataclass(frozen=True, slots=True)
class Pair:
    """`approx_bytes` is both checkpoints as published; `supported` says that our decoder loads
    the family today."""

    name: str
    target: str
    draft: str
    licence: str
    note: str
    approx_bytes: int
    gated: bool = False
    supported: bool = True


PAIRS: tuple[Pair, ...] = (
    Pair(
        "embedded",
        EMBEDDED_TARGET,
        EMBEDDED_DRAFT,
        "MIT",
        "ships with the package; Python and school maths; works offline",
        18_845_400,
    ),
    Pair(
        "llama3",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "Llama 3.1 and 3.2 Community",
        "the usual pair for a 24 GB card",
        18_500_000_000,
        gated=True,
    ),
    Pair(
        "llama3-small",
        "meta-llama/Llama-3.2-3B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "Llama 3.2 Community",
        "fits 12 GB",
        8_900_000_000,
        gated=True,
    ),
    Pair(
        "smollm2",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Apache-2.0",
        "small enough for a laptop CPU",
        3_700_000_000,
    ),
)


def draft_of(target: str) -> str | None:
    """The draft that comes with `target` without asking: the embedded one's only."""
    return EMBEDDED_DRAFT if target == EMBEDDED_TARGET else None
