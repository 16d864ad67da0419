"""`outrider doctor`: what this machine has, which kernels run, and what fits into its memory."""

from __future__ import annotations

from outrider.cli.call import Call
from outrider.cli.options import JsonOption
from outrider.cli.output import json_line, size, table


def doctor(call: Call[JsonOption]) -> int:
    from outrider.cli.examine import examine

    report = examine(call.resolved)
    if call.options.json:
        print(json_line(report.to_dict()))
    else:
        print(table([(name, value) for name, value in report.facts.items()]))
        print("\nKernels, first willing wins:")
        print(table([(c.op, c.name, "; ".join(c.refusals)) for c in report.kernels]))
        print("\nMemory:")
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
        print(table(rows, header=header))
        for problem in report.problems:
            print(f"\nproblem: {problem}")
    return 1 if report.problems else 0
