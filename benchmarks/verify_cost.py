"""What a pass over several rows costs, against one row and against reading the weights.

    python benchmarks/verify_cost.py [--target FOLDER] [--quantise int8] [--output FILE] [--quick]

Passes of 1 to 32 rows, at two context lengths, and a bare read of the same weights take turns in
one run, so they share the machine's mood. `ms` is a pass as the engine's stages ask for it, plan
included; `bare_ms` is the native call alone, which is all of it in a fused round. Ratios are of
medians. The target is tier B, made anew unless a folder is named. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import (
    bare_pass,
    fill,
    kernel_names,
    medians,
    options_of,
    reported,
    step_pass,
    take_turns,
    tier_folders,
)

from outrider.kernels.ceiling import Reader
from outrider.kernels.topology import hardware_threads
from outrider.models.decoder import Room
from outrider.models.llama import LlamaModel
from outrider.models.loading import LoadOptions, load_model, resolve

ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 32)
CONTEXTS, QUICK_CONTEXTS = (256, 1000), (32,)


def main() -> None:
    parser = options_of(__doc__, tiers=True)
    parser.add_argument("--target", default=None, help="a model's name, instead of tier B")
    parser.add_argument("--quantise", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    contexts = QUICK_CONTEXTS if options.quick else CONTEXTS
    with reported("verify_cost", options) as report, target_folder(options) as folder:
        room = Room(num_slots=sum(contexts) + 512, max_logits=max(ROWS))
        model = load_model(folder, LoadOptions(room=room, device="cpu", quantise=options.quantise))
        assert isinstance(model, LlamaModel)
        repeats = 2 if options.quick else options.repeats
        report |= {
            "target": options.target or "tier b",
            "num_parameters": model.spec.num_parameters,
            "quantise": options.quantise,
            "kernels": kernel_names(model.kernels),
            "cells": [cell for c in contexts for cell in measure(model, c, repeats)],
        }
        for cell in report["cells"]:
            print(describe(cell))


@contextmanager
def target_folder(options: argparse.Namespace) -> Generator[Path]:
    if options.target is not None:
        yield resolve(options.target)
        return
    with tier_folders(options) as folders:
        yield folders["b"]


def measure(model: LlamaModel, context: int, repeats: int) -> list[dict[str, Any]]:
    """A cell a number of rows. Bare reads are by one thread and by all; the faster counts."""
    fill(model, context, context)
    weights = model.streamed
    contestants: dict[tuple[str, int], Callable[[], object]] = {}
    for threads in {1, len(hardware_threads())}:
        reader = Reader(threads)
        contestants["read", threads] = lambda reader=reader: reader.read(weights)
    for rows in ROWS:
        contestants["step", rows] = step_pass(model, context, rows)
        contestants["bare", rows] = bare_pass(model, context, rows)
    times = medians(take_turns(contestants, repeats))
    model.state.close(context)
    read = min(seconds for (what, _), seconds in times.items() if what == "read")
    num_bytes = sum(tensor.nbytes for tensor in weights)
    return [
        {
            "context": context,
            "rows": rows,
            "ms": round(1e3 * times["step", rows], 4),
            "bare_ms": round(1e3 * times["bare", rows], 4),
            "against_one_row": round(times["step", rows] / times["step", 1], 3),
            "bare_against_one_row": round(times["bare", rows] / times["bare", 1], 3),
            "share_of_read_ceiling": round(read / times["step", rows], 3),
            "read_gb_per_second": round(num_bytes / read / 1e9, 2),
        }
        for rows in ROWS
    ]


def describe(cell: dict[str, Any]) -> str:
    return (
        f"context {cell['context']:5}, {cell['rows']:3} rows: {cell['ms']:9.3f} ms, "
        f"{cell['against_one_row']:.2f} of one row, "
        f"{100 * cell['share_of_read_ceiling']:.0f} % of the read ceiling"
    )


if __name__ == "__main__":
    main()
