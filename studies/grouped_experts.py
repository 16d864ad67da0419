"""What it costs to verify a draft in a mixture, by the number of distinct experts of its rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from time import perf_counter

import torch
from common import Report, note, study
from options import Options
from torch import Tensor

from outrider.core.errors import given
from outrider.kernels.native.layers import DenseWeights, MixtureWeights
from outrider.kernels.operators import Kernels
from outrider.kernels.registry import choose
from outrider.models.expert_kinds import Experts
from outrider.plugins.measure.turns import rotated

# A layer of Qwen3-30B-A3B.
HIDDEN, SIZES = 2048, Experts(num_experts=128, num_chosen=8, ffn_size=768)
ROWS = 4
# Steps from one row's experts to the next row's; 8 steps share none.
STEPS = (0, 2, 4, 6, 8)
# Score of a chosen expert; that of others is its negative.
SCORE = 10.0


@study(formats=["none", "int4"], layers=3, repeats=60)
def grouped_experts(options: Options, report: Report) -> None:
    """Does a pass over a draft read each expert once?

    A layer with random weights runs 4 rows in one call, the same rows in one call each, and one row
    alone, in turns. Every call has other experts of several layers, so that weights come from
    memory. A cell has the number of distinct experts of the rows and the times over that of one
    row.
    """
    layers, repeats = (1, 3) if options.quick else (options.layers, options.repeats)
    report |= {"hidden": HIDDEN, "ffn": SIZES.ffn_size, "experts": SIZES.num_experts, "rows": ROWS}
    for quantise in options.formats:
        dtype = torch.bfloat16
        kernels = choose(device=torch.device("cpu"), dtype=dtype, quantise=quantise)
        # Without native kernels there is no such call.
        mixtures = [mixture(kernels, seed) for seed in range(layers)]
        dice = Random(quantise)
        for step in STEPS:
            times = timed(kernels, mixtures, step, repeats, dice)
            one = times["one"]
            note(
                report,
                format="bfloat16" if quantise == "none" else quantise,
                distinct=SIZES.num_chosen + (ROWS - 1) * step,
                one_row_us=round(1e6 * one, 1),
                grouped=round(times["grouped"] / one, 3),
                apart=round(times["apart"] / one, 3),
            )


def mixture(kernels: Kernels, seed: int) -> MixtureWeights:
    """Random experts behind a router that scores each by one number of the row."""
    noise = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=noise) * 0.02).bfloat16()

    def net() -> DenseWeights:
        up_2FD, down_DF = matrix(2 * SIZES.ffn_size, HIDDEN), matrix(HIDDEN, SIZES.ffn_size)
        return DenseWeights(kernels.pack(up_2FD), kernels.pack(down_DF))

    weights = MixtureWeights(
        router=kernels.pack(torch.eye(SIZES.num_experts, HIDDEN).bfloat16()),
        experts=[net() for _ in range(SIZES.num_experts)],
    )
    made = given(kernels.mixture, "native mixture")
    return replace(weights, native=made(SIZES, weights))


def rows_with(step: int, dice: Random) -> Tensor:
    """Rows of which each chooses 8 experts, `step` of them other ones than the row before."""
    pool = dice.sample(range(SIZES.num_experts), SIZES.num_chosen + (ROWS - 1) * step)
    x_ND = torch.randn(ROWS, HIDDEN) * 0.1
    x_ND[:, : SIZES.num_experts] = -SCORE
    for row in range(ROWS):
        x_ND[row, pool[row * step : row * step + SIZES.num_chosen]] = SCORE
    return x_ND


def timed(
    kernels: Kernels, mixtures: list[MixtureWeights], step: int, repeats: int, dice: Random
) -> Mapping[str, float]:
    """Median seconds of one row, of the rows in one call, and of the rows in a call each."""

    def run(x_ND: Tensor, size: int, layer: MixtureWeights) -> None:
        native = given(layer.native, "native mixture")
        for first in range(0, len(x_ND), size):
            part_ND = x_ND[first : first + size]
            kernels.mix(native, part_ND, torch.empty_like(part_ND))

    calls: dict[str, Callable[[Tensor, MixtureWeights], None]] = {
        "one": lambda x_ND, layer: run(x_ND[:1], 1, layer),
        "grouped": lambda x_ND, layer: run(x_ND, ROWS, layer),
        "apart": lambda x_ND, layer: run(x_ND, 1, layer),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name in rotated(list(calls), turn):
            call = partial(calls[name], rows_with(step, dice), dice.choice(mixtures))
            started = perf_counter()
            call()
            found[name].append(perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in found.items()}
