"""Do random weights and acceptance by script stand for a real model? Rounds of tiers B and C.

    python benchmarks/tiers.py [--model FOLDER] [--output FILE] [--quick]

Tier B is the embedded target inflated to 0.4 billion weights, with its draft model: real text, real
acceptance. Tier C is a Llama of the same sizes whose weights are all random, and the same draft
model; a script says the words (lab/synthetic.py), and drafts are kept at the rate that brings as
many tokens a round as tier B's. Both run rounds by stages: the one call that runs a whole round
knows no scripts. Prompts are of HumanEval, greedy. For plain decoding and each K the tiers take
turns.

`round_ratio` is tier C's median time of a round over tier B's, with its interval; the bar is 0.03
from 1. Below stand its parts and tokens a round. The last line is one JSON object.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import DRAFT, QUICK_SHAPE, SHAPE_B, kernel_names, options_of, reported, tier_folders

from outrider.api.tokenizer import Tokenizer
from outrider.bench.frame import ratio_of_medians
from outrider.bench.gemm.engines import Bed, CostEngine, CostNumbers, Text, rooms
from outrider.bench.gemm.pair import CostPair
from outrider.bench.workload import load_prompts
from outrider.estimate.theory import expected_tokens
from outrider.lab.gemm_shape import GemmShape
from outrider.lab.inflate import shape_called
from outrider.lab.synthetic import write_random
from outrider.models.decoder import Decoder, Room
from outrider.models.loading import LoadOptions, load_model, resolve

BAR = 0.03
WINDOW = 2048


@dataclass(frozen=True, slots=True)
class Size:
    num_prompts: int
    num_tokens: int
    ks: tuple[int, ...]


FULL, QUICK = Size(24, 32, (2, 4, 8)), Size(2, 6, (2,))


def main() -> None:
    options = options_of(__doc__, tiers=True).parse_args()
    size = QUICK if options.quick else FULL
    with (
        reported("tiers", options) as report,
        tier_folders(options) as folders,
        TemporaryDirectory(prefix="outrider-tier-c-") as place,
    ):
        tokenizer = Tokenizer.load(folders["b"])
        texts = load_prompts("humaneval")[: size.num_prompts]
        prompts = [tokenizer.encode(text)[:64] for text in texts]
        contestants = [CostEngine(study="alpha", method="ar")]
        contestants += [CostEngine(study="alpha", method="sd", k=k, alpha=1.0) for k in size.ks]
        text = Text(prompt_tokens=max(map(len, prompts)), max_tokens=size.num_tokens)
        room, draft_room = rooms(contestants, text)
        draft = loaded(resolve(DRAFT), draft_room)
        target = loaded(folders["b"], room)
        shape, folder = shape_of(options.quick, target), Path(place) / "c"
        write_random(folder, shape, torch.bfloat16, max_tokens=WINDOW)
        other = loaded(folder, room)
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
        cells = [compared(real, scripted_bed, one, size.num_prompts) for one in contestants]
        report |= {"kernels": kernel_names(target.kernels), "bar": BAR, "cells": cells}
        report["met"] = all(abs(cell["round_ratio"] - 1) <= BAR for cell in cells)
        for cell in cells:
            print(describe(cell))


def loaded(folder: Path, room: Room) -> Decoder:
    return load_model(folder, LoadOptions(room=room, dtype="bfloat16", device="cpu"))


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
        **{f"{tier}_{name}": value for tier in found for name, value in parts(found[tier]).items()},
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


def parts(runs: Sequence[CostNumbers]) -> dict[str, float]:
    return {
        "round_ms": round(1e3 * statistics.median(seconds(runs, "seconds")), 4),
        "draft_ms": round(1e3 * statistics.median(seconds(runs, "draft_seconds")), 4),
        "verify_ms": round(1e3 * statistics.median(seconds(runs, "verify_seconds")), 4),
        "tokens_per_round": round(
            sum(run.num_tokens for run in runs) / sum(run.num_rounds for run in runs), 3
        ),
    }


def describe(cell: dict[str, Any]) -> str:
    return (
        f"K={cell['k']}: a round takes {cell['c_round_ms']:.2f} ms by script and "
        f"{cell['b_round_ms']:.2f} ms for real, ratio {cell['round_ratio']:.3f}; "
        f"{cell['c_tokens_per_round']:.2f} and {cell['b_tokens_per_round']:.2f} tokens a round"
    )


if __name__ == "__main__":
    main()
