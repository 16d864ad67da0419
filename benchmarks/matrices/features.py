"""Parity of the pair in each number format, and of all features with each other.

Text, and log-probabilities where they are told, must be those of the same request without
speculation: greedily under every rule, and with a seed under the rules that tie text to the seed
(match and coupled). Under block and token a seeded text differs by design; that its distribution
does not is proved by enumeration (tests/law).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from matrices.matrix import Allowed, Matrix
from matrices.pairwise import Factors, Row
from torch import Tensor

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams

PAIR: Factors = {
    "dtype": ("float32", "bfloat16"),
    "drafter": ("model", "ngram"),
    "k": ("1", "2", "4", "8"),
    "batch_size": ("1", "3", "8"),
}
FEATURES: Factors = {
    "rule": (
        "block greedy",
        "token greedy",
        "match greedy",
        "coupled greedy",
        "match seeded",
        "coupled seeded",
    ),
    "drafter": ("model", "ngram", "prediction", "bridge"),
    "k": ("1", "2", "4", "8"),
    "batch_size": ("1", "3", "8"),
    "controller": ("fixed", "band", "slo"),
    "dtype": ("float32", "bfloat16"),
    "feature": (
        "none",
        "filters",
        "repetition",
        "penalties",
        "bias",
        "bad words",
        "min tokens",
        "several",
        "logprobs",
        "mask",
        "stop",
    ),
}
_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.3},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.5},
    "bias": {"logit_bias": {202: -4.0, 262: 2.0, 330: 1.5}},
    "bad words": {"bad_words": ("return", "self", "the")},
    "several": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "stop": {"stop": ("\n\n", "return")},
}


def pair(factors: Factors = PAIR) -> Matrix:
    """Of the embedded pair; texts may end by themselves."""
    return Matrix(
        factors=factors,
        config=lambda row: EngineConfig(
            dtype=row["dtype"],
            drafter=row["drafter"],
            k=int(row["k"]),
            batch_size=int(row["batch_size"]),
        ),
        plain=lambda row: EngineConfig(dtype=row["dtype"], drafter="none", batch_size=1),
        params=lambda _, max_tokens: SamplingParams(max_tokens=max_tokens),
    )


def features() -> Matrix:
    return Matrix(factors=FEATURES, config=_config, plain=_plain, params=_params, allowed=_allowed)


def _config(row: Row) -> EngineConfig:
    return EngineConfig(
        sampler=row["rule"].split()[0],
        drafter=row["drafter"],
        k=int(row["k"]),
        batch_size=int(row["batch_size"]),
        controller=row["controller"],
        dtype=row["dtype"],
    )


def _plain(row: Row) -> EngineConfig:
    """Greedy text is the same under all rules."""
    sampler, mode = row["rule"].split()
    sampler = sampler if mode == "seeded" else EngineConfig().sampler
    return EngineConfig(dtype=row["dtype"], sampler=sampler, drafter="none")


def _params(row: Row, max_tokens: int) -> SamplingParams:
    seeded = row["rule"].endswith("seeded")
    usual = SamplingParams(max_tokens=max_tokens, temperature=0.8 if seeded else 0.0, seed=17)
    if row["feature"] == "min tokens":
        return replace(usual, min_tokens=max_tokens // 2)
    return replace(usual, **_SETTINGS.get(row["feature"], {}))


def _allowed(row: Row, vocab_size: int) -> Allowed | None:
    """Three ids of four, which three depends on the text."""

    def allowed(text: Sequence[int]) -> Tensor:
        mask_V = torch.ones(vocab_size, dtype=torch.bool)
        mask_V[(len(text) + sum(text)) % 4 :: 4] = False
        return mask_V

    return allowed if row["feature"] == "mask" else None
