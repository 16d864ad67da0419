"""Parity of every feature: rules, drafters, controllers and sampling features, all pairs of them.

A row of the matrix is one configuration. Its text, and its log-probabilities where they are told,
must be those of the same request without speculation: greedily under every rule, and with a seed
under the rules that tie text to the seed (match and coupled). Under block and token a seeded text
differs by design; that its law does not is proved by enumeration (tests/law).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.bench.pairwise import Row
from outrider.bench.parity import first_difference, num_equal
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams

FACTORS: Mapping[str, Sequence[str]] = {
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

_FEATURES: Mapping[str, Mapping[str, object]] = {
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.3},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.5},
    "bias": {"logit_bias": {202: -4.0, 262: 2.0, 330: 1.5}},
    "bad words": {"bad_words": ("return", "self", "the")},
    "several": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "stop": {"stop": ("\n\n", "return")},
}


@dataclass(frozen=True, slots=True)
class FeatureCell:
    """A row's result. `first_difference` is (completion, token) or None."""

    row: Row
    num_tokens: int
    num_equal: int
    equal_logprobs: bool
    acceptance_rate: float
    first_difference: tuple[int, int] | None

    @property
    def holds(self) -> bool:
        return self.first_difference is None and self.equal_logprobs

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True)
class FeatureMatrix:
    """Runs rows over `prompts`; plain results are kept and used again."""

    prompts: Sequence[str]
    max_tokens: int
    _plain: dict[tuple[str, str, str], list[GenerationResult]] = field(
        default_factory=dict[tuple[str, str, str], list[GenerationResult]]
    )

    def run(self, rows: Sequence[Row]) -> Iterator[FeatureCell]:
        """Yield each row's result as it is done."""
        for row in rows:
            plain = self._plain_results(row)
            yield _cell(row, plain, self._generate(_config(row), row, plain))

    def _plain_results(self, row: Row) -> list[GenerationResult]:
        sampler, mode = row["rule"].split()
        key = (sampler if mode == "seeded" else mode, row["feature"], row["dtype"])
        if key not in self._plain:
            config = EngineConfig(dtype=row["dtype"], sampler=sampler, drafter="none")
            self._plain[key] = self._generate(config, row, None)
        return self._plain[key]

    def _generate(
        self, config: EngineConfig, row: Row, plain: list[GenerationResult] | None
    ) -> list[GenerationResult]:
        llm = LLM(config=config)
        params = _params(row, self.max_tokens)
        each = [params] * len(self.prompts)
        if plain is not None and config.drafter == "prediction":
            firsts = plain[:: params.n]
            each = [replace(params, prediction=_edited(result.text)) for result in firsts]
        allowed = _mask(llm.spec.vocab_size) if row["feature"] == "mask" else None
        return llm.generate(self.prompts, each, allowed=allowed)


def _config(row: Row) -> EngineConfig:
    return EngineConfig(
        sampler=row["rule"].split()[0],
        drafter=row["drafter"],
        k=int(row["k"]),
        batch_size=int(row["batch_size"]),
        controller=row["controller"],
        dtype=row["dtype"],
    )


def _params(row: Row, max_tokens: int) -> SamplingParams:
    seeded = row["rule"].endswith("seeded")
    plain = SamplingParams(max_tokens=max_tokens, temperature=0.8 if seeded else 0.0, seed=17)
    if row["feature"] == "min tokens":
        return replace(plain, min_tokens=max_tokens // 2)
    return replace(plain, **_FEATURES.get(row["feature"], {}))


def _edited(text: str) -> str:
    """A guess that is right but for one word in the middle, as a caller's would be."""
    words = text.split(" ")
    words[len(words) // 2] = "changed"
    return " ".join(words)


def _mask(vocab_size: int) -> Callable[[Sequence[int]], Tensor]:
    """Three ids of four, which three depends on the text."""

    def allowed(text: Sequence[int]) -> Tensor:
        mask_V = torch.ones(vocab_size, dtype=torch.bool)
        mask_V[(len(text) + sum(text)) % 4 :: 4] = False
        return mask_V

    return allowed


def _cell(
    row: Row, plain: Sequence[GenerationResult], ours: Sequence[GenerationResult]
) -> FeatureCell:
    expected = [result.token_ids for result in plain]
    got = [result.token_ids for result in ours]
    drafted = sum(result.stats.num_drafted for result in ours)
    accepted = sum(result.stats.num_accepted for result in ours)
    return FeatureCell(
        row=row,
        num_tokens=sum(map(len, expected)),
        num_equal=num_equal(expected, got),
        equal_logprobs=[r.logprobs for r in plain] == [r.logprobs for r in ours],
        acceptance_rate=round(accepted / max(drafted, 1), 4),
        first_difference=first_difference(expected, got),
    )
