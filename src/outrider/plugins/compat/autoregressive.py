"""Plain decoding, one token per pass: the baseline of every speed-up.

The prompt is read in one pass (prefill: matrix times matrix, bound by arithmetic); then each pass
reads one token on top of the KV in the arena (decode: matrix times vector, bound by memory). Given
a model's name, it is the engine's own round with an empty draft, so a comparison with speculation
compares only that. Given a `ModelWrapper`, it is the loop written out: the same greedy text, and
the same distribution and random numbers. docs/theory.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from torch import Tensor

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.draft import RoundTrace
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.rng import KeyedRng
from outrider.core.sampling import draw, processed_probs
from outrider.core.tree import ROOT
from outrider.metrics import summarise
from outrider.plugins.compat.wrapper import Cache, ModelWrapper, listed


class AutoregressiveDecoder:
    """A target model without any drafter: by name, or a wrapper, whose caches stay as they are.
    `config` applies to a model by name. Raises the errors of `LLM`."""

    def __init__(
        self,
        model: str | Path | ModelWrapper = "outrider/embedded",
        *,
        config: EngineConfig | None = None,
    ) -> None:
        self._last: GenerationResult | None = None
        if isinstance(model, ModelWrapper):
            if config is not None:
                raise ConfigError(
                    "a wrapper's model is loaded already, so a configuration changes nothing.",
                    hint="give a model's name with config, or load the wrapper as you want it",
                )
            self._llm, self._wrapper = None, model
        else:
            config = replace(config or EngineConfig(), drafter="none")
            self._llm, self._wrapper = LLM(model, config=config), None

    @property
    def llm(self) -> LLM:
        """The LLM of a model by name. Raises ConfigError if the decoder has a wrapper."""
        if self._llm is None:
            raise ConfigError("this decoder runs a wrapper.", hint="create it with a model's name")
        return self._llm

    @property
    def tokenizer(self) -> Tokenizer:
        return self.llm.tokenizer if self._wrapper is None else self._wrapper.tokenizer

    @property
    def last_result(self) -> GenerationResult:
        """The result of the last text: ids, times, the reason for its end."""
        if self._last is None:
            raise ConfigError("nothing was written yet.", hint="call generate first")
        return self._last

    def generate(
        self,
        prompt_ids: Sequence[int] | Tensor,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        seed: int = 0,
    ) -> GenerationResult:
        """Continue `prompt_ids` until a stop token, which is then the last id, or the limit.

        The ids are a list, or a tensor of shape [N] or [1, N]. Temperature 0 is greedy: the first
        largest logit. Above it, the distribution is the softmax of logits / temperature and the
        text depends on `seed` alone. Raises ConfigError.
        """
        params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=seed)
        ids = listed(prompt_ids)
        if self._wrapper is not None:
            self._last = _written(self._wrapper, ids, params)
            return self._last
        for _ in self.llm.stream(ids, params):
            pass  # each event is one pass of the model, and one token
        self._last = self.llm.last_result
        return self._last

    def generate_text(
        self, prompt: str, max_new_tokens: int = 128, temperature: float = 0.0, *, seed: int = 0
    ) -> str:
        """The continuation of `prompt`; `last_result` has the rest. Raises ConfigError."""
        ids = self.tokenizer.encode(prompt)
        return self.generate(ids, max_new_tokens, temperature, seed=seed).text


def _written(wrapper: ModelWrapper, ids: list[int], params: SamplingParams) -> GenerationResult:
    """Run the loop: read the unread tokens, draw from the distribution of the last row, until the
    text ends."""
    began = perf_counter()
    stops = {*wrapper.model.spec.stop_ids, *wrapper.tokenizer.stop_ids}
    limit = min(params.max_tokens, wrapper.model.spec.max_tokens - len(ids))
    if limit < 1:
        raise ConfigError(
            f"a prompt of {len(ids)} tokens leaves no token for an answer in a window of "
            f"{wrapper.model.spec.max_tokens}.",
            hint="shorten the prompt",
        )
    written, arrivals, traces = list[int](), list[float](), list[RoundTrace]()
    unread, past = ids, None
    while len(written) < limit and not (written and written[-1] in stops):
        started = perf_counter()
        logits_1NV, cache = wrapper.forward(unread, past)
        _freed(wrapper, past)
        past = cache
        read = perf_counter()
        token = _next(logits_1NV[0, -1:], params, start=len(ids) + len(written))
        arrivals.append(perf_counter() - began)
        traces.append(
            _trace(len(written), len(unread) - 1, read - started, arrivals[-1] + began - read)
        )
        written.append(token)
        unread = [token]
    _freed(wrapper, past)
    stopped = written[-1] in stops
    return GenerationResult(
        text=wrapper.tokenizer.decode(written[:-1] if stopped else written),
        token_ids=tuple(written),
        finish_reason="stop" if stopped else "length",
        stats=summarise(traces, drafter="none", k=0, total_seconds=arrivals[-1]),
        token_seconds=tuple(arrivals),
    )


def _next(logits_1V: Tensor, params: SamplingParams, *, start: int) -> int:
    """The token that the engine draws after an empty draft, `start` tokens into the text."""
    if params.greedy:
        return int(logits_1V[0].argmax())
    probs_V = processed_probs(logits_1V, params)[0]
    return draw(probs_V, KeyedRng(params.rng_seed, 0, start), ROOT)


def _freed(wrapper: ModelWrapper, cache: Cache | None) -> None:
    """Close `cache`. Its forks live on, so memory holds one copy of the text."""
    if cache is not None:
        wrapper.close(cache)


def _trace(number: int, prompt_tokens: int, reading: float, drawing: float) -> RoundTrace:
    return RoundTrace(
        seq_id=0,
        pass_index=number,
        drafter="none",
        batch_size=1,
        num_target_passes=1,
        num_prompt_tokens=prompt_tokens,
        num_drafted=0,
        num_accepted=0,
        num_emitted=1,
        num_rows_copied=0,
        draft_seconds=0.0,
        verify_seconds=reading,
        accept_seconds=drawing,
    )
