"""Text that a model writes itself, through the same engine as a user's: held-out continuations of
the target, and text to learn from.

A drafter is asked about text that the target writes, so that is the text to learn from where there
is time to write it; with the student's own text it learns to go on from its own mistakes (on-policy
distillation: Agarwal et al., 2024, "On-policy distillation of language models").
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.api.llm import LLM
from outrider.core.clock import host_ints
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.train.data import Heard, unheard
from outrider.train.exam import HeldOut
from outrider.train.tokens import Windows

# Texts that are written in one call.
_TOGETHER = 64
# And those that the engine runs at once.
_BATCH = 16


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


@dataclass(frozen=True, slots=True)
class Written:
    """Text of a model's own, in whole windows; `digest` says what it was written after."""

    ids: NDArray[np.integer[Any]]
    digest: str


def written_by(
    model: Path,
    given: Windows,
    num_tokens: int,
    folder: Path,
    *,
    device: str = "auto",
    heard: Heard = unheard,
) -> Written:
    """About `num_tokens` in windows of which the first quarter is given and the rest written, every
    other one greedily and the others drawn at temperature 1.

    It is added to a file in `folder` as it comes, so a run that was killed goes on writing.
    """
    facts = (given.digest, given.window, given.seed, str(model))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    path = folder / f"written-{digest[:8]}.bin"
    num_rows = max(1, num_tokens // given.window)
    row_bytes = given.window * given.ids.dtype.itemsize
    num_there = path.stat().st_size // row_bytes if path.is_file() else 0
    with path.open("r+b" if path.is_file() else "wb") as stream, ExitStack() as stack:
        stream.seek(num_there * row_bytes)
        llm: LLM | None = None
        for first in range(num_there, num_rows, _TOGETHER):
            heard("writing the target's own text", first / num_rows)
            # Loaded only if there is something to write.
            llm = llm or stack.enter_context(closing(_plain(model, device)))
            rows = _write_rows(llm, given, range(first, min(first + _TOGETHER, num_rows)))
            stream.write(np.asarray(rows, dtype=given.ids.dtype).tobytes())
            stream.flush()
    ids = np.memmap(path, dtype=given.ids.dtype, mode="r", shape=(num_rows * given.window,))
    return Written(ids, f"{digest}-{num_rows}")


def _write_rows(llm: LLM, given: Windows, numbers: Iterable[int]) -> list[list[int]]:
    num_given = max(1, given.window // 4)
    rows = [(number, given.at(number)[:num_given]) for number in numbers]
    params = [
        SamplingParams(
            max_tokens=given.window - num_given,
            temperature=float(number % 2),
            seed=number,
            ignore_eos=True,
        )
        for number, _ in rows
    ]
    prompts = [host_ints(ids_T) for _, ids_T in rows]
    results = llm.generate(prompts, params)
    return [[*ids, *one.token_ids] for ids, one in zip(prompts, results, strict=True)]


def _plain(model: Path | str, device: str) -> LLM:
    return LLM(model, config=EngineConfig(drafter="none", device=device, batch_size=_BATCH))


def _window(llm: LLM) -> int:
    return llm.spec.max_tokens


def _seeded(params: SamplingParams, place: int) -> SamplingParams:
    return replace(params, seed=params.seed + place)
