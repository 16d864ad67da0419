"""What a pass over several rows costs, against one row and against reading the weights.

    python benchmarks/verify_cost.py [--target FOLDER | --hybrid] [--quantise int8]
                                     [--output FILE] [--quick]

Passes of 1 to 32 rows, at two context lengths, and a bare read of the same weights take turns in
one run, so they share the machine's mood. `ms` is a pass as the engine's stages ask for it, plan
included; `bare_ms` is the native call alone, which is all of it in a fused round. Ratios are of
medians. The target is tier B, made anew unless a folder is named. The last line is one JSON object.

With --hybrid the target is a gated-delta hybrid of random weights, once with each way to return to
an earlier state. Each of its passes keeps one token, as plain decoding does, so that what the next
pass does about it counts; `recurrent_ms` is what its recurrences take of a pass.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import (
    NEEDS,
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
from hybrids import QUICK, SIZE, random_hybrid
from torch import Tensor

from outrider.core.protocols import StepRow
from outrider.core.spec import RecurrentCapacity
from outrider.kernels.bandwidth import Reader
from outrider.kernels.native.cpu import hardware_threads
from outrider.kernels.registry import choose
from outrider.models.decoder import Room
from outrider.models.llama import LlamaModel
from outrider.models.loading import LoadOptions, load_model, resolve
from outrider.models.qwen_hybrid import QwenHybridModel
from outrider.models.weights import Placement

ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 32)
CONTEXTS, QUICK_CONTEXTS = (256, 1000), (32,)


def main() -> None:
    parser = options_of(__doc__, tiers=True)
    named = parser.add_mutually_exclusive_group()
    named.add_argument("--target", default=None, help="a model's name, instead of tier B")
    named.add_argument("--hybrid", action="store_true", help="a hybrid of random weights instead")
    parser.add_argument("--quantise", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if options.hybrid:
        with reported("verify_cost", options) as report:
            measure_hybrid(options, report)
        return
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
    contestants = readers(weights)
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


def readers(weights: Sequence[Tensor]) -> dict[tuple[str, int], Callable[[], object]]:
    contestants: dict[tuple[str, int], Callable[[], object]] = {}
    for threads in {1, len(hardware_threads())}:
        reader = Reader(threads)
        contestants["read", threads] = lambda reader=reader: reader.read(weights)
    return contestants


def measure_hybrid(options: argparse.Namespace, report: dict[str, Any]) -> None:
    dtype, device = torch.bfloat16, torch.device("cpu")
    kernels = choose(device=device, dtype=dtype, quantise=options.quantise)
    contexts = QUICK_CONTEXTS if options.quick else CONTEXTS[:1]
    repeats = 2 if options.quick else options.repeats
    size = QUICK if options.quick else SIZE
    report |= {"target": "random hybrid", "quantise": options.quantise, "cells": []}
    report["kernels"] = kernel_names(kernels)
    for rollback in ("replay", "ring"):
        states = RecurrentCapacity(
            rollback=rollback, history=max(ROWS), num_sequences=1, num_checkpoints=0
        )
        room = Room(num_slots=sum(contexts) + 2048, max_logits=max(ROWS), states=states)
        place = Placement("random hybrid", dtype, device, options.quantise)
        model, weights = random_hybrid(size, kernels, place, room)
        report["num_parameters"] = model.spec.num_parameters
        for context in contexts:
            for cell in hybrid_cells(model, weights, context, repeats):
                report["cells"].append({"rollback": rollback, **cell})
                print(f"{rollback:6}, {describe(report['cells'][-1])}")


def hybrid_cells(
    model: QwenHybridModel, weights: Sequence[Tensor], context: int, repeats: int
) -> list[dict[str, Any]]:
    fill(model, context, context)
    recurrent: defaultdict[int, list[float]] = defaultdict(list)
    plain, spent = model.kernels, [0.0]

    def timed(*arguments: Any) -> None:
        started = perf_counter()
        plain.delta(*arguments)
        spent[0] += perf_counter() - started

    def step(rows: int) -> None:
        spent[0] = 0.0
        tokens = [(11 * i) % model.spec.vocab_size for i in range(rows)]
        model.step([StepRow.chain(context, tokens)], NEEDS)
        model.state.commit({context: (0,)})
        recurrent[rows].append(spent[0])

    model.kernels = replace(plain, delta=timed)
    contestants = readers(weights)
    for rows in ROWS:
        contestants["step", rows] = lambda rows=rows: step(rows)
    times = medians(take_turns(contestants, repeats))
    model.kernels = plain
    model.state.close(context)
    read = min(seconds for (what, _), seconds in times.items() if what == "read")
    return [
        {
            "context": context,
            "rows": rows,
            "ms": round(1e3 * times["step", rows], 4),
            "recurrent_ms": round(1e3 * statistics.median(recurrent[rows]), 4),
            "against_one_row": round(times["step", rows] / times["step", 1], 3),
            "share_of_read_ceiling": round(read / times["step", rows], 3),
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
