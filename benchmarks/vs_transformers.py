"""Outrider beside Hugging Face `generate`."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from typing import Any

import torch
from common import DRAFT, TARGET, Report, first_prompts, study
from hf_peer import HfPeer

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.machine import Neighbours
from outrider.bench.turns import Score, best, race
from outrider.models.loading import resolve

DTYPES = ("float32", "bfloat16")
OUR_CELLS = (("none", 0), ("model", 2), ("model", 4), ("model", 8), ("ngram", 4), ("ngram", 8))


@study(prompts=12, max_tokens=128)
def vs_transformers(options: Namespace, report: Report) -> None:
    """Outrider beside Hugging Face `generate`: same weights, prompts, precision choice and counter.

    Both sides run in float32 and in bfloat16 and each is judged by its faster one. Prompts are so
    many of each workload.
    """
    if options.quick:
        options.prompts, options.max_tokens = 1, 8
    prompts = first_prompts(options.prompts)
    report |= {"max_tokens": options.max_tokens, "prompts": len(prompts)}
    for batch_size in (1, 8):
        report[f"batch_{batch_size}"] = compare(prompts, batch_size, options.max_tokens)


def compare(prompts: list[str], batch_size: int, max_tokens: int) -> dict[str, Any]:
    """Race all contestants at `batch_size`; tokens per second and the three ratios."""
    tokenizer = LLM().tokenizer
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    work = [ids[i : i + batch_size] for i in range(0, len(ids), batch_size)]
    contestants: dict[str, Any] = {}
    for dtype in DTYPES:
        contestants |= theirs(dtype, batch_size, max_tokens)
        contestants |= ours(dtype, batch_size, max_tokens)

    def tick() -> None:
        print(".", end="", file=sys.stderr, flush=True)

    with Neighbours() as neighbours:
        scores = race(contestants, work, tick=tick)
    print(file=sys.stderr)
    return verdict(scores, batch_size) | {"foreign_cpu_share": neighbours.share}


def theirs(dtype: str, batch_size: int, max_tokens: int) -> dict[str, Any]:
    peer = HfPeer(resolve(TARGET), resolve(DRAFT), getattr(torch, dtype))
    run = partial(peer.generate, max_tokens=max_tokens)
    found: dict[str, Any] = {f"hf plain {dtype}": run}
    if batch_size == 1:  # assisted and lookup decoding refuse larger batches
        found[f"hf assisted {dtype}"] = partial(run, **peer.assisted())
        for k in (4, 8):
            found[f"hf lookup{k} {dtype}"] = partial(run, prompt_lookup_num_tokens=k)
    return found


def ours(dtype: str, batch_size: int, max_tokens: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=max_tokens)
    found: dict[str, Any] = {}
    for drafter, k in OUR_CELLS:
        config = EngineConfig(drafter=drafter, k=k, dtype=dtype, batch_size=batch_size)
        found[f"outrider {drafter}{k or ''} {dtype}"] = partial(
            run_ours, LLM(config=config), params
        )
    return found


def run_ours(llm: LLM, params: SamplingParams, ids: list[list[int]]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in llm.generate(ids, params)]


def verdict(scores: dict[str, Score], batch_size: int) -> dict[str, Any]:
    rates = {name: score.tokens_per_second for name, score in scores.items()}
    hf_plain = best(scores, [n for n in rates if n.startswith("hf plain")])
    our_plain = best(scores, [n for n in rates if n.startswith("outrider none")])
    our_spec = best(scores, [n for n in rates if n.startswith(("outrider m", "outrider ng"))])
    hf_spec = [n for n in rates if n.startswith(("hf assisted", "hf lookup"))]
    hf_best = best(scores, hf_spec) if hf_spec else hf_plain
    result: dict[str, Any] = {
        "scores": {name: score.to_dict() for name, score in scores.items()},
        "best": {"hf_plain": hf_plain, "hf": hf_best, "plain": our_plain, "spec": our_spec},
        "plain_ratio": round(rates[our_plain] / rates[hf_plain], 3),
        "speculation_ratio": round(rates[our_spec] / rates[hf_best], 3),
        "speed_up_over_own_plain": round(rates[our_spec] / rates[our_plain], 3),
    }
    print(f"batch {batch_size}")
    for name, score in sorted(scores.items(), key=lambda item: -item[1].tokens_per_second):
        print(f"  {name:32} {score.tokens_per_second:8.1f} tok/s")
    print(f"  plain {result['plain_ratio']}x, speculation {result['speculation_ratio']}x")
    return result
