"""What a round spends between logits and verdict.

Shapes:  K = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from time import perf_counter
from typing import Any

import torch
from common import Report, in_turns, note, study
from native_judge import NativeJudge
from options import Options
from torch import Tensor

from outrider import SamplingParams
from outrider.core.clock import host_ints
from outrider.core.draft import Draft
from outrider.core.errors import given
from outrider.core.rng import KeyedRng, draw_for, pick_node
from outrider.core.sampling import PLAIN, Sampling, empty_probs, processed_probs
from outrider.engine.round import LiveSequence
from outrider.engine.stages import read_pass
from outrider.kernels.native.build import needed_library
from outrider.kernels.native.cpu import num_physical_cores
from outrider.kernels.native.ops import function
from outrider.kernels.native.rounds import CacheSpan, RoundRow
from outrider.kernels.operators import Kernels
from outrider.kernels.registry import choose
from outrider.verify.rules import rule_for

VOCABULARIES, LENGTHS = (8192, 32_768, 131_072), (1, 4, 8)
TEMPERATURE = 0.8
# Ways of choosing that the largest cell is timed with as well.
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"sampler": "coupled"},
)
PROMPT = [1, 2, 3]
# PyTorch's threads keep their cores busy for so long after a call that they shared.
SETTLE_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Chain:
    """A drafted chain and the logits of the pass that verifies it."""

    draft: Draft
    logits_WV: Tensor
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Side:
    """Operators, and how they accept: seconds and how many tokens were accepted."""

    sampling: Sampling
    accept: Callable[[Chain], tuple[float, int]]


@study(repeats=30, threads=0)
def accept_cost(options: Options, report: Report) -> None:
    """What a round spends between logits and verdict: native kernels against the PyTorch reference.

    An accept step is what the engine does after a target pass: distributions of K + 1 rows of
    logits, as far as they are looked at, the block rule over a chain that a drafter drew, and the
    target's own token. The native side is the verdict of a round in one call, the reference the
    stages with PyTorch's operators. A draft step is one distribution and one draw of a drafter.
    Logits are normal with a spread of 3, the drafter's are the target's with noise added, and
    temperature is 0.8. Both sides run in turn on the same numbers; the figures are medians, with
    the fastest tenth beside them, for on a busy machine that is nearer to the cost. The largest
    cell comes greedy, with each filter and by the coupled rule as well. --threads 0 takes the
    physical cores.
    """
    repeats, grid = options.repeats, list(product(VOCABULARIES, LENGTHS))
    if options.quick:
        repeats, grid = 2, grid[:2]
    threads = options.threads or num_physical_cores()
    torch.set_num_threads(threads)
    kernels = choose(device=torch.device("cpu"), dtype=torch.float32, threads=threads)
    report |= {
        "kernels": kernels.choices[-1].name,
        "threads": threads,
        "temperature": TEMPERATURE,
        "repeats": repeats,
    }
    library = needed_library("an accept step in one call")
    judge = NativeJudge(library, function(library, "team")(threads, None))
    sides = (
        Side(kernels.sampling, partial(_judge_seconds, judge, kernels)),
        Side(PLAIN, partial(_stage_seconds, PLAIN, kernels)),
    )
    for size, k in grid:
        note(report, **_accept_cell(kernels, sides, repeats, vocab_size=size, k=k))
    size, k = grid[-1]
    for way in WAYS:
        note(report, **_accept_cell(kernels, sides, repeats, vocab_size=size, k=k, **way))


def _accept_cell(
    kernels: Kernels,
    both: Sequence[Side],
    repeats: int,
    *,
    vocab_size: int,
    k: int,
    **way: Any,
) -> dict[str, Any]:
    """Microseconds of both sides, and reference / native of the medians."""

    def turns(one: Side) -> Callable[[], tuple[float, float, int]]:
        seeds, side = count(), one.sampling

        def turn() -> tuple[float, float, int]:
            chain = _drawn_chain(vocab_size, k, next(seeds), way)
            seconds, num_accepted = one.accept(chain)
            if chain.params.greedy:
                return seconds, 0.0, num_accepted
            return seconds, _draft_seconds(chain, side, kernels), num_accepted

        return turn

    sides = dict(zip(("native", "reference"), both, strict=True))
    found = in_turns({name: turns(side) for name, side in sides.items()}, repeats, warm_ups=2)
    cell: dict[str, Any] = {"vocab_size": vocab_size, "k": k, **way}
    parts = ("accept",) if way.get("temperature") == 0 else ("accept", "draft")
    for index, part in enumerate(parts):
        for side, turn in found.items():
            times = sorted(one[index] for one in turn)
            middle, fast = statistics.median(times), times[len(times) // 10]
            cell[f"{part}_{side}_us"] = round(middle * 1e6, 1)
            cell[f"{part}_{side}_fast_us"] = round(fast * 1e6, 1)
        cell[f"{part}_ratio"] = round(cell[f"{part}_reference_us"] / cell[f"{part}_native_us"], 2)
    cell["accepted_per_round"] = {
        side: sum(one[2] for one in turn) / repeats for side, turn in found.items()
    }
    return cell


def _drawn_chain(vocab_size: int, k: int, seed: int, way: Mapping[str, Any]) -> Chain:
    """A greedy one is the likeliest of the drafter's tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits_WV = 3 * torch.randn(k + 1, vocab_size, generator=generator)
    near_KV = logits_WV[:k] + 0.5 * torch.randn(k, vocab_size, generator=generator)
    params = SamplingParams(**{"temperature": TEMPERATURE, "seed": seed, "sampler": "block", **way})
    if params.greedy:
        return Chain(Draft.chain(host_ints(near_KV.argmax(-1))), logits_WV, params)
    q_KV = processed_probs(near_KV, params)
    rng = KeyedRng(seed, 0, len(PROMPT))
    draw = draw_for(given(params.sampler, "rule"))
    tokens = [draw(q_KV[node], rng, node, node) for node in range(k)]
    return Chain(Draft.chain(tokens, q_KV), logits_WV, params)


def _judge_seconds(judge: NativeJudge, kernels: Kernels, chain: Chain) -> tuple[float, int]:
    """From logits to the verdict, and how many tokens were accepted."""
    params, logits_WV = chain.params, chain.logits_WV.clone()
    row = RoundRow(
        seed=params.rng_seed,
        sample=0,
        start=len(PROMPT),
        temperature=params.temperature,
        target=CacheSpan(0, (), ()),
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        drafted=chain.draft.tokens,
        probs_NV=chain.draft.probs_NV,
        rule=given(params.sampler, "rule"),
    )
    _settle(kernels, logits_WV)
    started = perf_counter()
    verdicts = judge([row], logits_WV)
    seconds = perf_counter() - started
    assert verdicts is not None
    return seconds, len(verdicts[0].path)


def _stage_seconds(side: Sampling, kernels: Kernels, chain: Chain) -> tuple[float, int]:
    rule = rule_for(given(chain.params.sampler, "rule"), sampling=side)
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
    _settle(kernels, logits_WV)
    started = perf_counter()
    reading = read_pass([seq], logits_WV, kernels.argmax, exact=True, sampling=side)[0]
    verdict = rule([reading.row])[0]
    return perf_counter() - started, len(verdict.path)


def _draft_seconds(chain: Chain, side: Sampling, kernels: Kernels) -> float:
    """One distribution, where it is to be reported, and one draw from it."""
    rng = KeyedRng(chain.params.rng_seed, 0, len(PROMPT), side.pick)
    logits_1V = chain.logits_WV[:1].clone()
    probs_1V = empty_probs(1, logits_1V[0]).zero_()
    _settle(kernels, logits_1V)
    started = perf_counter()
    probs_1V = processed_probs(logits_1V, chain.params, side, probs_1V)
    pick_node(probs_1V[0], rng, 0, 0)
    return perf_counter() - started


def _settle(kernels: Kernels, logits_NV: Tensor) -> None:
    """As after a pass of the model: cores are warm, our own threads awake and others at rest."""
    end = perf_counter() + SETTLE_SECONDS
    while perf_counter() < end:
        kernels.argmax(logits_NV)
