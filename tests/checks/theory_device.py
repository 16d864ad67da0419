"""The device of docs/theory.md, sections 7 and 12: a roofline with the numbers of the page.

The energies are orders of magnitude: 30 pJ a byte is HBM2 (O'Connor et al. 2017, Fine-grained DRAM,
3.9 pJ a bit), 0.75 pJ an operation half of an FP16 multiply and add (Horowitz 2014, Computing's
energy problem).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from outrider.core.spec import ModelSpec
from outrider.estimate.acceptance import expected_tokens, prefix_products
from outrider.estimate.forecast import DeviceSheet, PassWork, Power, reading_seconds, row_seconds
from outrider_lab.cli.simulate_setup import spec_named
from outrider_lab.planner import rounds
from outrider_lab.planner.calibration import RoundStats
from outrider_lab.planner.roofline import Energy, Joules, pass_seconds, ridge_rows, round_joules
from outrider_lab.planner.rounds import DecodeLoad


@dataclass(frozen=True)
class Numbers:
    """Chance of acceptance, draft length, cost of a draft pass in plain passes, tokens of context;
    billions of parameters, GB/s, TFLOP/s, watts."""

    alpha: float = 0.8
    k: int = 4
    c: float = 0.1
    context: int = 0
    parameters: float = 7.0
    bandwidth: float = 900.0
    tflops: float = 300.0
    watts: float = 100.0


BYTE, OPERATION = 30e-12, 0.75e-12


def model_of(parameters: float) -> ModelSpec:
    """A model of so many billion parameters, shaped as Llama-2-7B, whose keys and values of a token
    take 0.5 MiB beside 14 GB. Models of other sizes have layers in proportion."""
    like = spec_named("llama2-7b")
    return replace(
        like,
        name=f"{parameters:g}B",
        num_layers=max(1, round(like.num_layers * parameters / 7)),
        num_parameters=max(1, round(parameters * 1e9)),
    )


class Device:
    """The given model on the given device, which reaches its peaks, takes rows one by one, and
    turns sharply from one limit to the other. A pass of the drafter takes its share of a plain
    one. Times are milliseconds."""

    def __init__(self, given: Numbers) -> None:
        self.given = given
        self.work = PassWork(model_of(given.parameters))
        self.sheet = DeviceSheet(
            name="device",
            bandwidth=given.bandwidth * 1e9,
            flops={"bfloat16": given.tflops * 1e12},
            memory_bytes=0,
            row_tile=1,
            bandwidth_share=1.0,
            flops_share=1.0,
            p_norm=math.inf,
        )
        # Reading the weights, the products of a row, and the rows at which both take as long.
        self.reading = 1e3 * reading_seconds(self.work, self.sheet, 1)
        self.row = 1e3 * row_seconds(self.work, self.sheet)
        self.ridge = ridge_rows(self.work, self.sheet)

    def takes(self, batch: int, rows_each: int) -> float:
        """A pass over `rows_each` rows of each of `batch` sequences."""
        load = DecodeLoad(batch, self.given.context)
        return 1e3 * pass_seconds(self.work, self.sheet, load, rows_each)

    def round(self, batch: int, k: int) -> float:
        return k * self.given.c * self.takes(batch, 1) + self.takes(batch, k + 1)

    def gain(self, batch: int, k: int) -> float:
        """Speed-up of `batch` sequences."""
        expected = expected_tokens(self.given.alpha, k)
        return expected * self.takes(batch, 1) / self.round(batch, k)

    def break_even(self) -> int | None:
        """The smallest batch at which speculation loses; None if it never does."""
        # Beyond the ridge every ratio of times stays as it is.
        most = max(2, 2 * round(self.ridge))
        return rounds.break_even(lambda batch: self.gain(batch, self.given.k), least=1, most=most)

    def spent(self, k: int) -> Joules:
        """By one sequence in a round of `k`; 0 is plain decoding."""
        given = self.given
        kept = tuple(prefix_products([given.alpha] * k))
        stats = RoundStats(kept, 1.0 if k else 0.0, float(k))
        draft = PassWork(model_of(given.c * given.parameters)) if given.c else None
        energy = Energy(Power(given.watts, BYTE, OPERATION), self.work, draft)
        return round_joules(energy, DecodeLoad(), stats, 1e-3 * self.round(1, k), depth=k)

    def joules(self, k: int) -> float:
        """A token."""
        return self.spent(k).total / expected_tokens(self.given.alpha, k)
