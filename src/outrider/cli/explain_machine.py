"""Topics about the machine: what a pass waits for, and what becomes of speculation in a batch.

A pass over R rows of b sequences with n tokens each reads all weights and the keys and values of
those sequences, and computes R rows. The slower of the two is its time (Williams, Waterman,
Patterson 2009, Roofline).
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.explain_page import Explanation, Numbers, Step, fixed
from outrider.core.expected import expected_tokens, measured_speed_up

_BYTES, _OPERATIONS = 2, 2
# Keys and values of a token as a share of the weights: those of Llama-2-7B, 0.5 MiB of 14 GB.
KV_SHARE = 2 * 32 * 32 * 128 * 2 / 14e9
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_ROWS = (1, 5, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Device:
    """A model of `parameters` on a device, in seconds: of reading its weights, and of a row."""

    reading: float
    row: float

    @classmethod
    def of(cls, numbers: Numbers) -> Device:
        parameters = numbers.parameters * 1e9
        return cls(
            reading=_BYTES * parameters / (numbers.bandwidth * 1e9),
            row=_OPERATIONS * parameters / (numbers.tflops * 1e12),
        )

    @property
    def ridge(self) -> float:
        """Rows at which computing takes as long as reading the weights."""
        return self.reading / self.row

    def seconds(self, num_rows: float, *, batch: float = 0, context: float = 0) -> float:
        """Of a pass over `num_rows`, of `batch` sequences that have `context` tokens each."""
        reading = self.reading * (1 + KV_SHARE * batch * context)
        return max(reading, self.row * num_rows)

    def gain(self, numbers: Numbers, batch: float) -> float:
        """Speed-up of `batch` sequences; a pass of the drafter takes its share of a plain one."""
        where = {"batch": batch, "context": numbers.context}
        plain = self.seconds(batch, **where)
        verify = self.seconds(batch * (numbers.k + 1), **where)
        draft = numbers.k * numbers.c * plain
        expected = expected_tokens(numbers.alpha, numbers.k)
        return measured_speed_up(expected, plain=plain, draft=draft, verify=verify)


def break_even(numbers: Numbers) -> int | None:
    """The smallest batch at which speculation loses; None if it never does."""
    device = Device.of(numbers)
    # Beyond the ridge every ratio of times stays as it is.
    highest = max(2, 2 * round(device.ridge))
    return next((b for b in range(1, highest + 1) if device.gain(numbers, b) <= 1), None)


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
    size, rows = numbers.batch, numbers.batch * (numbers.k + 1)
    where = {"batch": size, "context": numbers.context}
    plain, verify = device.seconds(size, **where), device.seconds(rows, **where)
    gain, limit = device.gain(numbers, size), break_even(numbers)
    round_time = numbers.k * numbers.c * plain + verify
    return Explanation(
        title="Speculation in a batch",
        idea="b sequences share one reading of the weights, and verifying multiplies their rows "
        "by K + 1. Where that lies above the ridge, rows cost time again. Keys and values are read "
        "once a sequence, for one row or for K + 1: a long context brings the room back.",
        formula=(
            "T(R) = max((W + b n kv) / BW, R 2 N / F)",
            "S = E T(b) / (K c T(b) + T(b (K+1)))",
        ),
        steps=(
            Step("T(b)", _slower(device, numbers, size), 1e3 * plain, "ms"),
            Step("T(b (K+1))", _slower(device, numbers, rows), 1e3 * verify, "ms"),
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
    rows = size * (numbers.k + 1)
    where = {"batch": size, "context": numbers.context}
    ratio = device.seconds(rows, **where) / device.seconds(size, **where)
    return (str(size), str(rows), *fixed(ratio, device.gain(numbers, size)))


def _slower(device: Device, numbers: Numbers, num_rows: int) -> str:
    """What a pass of the batch waits for, in ms."""
    reading = device.seconds(0, batch=numbers.batch, context=numbers.context)
    return f"max({1e3 * reading:.3f}, {num_rows} x {1e3 * device.row:.3f})"


def _over(above: float, unit: str, below: float, per: str) -> str:
    return f"{above:g} {unit} / {below:g} {per}"
