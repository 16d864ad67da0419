"""Speculation as it runs against what its parts, timed before, say that it should take.

    python benchmarks/predicted.py [--model FOLDER] [--output FILE] [--quick]

A round that drafts K tokens and emits E of them takes T_draft(K) + T_verify(K + 1) + overhead, so a
run should emit E over that in a second. T_verify and T_draft are bare native passes (common.py,
drafter_cost.py; the n-gram drafter's is its own proposal), timed in this process before the run, at
a context as long as the run's. The overhead is that of plain decoding: a round of the engine with
drafting off, less a bare pass over one row. E and the lengths of drafts are the run's own. Prompts
are of HumanEval and GSM8K, greedy; prefill is left out on both sides.

`ratio` is achieved over predicted; the bar is 0.92. `drift` is a bare pass after the run over one
before: where it is far from 1, the machine changed and the ratio says little. The last line is one
JSON object.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    DRAFT,
    bare_pass,
    draft_of,
    fill,
    kernel_names,
    medians,
    options_of,
    reported,
    take_turns,
    target_of,
    tier_folders,
)
from drafter_cost import KS, Growing, bare_calls

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import GenerationResult
from outrider.bench.workload import WORKLOADS, load_prompts
from outrider.drafters.ngram import NgramDrafter

DRAFTERS = ("model", "ngram")
BAR = 0.92
TIMED_SEQ = -2


@dataclass(frozen=True, slots=True)
class Size:
    num_prompts: int
    num_tokens: int
    repeats: int
    ks: tuple[int, ...]


FULL = {"a": Size(8, 96, 60, KS), "b": Size(2, 64, 9, KS)}
QUICK = Size(1, 12, 3, (2,))


@dataclass(frozen=True, slots=True)
class Run:
    """What the rounds after the first wrote and took, and how much each of them drafted."""

    num_tokens: int
    seconds: float
    drafted: tuple[int, ...]


def main() -> None:
    options = options_of(__doc__, tiers=True).parse_args()
    with reported("predicted", options) as report, tier_folders(options) as folders:
        found: list[dict[str, Any]] = []
        for tier, folder in folders.items():
            for cell in tier_cells(folder, QUICK if options.quick else FULL[tier]):
                found.append({"tier": tier} | cell)
                print(describe(found[-1]))
        report |= {"cells": found, "bar": BAR}


def tier_cells(folder: Path, size: Size) -> list[dict[str, Any]]:
    prompts = [p for name in WORKLOADS for p in load_prompts(name)[: size.num_prompts]]
    plain = loaded(folder, "none", 0)
    context = common_context(plain, prompts, size.num_tokens)
    overhead = overhead_seconds(plain, prompts, size, context)
    del plain
    cells: list[dict[str, Any]] = []
    for drafter in DRAFTERS:
        for k in size.ks:
            llm = loaded(folder, drafter, k)
            cells.append(cell_of(llm, prompts, size, context, overhead))
    return cells


def loaded(folder: Path, drafter: str, k: int) -> LLM:
    config = EngineConfig(drafter=drafter, k=k, batch_size=1, device="cpu", profile=True)
    return LLM(folder, draft=DRAFT if drafter == "model" else None, config=config)


def common_context(llm: LLM, prompts: Sequence[str], num_tokens: int) -> int:
    """Tokens in memory half-way through a run, on average."""
    lengths = [len(llm.tokenizer.encode(prompt)) for prompt in prompts]
    return round(statistics.fmean(lengths)) + num_tokens // 2


def overhead_seconds(llm: LLM, prompts: Sequence[str], size: Size, context: int) -> float:
    """Of a plain round beyond its pass; passes are timed before and after, the mean counts."""
    before = pass_seconds(llm, (1,), context, size.repeats)[1]
    run = run_of(llm, prompts, size.num_tokens)
    after = pass_seconds(llm, (1,), context, size.repeats)[1]
    return max(run.seconds / len(run.drafted) - (before + after) / 2, 0.0)


def cell_of(
    llm: LLM, prompts: Sequence[str], size: Size, context: int, overhead: float
) -> dict[str, Any]:
    k = llm.config.k
    drafting = draft_seconds(llm, context, size.repeats)
    verify = pass_seconds(llm, range(1, k + 2), context, size.repeats)
    run = run_of(llm, prompts, size.num_tokens)
    drift = pass_seconds(llm, (1,), context, size.repeats)[1] / verify[1]
    predicted = sum(drafting + verify[drafted + 1] + overhead for drafted in run.drafted)
    return {
        "drafter": llm.drafter,
        "k": k,
        "kernels": kernel_names(llm.kernels),
        "context": context,
        "tokens_per_round": round(run.num_tokens / len(run.drafted), 3),
        "drafted_per_round": round(statistics.fmean(run.drafted), 3),
        "draft_us": round(1e6 * drafting, 1),
        "verify_us": {rows: round(1e6 * seconds, 1) for rows, seconds in verify.items()},
        "overhead_us": round(1e6 * overhead, 1),
        "predicted_tokens_per_second": round(run.num_tokens / predicted, 2),
        "achieved_tokens_per_second": round(run.num_tokens / run.seconds, 2),
        "ratio": round(predicted / run.seconds, 3),
        "drift": round(drift, 3),
    }


def pass_seconds(llm: LLM, rows: Sequence[int], context: int, repeats: int) -> dict[int, float]:
    """Medians of bare passes over so many rows, which take turns."""
    target = target_of(llm)
    fill(target, TIMED_SEQ, context)
    found = medians(take_turns({n: bare_pass(target, TIMED_SEQ, n) for n in rows}, repeats))
    target.state.close(TIMED_SEQ)
    return found


def draft_seconds(llm: LLM, context: int, repeats: int) -> float:
    """A draft of K tokens, whatever becomes of it."""
    k = llm.config.k
    if llm.drafter == "model":
        draft = draft_of(llm)
        calls: dict[int, Callable[[], object]] = {k: bare_calls(draft, context)[k]}
        seconds = take_turns(calls, repeats)[k]
        draft.state.close(-1)
        return statistics.median(seconds)
    text = llm.tokenizer.encode(" ".join(load_prompts("humaneval")[:8]))[:context]
    growing = Growing(NgramDrafter(), text, k, seq_id=0)
    for _ in range(repeats + 1):
        growing.propose()
    return statistics.median(growing.seconds)


def run_of(llm: LLM, prompts: Sequence[str], num_tokens: int) -> Run:
    """All prompts one after the other; the first is also run before, untimed."""
    params = SamplingParams(max_tokens=num_tokens)
    llm.generate(prompts[:1], params)
    runs = [after_first_round(llm.generate([prompt], params)[0]) for prompt in prompts]
    return Run(
        sum(run.num_tokens for run in runs),
        sum(run.seconds for run in runs),
        tuple(drafted for run in runs for drafted in run.drafted),
    )


def after_first_round(result: GenerationResult) -> Run:
    """The rounds that read nothing of the prompt."""
    emitting = [trace for trace in result.rounds if trace.num_emitted]
    later = emitting[1:]
    times = result.token_seconds
    return Run(
        sum(trace.num_emitted for trace in later),
        times[-1] - times[0],
        tuple(trace.num_drafted for trace in later),
    )


def describe(cell: dict[str, Any]) -> str:
    return (
        f"tier {cell['tier']} {cell['drafter']:5} K={cell['k']}: "
        f"E={cell['tokens_per_round']:.2f}, "
        f"{cell['achieved_tokens_per_second']:8.1f} tok/s of "
        f"{cell['predicted_tokens_per_second']:8.1f} predicted: {cell['ratio']:.3f} "
        f"(drift {cell['drift']:.2f})"
    )


if __name__ == "__main__":
    main()
