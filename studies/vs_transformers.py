"""Hugging Face `transformers`, an optional dependency, as a peer, and Outrider beside it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import TARGET, Report, first_prompts, study
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import MachineError
from outrider.models.loading import resolve
from outrider.plugins.measure.turns import Neighbours, Score, race
from outrider_lab.measure.machine import best


class HfPeer:
    """Greedy `generate` of one checkpoint in one dtype."""

    def __init__(self, target: Path, dtype: torch.dtype) -> None:
        load = _import_transformers().AutoModelForCausalLM.from_pretrained
        self._target: Any = load(target, dtype=dtype).eval()
        self._pad = self._target.config.eos_token_id

    @torch.inference_mode()
    def generate(self, ids: list[list[int]], *, max_tokens: int) -> list[list[int]]:
        """Emitted ids of each prompt; several prompts run as one left-padded batch."""
        longest = max(map(len, ids))
        padded = [[self._pad] * (longest - len(row)) + row for row in ids]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
        out = self._target.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=self._pad,
        )
        return [self._emitted(row) for row in out[:, longest:].tolist()]

    def _emitted(self, row: list[int]) -> list[int]:
        end = row.index(self._pad) + 1 if self._pad in row else len(row)
        return row[:end]


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MachineError(
            "transformers is not installed, and this comparison runs it.",
            hint="pip install 'outrider[hf]'",
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


DTYPES, BATCH_SIZE = ("float32", "bfloat16"), 8
OUR_CELLS = (("none", 0), ("model", 2), ("model", 4), ("model", 8), ("ngram", 4), ("ngram", 8))


@study(prompts=12, max_tokens=128)
def vs_transformers(options: Options, report: Report) -> None:
    """Outrider beside Hugging Face `generate`: same weights, prompts, precision choice and counter.

    Both sides run in float32 and in bfloat16 and each is judged by its faster one, on batches of
    eight prompts, so many of each workload. `outrider bench peers` has one request at a time, and
    speculation on both sides.
    """
    if options.quick:
        options.prompts, options.max_tokens = 1, 8
    prompts = first_prompts(options.prompts)
    report |= {"max_tokens": options.max_tokens, "prompts": len(prompts)}
    report[f"batch_{BATCH_SIZE}"] = compare(prompts, options.max_tokens)


def compare(prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Race all contestants; tokens per second and the three ratios."""
    tokenizer = LLM().tokenizer
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    work = [ids[i : i + BATCH_SIZE] for i in range(0, len(ids), BATCH_SIZE)]
    contestants: dict[str, Any] = {}
    for dtype in DTYPES:
        peer = HfPeer(resolve(TARGET), getattr(torch, dtype))
        contestants[f"hf plain {dtype}"] = partial(peer.generate, max_tokens=max_tokens)
        contestants |= ours(dtype, max_tokens)

    def tick() -> None:
        print(".", end="", file=sys.stderr, flush=True)

    with Neighbours() as neighbours:
        scores = race(contestants, work, tick=tick)
    print(file=sys.stderr)
    return verdict(scores) | {"foreign_cpu_share": neighbours.share}


def ours(dtype: str, max_tokens: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=max_tokens)
    found: dict[str, Any] = {}
    for drafter, k in OUR_CELLS:
        config = EngineConfig(drafter=drafter, k=k, dtype=dtype, batch_size=BATCH_SIZE)
        found[f"outrider {drafter}{k or ''} {dtype}"] = partial(
            run_ours, LLM(config=config), params
        )
    return found


def run_ours(llm: LLM, params: SamplingParams, ids: list[list[int]]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in llm.generate(ids, params)]


def verdict(scores: dict[str, Score]) -> dict[str, Any]:
    rates = {name: score.tokens_per_second for name, score in scores.items()}
    hf_plain = best(scores, [n for n in rates if n.startswith("hf plain")])
    our_plain = best(scores, [n for n in rates if n.startswith("outrider none")])
    our_spec = best(scores, [n for n in rates if n.startswith(("outrider m", "outrider ng"))])
    result: dict[str, Any] = {
        "scores": {name: score.to_dict() for name, score in scores.items()},
        "best": {"hf_plain": hf_plain, "hf": hf_plain, "plain": our_plain, "spec": our_spec},
        "plain_ratio": round(rates[our_plain] / rates[hf_plain], 3),
        "speculation_ratio": round(rates[our_spec] / rates[hf_plain], 3),
        "speed_up_over_own_plain": round(rates[our_spec] / rates[our_plain], 3),
    }
    for name, score in sorted(scores.items(), key=lambda item: -item[1].tokens_per_second):
        print(f"  {name:32} {score.tokens_per_second:8.1f} tok/s")
    print(f"  plain {result['plain_ratio']}x, speculation {result['speculation_ratio']}x")
    return result
