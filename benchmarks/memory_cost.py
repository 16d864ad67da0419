"""What the KV arena costs: appending at long context, rolling back many rows, nothing copied.

    python benchmarks/memory_cost.py [--repeats 300] [--output FILE]

Appending one token is timed at context 200 and 2,000 (page plan and write into every layer), and
rolling back 64 staged rows beside rolling back 1; both sides of a ratio take turns. The last line
is one JSON object.
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

from outrider.bench.provenance import provenance, write_json
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.llama import LlamaModel, Room
from outrider.models.loading import LoadOptions, load_model, resolve
from outrider.state.paged_kv import PagedKV

CONTEXTS = (200, 2000)
ROLLBACKS = (1, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    model = load_model(
        resolve("outrider/embedded"), LoadOptions(room=Room(num_slots=16384, max_rows=512))
    )
    for seq_id, context in enumerate(CONTEXTS):
        fill(model, seq_id, context)
    append = race(
        {c: lambda i=i: append_once(model, i) for i, c in enumerate(CONTEXTS)}, options.repeats
    )
    rollback = race(
        {n: lambda n=n: rollback_once(model.state, n) for n in ROLLBACKS}, options.repeats
    )
    report: dict[str, Any] = {
        "benchmark": "memory_cost",
        "provenance": provenance(),
        "append_us": append,
        "append_ratio": round(append[2000] / append[200], 3),
        "rollback_us": rollback,
        "rollback_ratio": round(rollback[64] / rollback[1], 3),
    }
    print(f"append one token: {append} us, ratio {report['append_ratio']}")
    print(f"roll back rows:   {rollback} us, ratio {report['rollback_ratio']}")
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))


def fill(model: LlamaModel, seq_id: int, context: int) -> None:
    """Commit `context` tokens, written for real, so that every page of them is resident."""
    model.state.open(seq_id, [])
    tokens = [1 + (seq_id * 7 + i) % 8000 for i in range(context)]
    for start in range(0, context, 256):
        part = tokens[start : start + 256]
        model.step([StepRow.chain(seq_id, part, logits_from=len(part))], DraftNeeds())
        model.state.commit({seq_id: range(len(part))})


def append_once(model: LlamaModel, seq_id: int) -> float:
    """Microseconds to place one token in all layers; it is rolled back untimed."""
    kernels, config, kv = model.kernels, model.config, model.state
    qkv_NE = torch.zeros(1, config.qkv_size)
    table_TH = torch.ones(4096, config.head_dim // 2)
    started = perf_counter()
    plan = kv.plan([StepRow.chain(seq_id, [5])])
    for k_GSD, v_GSD in kv.layers:
        kernels.rope_append(qkv_NE, table_TH, table_TH, plan, k_GSD, v_GSD)
    seconds = perf_counter() - started
    kv.commit({seq_id: ()})
    return seconds * 1e6


def rollback_once(kv: PagedKV, num_rows: int) -> float:
    """Microseconds to drop `num_rows` staged rows."""
    kv.plan([StepRow.chain(0, range(100, 100 + num_rows))])
    started = perf_counter()
    kv.commit({0: ()})
    return (perf_counter() - started) * 1e6


def race(sides: dict[int, Callable[[], float]], repeats: int) -> dict[int, float]:
    """Median of each side, taking turns."""
    samples: dict[int, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            samples[name].append(run())
    return {name: round(statistics.median(values), 3) for name, values in samples.items()}


if __name__ == "__main__":
    main()
