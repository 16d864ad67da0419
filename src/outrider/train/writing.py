"""Text that a model writes itself, through the same engine as a user's: held-out continuations of
the target, and text to learn from.

A drafter is asked about text that the target writes, so that is the text to learn from where there
is time to write it; with the student's own text it learns to go on from its own mistakes (on-policy
distillation: Agarwal et al., 2024, "On-policy distillation of language models").
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.train.exam import HeldOut


def continue_greedily(
    model: Path | str, prompts: Sequence[str], *, num_tokens: int, device: str = "auto"
) -> tuple[HeldOut, ...]:
    """Each prompt and the model's greedy text after it, without speculation."""
    with closing(_plain(model, device)) as llm:
        ids = [tuple(ids) for ids in llm.tokenizer.encode_batch(prompts)]
        fitting = [one for one in ids if one and len(one) + num_tokens <= _window(llm)]
        results = llm.generate(fitting, SamplingParams(max_tokens=num_tokens))
        return tuple(
            HeldOut((*prompt, *result.token_ids), len(prompt))
            for prompt, result in zip(fitting, results, strict=True)
        )


def write_texts(
    model: Path | str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    device: str = "auto",
) -> list[list[int]]:
    """Each prompt of token ids with what the model writes after it; text i draws with seed
    `params.seed` + i."""
    with closing(_plain(model, device)) as llm:
        each = [_seeded(params, place) for place in range(len(prompts))]
        results = llm.generate(list(prompts), each)
    return [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]


def _plain(model: Path | str, device: str) -> LLM:
    return LLM(model, config=EngineConfig(drafter="none", device=device))


def _window(llm: LLM) -> int:
    return llm.spec.max_tokens


def _seeded(params: SamplingParams, place: int) -> SamplingParams:
    return replace(params, seed=params.seed + place)
