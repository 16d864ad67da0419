"""What one linear costs by rows and by the weights' precision, against reading them alone.

    python benchmarks/linear_cost.py [--size 4096] [--copies 16] [--output FILE]

Each call takes the next of several copies of the matrix, so that weights come from memory and not
from a cache. Precisions, rows and the bare read take turns in one run, in an order that rotates.
Medians and fastest turns are given; the last line is one JSON object.

Shapes:  N = rows, I = inputs, O = outputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from outrider.bench.machine import provenance
from outrider.bench.store import write_json
from outrider.kernels.bandwidth import Reader
from outrider.kernels.registry import choose

ROWS = (1, 4, 8, 16)
SCHEMES = ("none", "int8", "int4")
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    contestants: dict[tuple[str, int], Callable[[], None]] = {}
    num_bytes: dict[str, int] = {}
    for scheme in SCHEMES:
        calls, num_bytes[scheme] = turns(scheme, options.size, options.copies)
        contestants |= {(scheme, rows): call for rows, call in calls.items()}
    seconds = race(contestants, options.repeats)
    cells = [
        {
            "quantise": scheme,
            "rows": rows,
            "median_us": round(1e6 * statistics.median(found) / options.copies, 1),
            "fastest_us": round(1e6 * min(found) / options.copies, 1),
            "matrix_bytes": num_bytes[scheme],
        }
        for (scheme, rows), found in seconds.items()
    ]
    for cell in cells:
        what = f"{cell['rows']} rows" if cell["rows"] else "bare read"
        print(f"{cell['quantise']:5} {what:9}  {cell['median_us']:8} us  {cell['fastest_us']:8}")
    report: dict[str, Any] = {
        "benchmark": "linear_cost",
        "provenance": provenance(),
        "size": options.size,
        "copies": options.copies,
        "cells": cells,
    }
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))


def turns(scheme: str, size: int, copies: int) -> tuple[dict[int, Callable[[], None]], int]:
    """By rows, a call that multiplies by every copy once; by 0, one that reads them. And the bytes
    of a copy. Values do not matter for time."""
    kernels = choose(device=CPU, dtype=torch.bfloat16, quantise=scheme)
    weight_OI = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrices = [kernels.pack(weight_OI) for _ in range(copies)]
    reader = Reader()

    def read() -> None:
        reader.read([matrix.data for matrix in matrices])

    def multiply(rows: int) -> Callable[[], None]:
        x_NI, out_NO = torch.randn(rows, size), torch.empty(rows, size)

        def call() -> None:
            for matrix in matrices:
                kernels.linear(x_NI, matrix, out_NO)

        return call

    return {0: read} | {rows: multiply(rows) for rows in ROWS}, matrices[0].nbytes


def race(
    contestants: dict[tuple[str, int], Callable[[], None]], repeats: int
) -> dict[tuple[str, int], list[float]]:
    """Seconds of every turn but the first."""
    keys = list(contestants)
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
    for repeat in range(repeats + 1):
        for turn in range(len(keys)):
            key = keys[(repeat + turn) % len(keys)]
            started = perf_counter()
            contestants[key]()
            if repeat:
                seconds[key].append(perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
