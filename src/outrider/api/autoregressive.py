"""Plain decoding, one token a pass: what every speed-up is measured against.

The prompt is read in one pass (prefill: matrix times matrix, bound by arithmetic); then each pass
reads one token on top of the KV in the arena (decode: matrix times vector, bound by memory). That
is the engine's own round with an empty draft, so a comparison with speculation compares nothing
else. docs/theory.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams


class AutoregressiveDecoder:
    """A target model without any drafter. Raises what `LLM` raises."""

    def __init__(
        self, model: str | Path = "outrider/embedded", *, config: EngineConfig | None = None
    ) -> None:
        self._llm = LLM(model, config=replace(config or EngineConfig(), drafter="none"))

    @property
    def llm(self) -> LLM:
        return self._llm

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        seed: int = 0,
    ) -> GenerationResult:
        """Go on from `prompt_ids` until a stop token, which is the last id then, or the limit.

        Temperature 0 is greedy: the first largest logit. Above it, the law is the softmax of
        logits / temperature and the text depends on `seed` alone. Raises ConfigError.
        """
        params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=seed)
        for _ in self._llm.stream(list(prompt_ids), params):
            pass  # each event is one pass of the model, and one token
        return self._llm.last_result

    def generate_text(
        self,
        prompt: str,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        seed: int = 0,
    ) -> GenerationResult:
        """The same from text; the completion is the result's `text`."""
        ids = self.tokenizer.encode(prompt)
        return self.generate(ids, max_new_tokens, temperature, seed=seed)
