"""Recipes of published K sweeps, and what was published for them.

A recipe only fills in what the command line leaves open. The published figures come from other
engines, machines and counters; they are printed beside ours to be compared with care, and some of
them contradict each other (`note`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a recipe sets; `text` says what it repeats."""

    text: str
    pair: str
    ks: str
    max_tokens: int
    prompts: int
    iterations: int
    dtype: str
    deterministic: bool
    plots: bool


PRESETS: Mapping[str, Preset] = {
    "phase-3d": Preset(
        text="GPT-2 with DistilGPT-2, 100 samples for each K",
        pair="distilgpt2",
        ks="1,2,3,4",
        max_tokens=64,
        prompts=10,
        iterations=10,
        dtype="float16",
        deterministic=True,
        plots=False,
    ),
    "phase-4a": Preset(
        text="Llama 3.2 3B with 1B at K=1; batches of 2 and 4 by --batch-size",
        pair="llama3_small",
        ks="1",
        max_tokens=64,
        prompts=10,
        iterations=1,
        dtype="float16",
        deterministic=False,
        plots=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A published figure; None where nothing was said. Acceptance is a share."""

    pair: str
    device: str
    setting: str
    tokens_per_second: float | None
    acceptance: float | None
    note: str


REFERENCES = (
    Reference("GPT-2 + DistilGPT-2", "T4", "K=1..4, 64 tokens, fp16", 6.0, 0.398,
              "the same acceptance to a tenth of a percent at every K"),
    Reference("GPT-2 + DistilGPT-2", "MPS", "short texts", 10.0, None, "order of magnitude"),
    Reference("GPT-2 + DistilGPT-2", "T4", "short texts", 17.0, None, "order of magnitude"),
    Reference("Llama 3.2 3B + 1B", "T4", "K=1, batch 1, 64 tokens", 8.45, 0.858,
              "its own plain decoding: 16.99"),
    Reference("Llama 3.2 3B + 1B", "T4", "K=1, batch 2, 64 tokens", None, 0.649,
              "slower than batch 1; greedy acceptance cannot depend on the batch"),
    Reference("Llama 3.2 3B + 1B", "T4", "K=1, batch 4, 32 tokens", None, 0.618,
              "slower than batch 1; greedy acceptance cannot depend on the batch"),
)  # fmt: skip
