"""What a pass over several rows costs, against one row and against reading the weights.

    python benchmarks/verify_cost.py [--target FOLDER] [--quantise int8] [--output FILE]

Passes of 1 to 32 rows, at two context lengths, and a bare read of the same weights take turns in
one run, so they share the machine's mood. Ratios are of medians. `outrider models inflate` makes
targets of a real size. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider.bench.provenance import provenance, write_json
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.kernels.ceiling import Reader
from outrider.models.decoder import Room
from outrider.models.llama import LlamaModel
from outrider.models.loading import LoadOptions, load_model, resolve

ROWS = (1, 2, 4, 5, 8, 9, 16, 32)
CONTEXTS = (256, 1000)
NEEDS = DraftNeeds()
CHUNK = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="outrider/embedded")
    parser.add_argument("--quantise", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    room = Room(num_slots=sum(CONTEXTS) + 512, max_logits=max(ROWS))
    model = load_model(
        resolve(options.target), LoadOptions(room=room, device="cpu", quantise=options.quantise)
    )
    assert isinstance(model, LlamaModel)
    cells = [cell for context in CONTEXTS for cell in measure(model, context, options.repeats)]
    report: dict[str, Any] = {
        "benchmark": "verify_cost",
        "provenance": provenance(),
        "target": options.target,
        "num_parameters": model.spec.num_parameters,
        "quantise": options.quantise,
        "kernels": {choice.op: choice.name for choice in model.kernels.choices},
        "cells": cells,
    }
    for cell in cells:
        print(describe(cell))
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))


def measure(model: LlamaModel, context: int, repeats: int) -> list[dict[str, Any]]:
    """A cell a number of rows; the first contestant is the bare read."""
    model.state.open(context, ())
    ids = [(7 * i) % model.spec.vocab_size for i in range(context)]
    for start in range(0, context, CHUNK):
        part = ids[start : start + CHUNK]
        model.step([StepRow.chain(context, part, logits_from=len(part))], NEEDS)
        model.state.commit({context: range(len(part))})
    reader, weights = Reader(), model.streamed
    contestants: list[Callable[[], object]] = [lambda: reader.read(weights)]
    contestants += [passes(model, context, rows) for rows in ROWS]
    times = race(contestants, repeats)
    read, one = times[0], times[1]
    model.state.close(context)
    num_bytes = sum(tensor.nbytes for tensor in weights)
    return [
        {
            "context": context,
            "rows": rows,
            "ms": round(1e3 * seconds, 4),
            "against_one_row": round(seconds / one, 3),
            "share_of_read_ceiling": round(read / seconds, 3),
            "read_gb_per_second": round(num_bytes / read / 1e9, 2),
        }
        for rows, seconds in zip(ROWS, times[1:], strict=True)
    ]


def passes(model: LlamaModel, seq_id: int, rows: int) -> Callable[[], object]:
    """A pass over a chain of so many rows, all of whose logits are wanted; nothing is kept."""
    row = StepRow.chain(seq_id, [(11 * i) % model.spec.vocab_size for i in range(rows)])

    def run() -> None:
        model.step([row], NEEDS)
        model.state.commit({seq_id: ()})

    return run


def race(contestants: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each; they take turns, in an order that rotates."""
    seconds: list[list[float]] = [[] for _ in contestants]
    for repeat in range(repeats + 1):
        for turn in range(len(contestants)):
            place = (repeat + turn) % len(contestants)
            started = perf_counter()
            contestants[place]()
            if repeat:
                seconds[place].append(perf_counter() - started)
    return [statistics.median(found) for found in seconds]


def describe(cell: dict[str, Any]) -> str:
    return (
        f"context {cell['context']:5}, {cell['rows']:3} rows: {cell['ms']:9.3f} ms, "
        f"{cell['against_one_row']:.2f} of one row, "
        f"{100 * cell['share_of_read_ceiling']:.0f} % of the read ceiling"
    )


if __name__ == "__main__":
    main()
