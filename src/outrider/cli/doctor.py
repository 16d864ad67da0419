"""`outrider doctor`: what this machine has, which kernels run, and what fits into its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from outrider.cli.call import Call
from outrider.cli.logs import start_logging
from outrider.cli.options import DoctorOptions
from outrider.cli.output import json_line, size, table

if TYPE_CHECKING:
    from outrider.cli.examine import Report


def doctor(call: Call[DoctorOptions]) -> int:
    from outrider.cli.examine import examine

    start_logging(call.resolved.program())
    report = examine(call.resolved, measure=call.options.measure)
    if call.options.json:
        print(json_line(report.to_dict()))
    else:
        print("\n\n".join(_sections(report)))
    return 1 if report.problems else 0


def _sections(report: Report) -> Iterator[str]:
    yield table([(name, value) for name, value in report.facts.items()])
    yield f"Kernels, first willing wins:\n{_kernels(report)}"
    if report.ceilings:
        yield f"Read ceilings, GB/s (what decoding cannot exceed):\n{_ceilings(report)}"
    if report.compute:
        found = report.compute
        yield (
            "Compute ceiling (what verifying many rows cannot exceed): "
            f"{found.gflops:.1f} GFLOP/s in {found.dtype}, {found.threads} threads"
        )
    yield f"Memory:\n{_memory(report)}"
    yield from (f"problem: {problem}" for problem in report.problems)


def _kernels(report: Report) -> str:
    choices = [*report.kernels, *([report.threads] if report.threads else [])]
    return table(
        [
            (c.op, f"{c.name} {c.kind}".strip(), "; ".join(filter(None, [*c.refusals, c.why])))
            for c in choices
        ]
    )


def _ceilings(report: Report) -> str:
    """A row a level, a column a number of threads."""
    threads = list(dict.fromkeys(ceiling.threads for ceiling in report.ceilings))
    rates: dict[str, list[str]] = {}
    for ceiling in report.ceilings:
        rates.setdefault(ceiling.level, []).append(f"{ceiling.gb_per_second:.1f}")
    header = ("level", *(f"{n} thread{'s' if n > 1 else ''}" for n in threads))
    return table([(level, *found) for level, found in rates.items()], header=header)


def _memory(report: Report) -> str:
    rows = [
        (
            fit["model"],
            size(fit["weights_bytes"]),
            size(fit["kv_per_1000_tokens_bytes"]),
            fit["num_tokens_that_fit"],
            fit["num_windows_that_fit"],
        )
        for fit in report.fits
    ]
    header = ("model", "weights", "KV per 1k tokens", "tokens that fit", "full windows")
    return table(rows, header=header)
