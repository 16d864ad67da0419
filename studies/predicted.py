"""Do rounds take what their parts say, and do random weights stand for a real model?"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import (
    DRAFT,
    QUICK_SHAPE,
    SHAPE_B,
    Report,
    bare_pass,
    draft_of,
    fill,
    first_prompts,
    kernel_names,
    medians,
    note,
    study,
    take_turns,
    target_of,
    tier_folders,
)
from cost_study.engines import Bed, CostEngine, CostNumbers, Text, rooms
from cost_study.pair import CostPair
from options import Options
from round_cost import KS, Growing, bare_drafts

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import GenerationResult
from outrider.api.tokenizer import Tokenizer
from outrider.drafters.ngram import NgramDrafter
from outrider.estimate.acceptance import expected_tokens
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.loading import load_model, resolve
from outrider.plugins.measure.turns import ratio_of_medians
from outrider_lab.bench.workload import load_prompts
from outrider_lab.models.gemm import GemmShape
from outrider_lab.models.inflate import shape_called
from outrider_lab.models.synthetic import write_random

BAR, TIMED_SEQ = 0.92, -2
TIERS_BAR, WINDOW = 0.03, 2048


@dataclass(frozen=True, slots=True)
class Size:
    num_prompts: int
    num_tokens: int
    ks: tuple[int, ...]
    repeats: int = 0


FULL = {"a": Size(8, 96, KS, 60), "b": Size(2, 64, KS, 9)}
QUICK = Size(1, 12, (2,), 3)
TIERS_FULL, TIERS_QUICK = Size(24, 32, (2, 4, 8)), Size(2, 6, (2,))


@dataclass(frozen=True, slots=True)
class Run:
    """What the rounds after the first wrote and took, and how much each of them drafted."""

    num_tokens: int
    seconds: float
    drafted: tuple[int, ...]


@study(tiers=True)
def predicted(options: Options, report: Report) -> None:
    """Speculation as it runs against what its parts, timed before, say that it should take.

    A round that drafts K tokens and emits E of them takes T_draft(K) + T_verify(K + 1) + overhead,
    so a run should emit E over that in a second. T_verify and T_draft are bare native passes (the
    n-gram drafter's is its own proposal), timed in this process before the run, at a context as
    long as the run's. The overhead is that of plain decoding: a round of the engine with drafting
    off, less a bare pass over one row. E and the lengths of drafts are the run's own. Prompts are
    of HumanEval and GSM8K, greedy; prefill is left out on both sides.

    `ratio` is achieved over predicted; the bar is 0.92. `drift` is a bare pass after the run over
    one before: where it is far from 1, the machine changed and the ratio says little.
    """
    report["bar"] = BAR
    with tier_folders(options) as folders:
        for tier, folder in folders.items():
            for cell in tier_cells(folder, QUICK if options.quick else FULL[tier]):
                note(report, tier=tier, **cell)


def tier_cells(folder: Path, size: Size) -> Iterator[dict[str, Any]]:
    prompts = first_prompts(size.num_prompts)
    plain = loaded(folder, "none", 0)
    context = common_context(plain, prompts, size.num_tokens)
    overhead = overhead_seconds(plain, prompts, size, context)
    del plain
    for drafter, k in product(("model", "ngram"), size.ks):
        yield cell_of(loaded(folder, drafter, k), prompts, size, context, overhead)


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
    k = llm.k
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
    k = llm.k
    if llm.drafter == "model":
        draft = draft_of(llm)
        seconds = take_turns({k: bare_drafts(draft, context)[k]}, repeats)[k]
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


@study(tiers=True)
def tiers(options: Options, report: Report) -> None:
    """Do random weights and acceptance by script stand for a real model? Rounds of tiers B and C.

    Tier B is the embedded target inflated to 0.4 billion weights, with its draft model: real text,
    real acceptance. Tier C is a Llama of the same sizes whose weights are all random, and the same
    draft model; a script gives the words (outrider_lab/models/synthetic.py), and drafts are
    accepted at the rate that brings as many tokens a round as tier B's. Both run rounds by stages:
    the one call that runs a whole round knows no scripts. Prompts are of HumanEval, greedy. For
    plain decoding and each K the tiers take turns.

    `round_ratio` is tier C's median time of a round over tier B's, with its interval; the bar is
    0.03 from 1. Below stand its parts and tokens a round.
    """
    size = TIERS_QUICK if options.quick else TIERS_FULL
    with (
        tier_folders(options) as folders,
        TemporaryDirectory(prefix="outrider-tier-c-") as place,
    ):
        tokenizer = Tokenizer.load(folders["b"])
        texts = load_prompts("humaneval")[: size.num_prompts]
        prompts = [tokenizer.encode(text)[:64] for text in texts]
        contestants = [CostEngine(study="alpha", method="ar")]
        contestants += [CostEngine(study="alpha", method="sd", k=k, alpha=1.0) for k in size.ks]
        text = Text(prompt_tokens=max(map(len, prompts)), max_tokens=size.num_tokens)
        capacity, draft_room = rooms(contestants, text)
        draft = decoder(resolve(DRAFT), draft_room)
        target = decoder(folders["b"], capacity)
        shape, folder = shape_of(options.quick, target), Path(place) / "c"
        write_random(folder, shape, torch.bfloat16, max_tokens=WINDOW)
        other = decoder(folder, capacity)
        device = torch.device("cpu")
        real = Bed(
            pair=CostPair(target=target, draft=draft, device=device),
            text=text,
            prompts=prompts,
            scripted=False,
        )
        scripted_bed = replace(
            real, pair=CostPair(target=other, draft=draft, device=device), scripted=True
        )
        report |= {"kernels": kernel_names(target.kernels), "bar": TIERS_BAR}
        for one in contestants:
            note(report, **compared(real, scripted_bed, one, size.num_prompts))
        report["met"] = all(abs(cell["round_ratio"] - 1) <= TIERS_BAR for cell in report["cells"])


def decoder(folder: Path, capacity: ModelCapacity) -> Decoder:
    return load_model(folder, LoadOptions(capacity=capacity, dtype="bfloat16", device="cpu"))


def shape_of(quick: bool, target: Decoder) -> GemmShape:
    """Tier B's sizes."""
    shape = QUICK_SHAPE if quick else shape_called(SHAPE_B)
    return GemmShape(
        name="tier c",
        hidden_size=shape.hidden_size,
        ffn_size=shape.ffn_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=target.spec.head_dim,
        vocab_size=target.spec.vocab_size,
        whole_layers=shape.num_layers,
    )


def compared(real: Bed, scripted_bed: Bed, one: CostEngine, num_prompts: int) -> dict[str, Any]:
    """Both tiers on every prompt in turns, after one that warms up and tells acceptance."""
    scripted_bed = replace(scripted_bed, rates=rates_of(real, one, num_prompts))
    scripted_bed.run(one)
    found: dict[str, list[CostNumbers]] = {"b": [], "c": []}
    beds: Mapping[str, Bed] = {"b": real, "c": scripted_bed}
    for repeat in range(num_prompts):
        for tier in ("b", "c") if repeat % 2 else ("c", "b"):
            found[tier].append(beds[tier].run(one, repeat=repeat).numbers)
    ratio = ratio_of_medians(*(seconds(found[tier], "seconds") for tier in ("c", "b")))
    return {
        "k": one.k,
        "round_ratio": round(ratio.value, 4),
        "low": ratio.low,
        "high": ratio.high,
        "rates": [round(rate, 3) for rate in scripted_bed.rates],
        **{
            f"{tier}_{name}": value
            for tier in found
            for name, value in round_parts(found[tier]).items()
        },
    }


def rates_of(real: Bed, one: CostEngine, num_prompts: int) -> tuple[float, ...]:
    """The rate at which scripted drafts bring as many tokens a round as tier B's, from runs before.

    It is not the share of judged tokens that tier B keeps: real drafts fail in runs."""
    if not one.k:
        return (1.0,)
    runs = [real.run(one, repeat=repeat).numbers for repeat in range(num_prompts)]
    tokens = sum(run.num_tokens for run in runs) / sum(run.num_rounds for run in runs)
    steps = range(1001)
    place = bisect_left(steps, tokens, key=lambda step: expected_tokens(step / 1000, one.k))
    return (min(place, 1000) / 1000,)


def seconds(runs: Sequence[CostNumbers], name: str) -> list[float]:
    """Of a round, by prompt."""
    return [getattr(run, name) / run.num_rounds for run in runs]


def round_parts(runs: Sequence[CostNumbers]) -> dict[str, float]:
    return {
        "round_ms": round(1e3 * statistics.median(seconds(runs, "seconds")), 4),
        "draft_ms": round(1e3 * statistics.median(seconds(runs, "draft_seconds")), 4),
        "verify_ms": round(1e3 * statistics.median(seconds(runs, "verify_seconds")), 4),
        "tokens_per_round": round(
            sum(run.num_tokens for run in runs) / sum(run.num_rounds for run in runs), 3
        ),
    }
