"""What a round spends between logits and verdict: native kernels against the PyTorch reference.

    python benchmarks/accept_cost.py [--repeats 30] [--threads 2] [--output FILE] [--quick]

An accept step is what the engine does after a target pass: laws of K + 1 rows of logits
(`read_pass`), the block rule over a chain that a drafter drew, and the target's own token. A draft
step is one law and one draw of a drafter. Logits are normal with a spread of 3, the drafter's are
the target's with noise added, and temperature is 0.8. Both sides run in turn on the same numbers,
and the order changes from repeat to repeat; the figures are medians, with the fastest tenth beside
them, for on a busy machine that is nearer to the cost. The last line is one JSON object.

Shapes:  K = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import options_of, reported
from torch import Tensor

from outrider import SamplingParams
from outrider.core.draft import Draft
from outrider.core.rng import KeyedRng, pick_node
from outrider.core.sampling import PLAIN, Sampling, empty_laws, processed_probs
from outrider.core.sequence import LiveSequence
from outrider.engine.stages import read_pass
from outrider.kernels.native.cpu import num_physical_cores
from outrider.kernels.registry import Kernels, choose
from outrider.verify.rules import rule_for

VOCABULARIES = (8192, 32_768, 131_072)
LENGTHS = (1, 4, 8)
TEMPERATURE = 0.8
PROMPT = [1, 2, 3]
# PyTorch's threads keep their cores busy for so long after a call that they shared.
SETTLE_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Chain:
    """A drafted chain and the logits of the pass that verifies it."""

    draft: Draft
    logits_WV: Tensor
    params: SamplingParams


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0, help="0 takes the physical cores")
    options = parser.parse_args()
    repeats, grid = options.repeats, list(product(VOCABULARIES, LENGTHS))
    if options.quick:
        repeats, grid = 2, grid[:2]
    threads = options.threads or num_physical_cores()
    torch.set_num_threads(threads)
    kernels = choose(device=torch.device("cpu"), dtype=torch.float32, threads=threads)
    with reported("accept_cost", options) as report:
        report |= {
            "kernels": kernels.choices[-1].name,
            "threads": threads,
            "temperature": TEMPERATURE,
            "repeats": repeats,
            "cells": [measure(kernels, size, k, repeats) for size, k in grid],
        }


def measure(kernels: Kernels, vocab_size: int, k: int, repeats: int) -> dict[str, Any]:
    """Microseconds of both sides, and reference / native of the medians."""
    sides = {"native": kernels.sampling, "reference": PLAIN}
    parts = ("accept", "draft")
    spent: dict[str, list[float]] = {f"{side}_{part}": [] for side in sides for part in parts}
    accepted: dict[str, int] = dict.fromkeys(sides, 0)
    for repeat in range(-2, repeats):
        chain = drawn_chain(vocab_size, k, seed=repeat + 2)
        order = list(sides) if repeat % 2 else list(reversed(sides))
        for name in order:
            seconds, num_accepted = accept_seconds(chain, sides[name], kernels)
            drafting = draft_seconds(chain, sides[name], kernels)
            if repeat >= 0:  # the first two warm caches and memory
                spent[f"{name}_accept"].append(seconds)
                spent[f"{name}_draft"].append(drafting)
                accepted[name] += num_accepted
    cell: dict[str, Any] = {"vocab_size": vocab_size, "k": k}
    for part in parts:
        for side in sides:
            times = sorted(spent[f"{side}_{part}"])
            cell[f"{part}_{side}_us"] = round(median(times) * 1e6, 1)
            cell[f"{part}_{side}_fast_us"] = round(times[len(times) // 10] * 1e6, 1)
        ratio = cell[f"{part}_reference_us"] / cell[f"{part}_native_us"]
        cell[f"{part}_ratio"] = round(ratio, 2)
    cell["accepted_per_round"] = {side: accepted[side] / repeats for side in sides}
    print(describe(cell))
    return cell


def describe(cell: dict[str, Any]) -> str:
    told = [_described(cell, part) for part in ("accept", "draft")]
    return f"V={cell['vocab_size']:6} K={cell['k']}: {'; '.join(told)}"


def _described(cell: dict[str, Any], part: str) -> str:
    native, reference = f"{part}_native", f"{part}_reference"
    return (
        f"{part} {cell[f'{native}_us']:7.1f} us (fast {cell[f'{native}_fast_us']:.1f}), "
        f"reference {cell[f'{reference}_us']:8.1f} (fast {cell[f'{reference}_fast_us']:.1f}), "
        f"{cell[f'{part}_ratio']:.1f} x"
    )


def drawn_chain(vocab_size: int, k: int, seed: int) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    logits_WV = 3 * torch.randn(k + 1, vocab_size, generator=generator)
    near_KV = logits_WV[:k] + 0.5 * torch.randn(k, vocab_size, generator=generator)
    params = SamplingParams(temperature=TEMPERATURE, seed=seed)
    q_KV = processed_probs(near_KV, params)
    noise = KeyedRng(seed, 0, len(PROMPT))
    tokens = [pick_node(q_KV[node], noise, node, node) for node in range(k)]
    return Chain(Draft.chain(tokens, q_KV), logits_WV, params)


def accept_seconds(chain: Chain, side: Sampling, kernels: Kernels) -> tuple[float, int]:
    """From logits to the verdict, and how many tokens were accepted."""
    rule = rule_for("block", sampling=side)
    seq = LiveSequence(
        seq_id=0,
        tokens=list(PROMPT),
        prompt_length=len(PROMPT),
        params=chain.params,
        limit=100,
        pick=side.pick,
        draft=chain.draft,
    )
    logits_WV = chain.logits_WV.clone()
    settle(kernels, logits_WV)
    started = perf_counter()
    reading = read_pass([seq], logits_WV, kernels.argmax, exact=True, sampling=side)[0]
    verdict = rule([reading.row])[0]
    return perf_counter() - started, len(verdict.path)


def draft_seconds(chain: Chain, side: Sampling, kernels: Kernels) -> float:
    """One law, where it is to be reported, and one draw from it."""
    noise = KeyedRng(chain.params.seed, 0, len(PROMPT), side.pick)
    logits_1V = chain.logits_WV[:1].clone()
    law_1V = empty_laws(1, logits_1V[0]).zero_()
    settle(kernels, logits_1V)
    started = perf_counter()
    law_1V = processed_probs(logits_1V, chain.params, side, law_1V)
    pick_node(law_1V[0], noise, 0, 0)
    return perf_counter() - started


def settle(kernels: Kernels, logits_NV: Tensor) -> None:
    """As after a pass of the model: cores are warm, our own threads awake and others at rest."""
    end = perf_counter() + SETTLE_SECONDS
    while perf_counter() < end:
        kernels.argmax(logits_NV)


if __name__ == "__main__":
    main()
