"""Topics about the machine: what a pass waits for, and what becomes of speculation in a batch.

Seconds of passes are the planner's (planner/roofline.py), on a device that reaches its peaks, takes
rows one by one, and turns sharply from one limit to the other.

The topic `energy`: joules a token.

The formula is the planner's (planner/energy.py). The energies are orders of magnitude: 30 pJ a
byte is HBM2 (O'Connor et al. 2017, Fine-grained DRAM, 3.9 pJ a bit), 0.75 pJ an operation half of
an FP16 multiply and add (Horowitz 2014, Computing's energy problem).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from outrider.cli.explain_rounds import Explanation, Numbers, Step, fixed
from outrider.core.spec import ModelSpec
from outrider.estimate.theory import RoundStats, expected_tokens, measured_speed_up, prefix_products
from outrider.planner import rounds
from outrider.planner.devices import DeviceSheet, Power
from outrider.planner.energy import Energy, Joules, joules_a_token, round_joules
from outrider.planner.roofline import (
    PassWork,
    context_seconds,
    pass_seconds,
    reading_seconds,
    ridge_rows,
    row_seconds,
)
from outrider.planner.rounds import DecodeLoad

# Llama-2-7B: keys and values of a token take 0.5 MiB beside 14 GB. Models of other sizes have
# layers in proportion.
_LAYERS, _HEADS, _HEAD_DIM, _PARAMETERS = 32, 32, 128, 7.0
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_ROWS = (1, 5, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Device:
    """A model on a device."""

    work: PassWork
    sheet: DeviceSheet

    @classmethod
    def of(cls, numbers: Numbers) -> Device:
        sheet = DeviceSheet(
            name="device",
            bandwidth=numbers.bandwidth * 1e9,
            flops={"bfloat16": numbers.tflops * 1e12},
            memory_bytes=0,
            row_tile=1,
            bandwidth_share=1.0,
            flops_share=1.0,
            p_norm=math.inf,
        )
        return cls(PassWork(model_of(numbers.parameters)), sheet)

    @property
    def reading(self) -> float:
        """Seconds of reading the weights."""
        return reading_seconds(self.work, self.sheet, 1)

    @property
    def row(self) -> float:
        """Seconds of a row's products."""
        return row_seconds(self.work, self.sheet)

    @property
    def ridge(self) -> float:
        """Rows at which computing takes as long as reading the weights."""
        return ridge_rows(self.work, self.sheet)

    def seconds(self, batch: int, rows_each: int, context: int = 0) -> float:
        """Of a pass over `rows_each` rows of each of `batch` sequences that have `context` tokens
        each."""
        return pass_seconds(self.work, self.sheet, DecodeLoad(batch, context), rows_each)

    def gain(self, numbers: Numbers, batch: int) -> float:
        """Speed-up of `batch` sequences; a pass of the drafter takes its share of a plain one."""
        plain = self.seconds(batch, 1, numbers.context)
        verify = self.seconds(batch, numbers.k + 1, numbers.context)
        draft = numbers.k * numbers.c * plain
        expected = expected_tokens(numbers.alpha, numbers.k)
        return measured_speed_up(expected, plain=plain, draft=draft, verify=verify)


def model_of(parameters: float) -> ModelSpec:
    """A model of so many billion parameters of two bytes, shaped as Llama-2-7B."""
    return ModelSpec(
        name=f"{parameters:g}B",
        family="llama",
        vocab_size=32_000,
        hidden_size=_HEADS * _HEAD_DIM,
        num_layers=max(1, round(_LAYERS * parameters / _PARAMETERS)),
        num_heads=_HEADS,
        num_kv_heads=_HEADS,
        head_dim=_HEAD_DIM,
        ffn_size=11_008,
        max_tokens=4096,
        num_parameters=max(1, round(parameters * 1e9)),
        bytes_per_weight=2,
        bytes_per_kv=2,
    )


def break_even(numbers: Numbers) -> int | None:
    """The smallest batch at which speculation loses; None if it never does."""
    device = Device.of(numbers)
    # Beyond the ridge every ratio of times stays as it is.
    highest = max(2, 2 * round(device.ridge))
    return rounds.break_even(lambda b: device.gain(numbers, b), least=1, most=highest)


def roofline(numbers: Numbers) -> Explanation:
    device = Device.of(numbers)
    share = device.row / device.reading
    return Explanation(
        title="What a pass waits for",
        idea="A pass reads every weight once, whatever the number of rows, and does two operations "
        "with it for each row. Below the ridge it waits for memory, and more rows cost nothing: "
        "that is the room which speculation fills.",
        formula=(
            "T(R) = max(2 N / BW, R 2 N / F)",
            "ridge = F / BW rows, where both take as long",
        ),
        steps=(
            Step(
                "2 N / BW",
                _over(2 * numbers.parameters, "GB", numbers.bandwidth, "GB/s"),
                1e3 * device.reading,
                "ms to read the weights",
            ),
            Step(
                "2 N / F",
                _over(2 * numbers.parameters, "GFLOP", numbers.tflops, "TFLOP/s"),
                1e3 * device.row,
                "ms to compute a row",
            ),
            Step(
                "ridge",
                _over(numbers.tflops, "TFLOP/s", numbers.bandwidth, "GB/s"),
                device.ridge,
                "rows",
            ),
        ),
        header=("rows", "reading ms", "computing ms", "pass ms", "bound by"),
        rows=tuple(_pass(device, num_rows) for num_rows in _ROWS),
        result=f"One row uses {100 * min(1, share):.1f} % of the arithmetic. Up to "
        f"{device.ridge:.0f} rows a pass takes {1e3 * device.reading:.1f} ms, however many it has.",
        more=(
            "docs/theory.md, sections 1 and 7",
            "outrider doctor: bandwidth of this machine",
            "outrider explain batch",
        ),
    )


def batch(numbers: Numbers) -> Explanation:
    device = Device.of(numbers)
    size, each, context = numbers.batch, numbers.k + 1, numbers.context
    plain, verify = device.seconds(size, 1, context), device.seconds(size, each, context)
    gain, limit = device.gain(numbers, size), break_even(numbers)
    round_time = numbers.k * numbers.c * plain + verify
    return Explanation(
        title="Speculation in a batch",
        idea="b sequences share one reading of the weights, and verifying multiplies their rows "
        "by K + 1. Where that lies above the ridge, rows cost time again. Keys and values are read "
        "once a sequence, for one row or for K + 1, and attended to by every row with a "
        "operations a token: a long context brings room back.",
        formula=(
            "T(R) = max(W / BW, R 2 N / F) + n (b kv / BW + R a / F)",
            "S = E T(b) / (K c T(b) + T(b (K+1)))",
        ),
        steps=(
            Step("T(b)", _worked(device, numbers, 1), 1e3 * plain, "ms"),
            Step("T(b (K+1))", _worked(device, numbers, each), 1e3 * verify, "ms"),
            Step(
                "S", f"E x {1e3 * plain:.3f} / {1e3 * round_time:.3f}", gain, "times plain decoding"
            ),
        ),
        header=("b", "rows verified", "verify / plain", "S"),
        rows=tuple(_batch_row(device, numbers, b) for b in _BATCHES),
        result=f"Speculation loses from a batch of {limit} on."
        if limit is not None
        else "Speculation gains at every batch here.",
        more=(
            "docs/theory.md, section 7",
            "docs/algorithms/controllers.md: the engine drafts less as a batch grows",
            "outrider bench engines --levels 1,4,16: the same, measured",
        ),
    )


def _pass(device: Device, num_rows: int) -> tuple[str, ...]:
    reading, computing = device.reading, num_rows * device.row
    bound = "memory" if reading >= computing else "arithmetic"
    return (
        str(num_rows),
        *fixed(1e3 * reading, 1e3 * computing, 1e3 * max(reading, computing)),
        bound,
    )


def _batch_row(device: Device, numbers: Numbers, size: int) -> tuple[str, ...]:
    each, context = numbers.k + 1, numbers.context
    ratio = device.seconds(size, each, context) / device.seconds(size, 1, context)
    return (str(size), str(size * each), *fixed(ratio, device.gain(numbers, size)))


def _worked(device: Device, numbers: Numbers, rows_each: int) -> str:
    """A pass of the batch in ms: what it waits for, and what its contexts take."""
    rows = numbers.batch * rows_each
    reading, attending = context_seconds(device.work, device.sheet)
    contexts = numbers.context * (numbers.batch * reading + rows * attending)
    return (
        f"max({1e3 * device.reading:.3f}, {rows} x {1e3 * device.row:.3f}) + {1e3 * contexts:.3f}"
    )


def _over(above: float, unit: str, below: float, per: str) -> str:
    return f"{above:g} {unit} / {below:g} {per}"


BYTE, OPERATION = 30e-12, 0.75e-12
_MOST_K = 64


def joules(numbers: Numbers, k: int) -> float:
    """A token, of one sequence in rounds of `k`; 0 is plain decoding."""
    law, seconds = _round(numbers, k)
    return joules_a_token(_energy(numbers), DecodeLoad(), law, seconds, depth=k)


def _spent(numbers: Numbers, k: int) -> Joules:
    law, seconds = _round(numbers, k)
    return round_joules(_energy(numbers), DecodeLoad(), law, seconds, depth=k)


def _round(numbers: Numbers, k: int) -> tuple[RoundStats, float]:
    """What it brings, and its seconds."""
    device = Device.of(numbers)
    law = RoundStats(tuple(prefix_products([numbers.alpha] * k)), 1.0 if k else 0.0, float(k))
    return law, device.seconds(1, k + 1) + k * numbers.c * device.seconds(1, 1)


def _energy(numbers: Numbers) -> Energy:
    draft = PassWork(model_of(numbers.c * numbers.parameters)) if numbers.c else None
    return Energy(Power(numbers.watts, BYTE, OPERATION), Device.of(numbers).work, draft)


def _sum_of(numbers: Numbers, k: int) -> str:
    spent = _spent(numbers, k)
    parts = f"{spent.static:.3f} + {spent.moving:.3f} + {spent.counting:.3f}"
    return f"({parts}) / {expected_tokens(numbers.alpha, k):.3f}"


def gain(numbers: Numbers, k: int) -> float:
    """Speed-up of one sequence."""
    return Device.of(numbers).gain(replace(numbers, k=k), 1)


def energy(numbers: Numbers) -> Explanation:
    k, plain = numbers.k, joules(numbers, 0)
    least = min(range(_MOST_K + 1), key=lambda k: joules(numbers, k))
    fastest = max(range(_MOST_K + 1), key=lambda k: gain(numbers, k))
    shown = sorted({0, 1, 2, 4, 8, 16, least, fastest, k})
    saved = plain / joules(numbers, k)
    return Explanation(
        title="Joules a token",
        idea="What a device draws while it waits is saved as time is. Bytes are saved because one "
        "reading of the weights serves several tokens. Arithmetic is not saved: every token that "
        "is drafted is computed, also those that are refused.",
        formula=(
            "J = (P T_round + e_byte bytes + e_flop operations) / E",
            f"here e_byte = {BYTE * 1e12:g} pJ, e_flop = {OPERATION * 1e12:g} pJ",
        ),
        steps=(
            Step("J(0)", _sum_of(numbers, 0), plain, "J a token"),
            Step(f"J({k})", _sum_of(numbers, k), joules(numbers, k), "J a token"),
            Step(f"J(0) / J({k})", f"{plain:.3f} / {joules(numbers, k):.3f}", saved),
        ),
        header=("K", "J a token", "times less", "S"),
        rows=tuple(
            (str(n), *fixed(joules(numbers, n), plain / joules(numbers, n), gain(numbers, n)))
            for n in shown
        ),
        result=f"Fastest at K = {fastest}, least energy at K = {least}: refused tokens cost energy "
        "even where they cost no time.",
        more=("docs/theory.md, section 12",),
    )
