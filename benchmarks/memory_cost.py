"""What the KV arena costs: appending at long context, rolling back many rows, nothing copied.

    python benchmarks/memory_cost.py [--repeats 400] [--output FILE] [--quick]

Appending one token (page plan, and its keys and values written into every layer) is timed at
contexts from 256 to 32,768 tokens, and rolling back 1 to 64 staged rows. The arena is the embedded
target's; its pages are resident before anything is timed, and sequences are made long without
running the model. All contexts, and all numbers of rows, take turns, and the order rotates. Ratios
are of medians: append at 32,768 over 256 (bar 1.10), rollback of 64 rows over 1 (bar 1.05). The
last line is one JSON object.

Shapes:  N = packed tokens, E = fused q, k and v, T = positions, H = half of a head.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from common import TARGET, kernel_names, options_of, reported

from outrider.cache.paged_kv import PagedKV
from outrider.core.protocols import StepRow
from outrider.models.decoder import Room
from outrider.models.llama import LlamaModel
from outrider.models.loading import LoadOptions, load_model, resolve

CONTEXTS = (256, 2048, 8192, 32_768)
ROLLBACKS = (1, 16, 64)
APPEND_BAR, ROLLBACK_BAR = 1.10, 1.05
# What one turn does so often: a single call is near the clock's own cost.
CALLS = 8


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=400)
    options = parser.parse_args()
    repeats = 5 if options.quick else options.repeats
    with reported("memory_cost", options) as report:
        room = Room(num_slots=sum(CONTEXTS) + 64 * len(CONTEXTS))
        model = load_model(resolve(TARGET), LoadOptions(room=room, device="cpu"))
        assert isinstance(model, LlamaModel)
        kv = model.state
        kv.arena.fill_(0)
        for seq_id, context in enumerate(CONTEXTS):
            lengthen(kv, seq_id, context)
        append = in_turns(
            {c: partial(append_once, model, i) for i, c in enumerate(CONTEXTS)}, repeats
        )
        rollback = in_turns({n: partial(rollback_once, kv, n) for n in ROLLBACKS}, repeats)
        report |= {"kernels": kernel_names(model.kernels), "append_us": append}
        report["append_ratio"] = round(append[CONTEXTS[-1]] / append[CONTEXTS[0]], 3)
        report["rollback_us"] = rollback
        report["rollback_ratio"] = round(rollback[ROLLBACKS[-1]] / rollback[ROLLBACKS[0]], 3)
        report["bars"] = {"append_ratio": APPEND_BAR, "rollback_ratio": ROLLBACK_BAR}
        print(f"append one token: {append} us, ratio {report['append_ratio']}")
        print(f"roll back rows:   {rollback} us, ratio {report['rollback_ratio']}")


def lengthen(kv: PagedKV, seq_id: int, context: int) -> None:
    """Commit `context` tokens whose keys and values stay what they are."""
    kv.open(seq_id, [])
    for start in range(0, context, 256):
        tokens = [1 + (seq_id * 7 + start + i) % 8000 for i in range(min(256, context - start))]
        kv.plan([StepRow.chain(seq_id, tokens)])
        kv.commit({seq_id: range(len(tokens))})


def append_once(model: LlamaModel, seq_id: int) -> float:
    """Microseconds to place one token in all layers; it is rolled back untimed."""
    kernels, config, kv = model.kernels, model.config, model.state
    qkv_NE = torch.zeros(1, config.qkv_size)
    table_TH = torch.ones(CONTEXTS[-1] + 64, config.head_dim // 2)
    row, spent = StepRow.chain(seq_id, [5]), 0.0
    for _ in range(CALLS):
        started = perf_counter()
        plan = kv.plan([row])
        for k_GSD, v_GSD in kv.layers:
            kernels.rope_append(qkv_NE, table_TH, table_TH, plan, k_GSD, v_GSD)
        spent += perf_counter() - started
        kv.commit({seq_id: ()})
    return 1e6 * spent / CALLS


def rollback_once(kv: PagedKV, num_rows: int) -> float:
    """Microseconds to drop `num_rows` staged rows."""
    row, spent = StepRow.chain(0, range(100, 100 + num_rows)), 0.0
    for _ in range(CALLS):
        kv.plan([row])
        started = perf_counter()
        kv.commit({0: ()})
        spent += perf_counter() - started
    return 1e6 * spent / CALLS


def in_turns(sides: dict[int, Callable[[], float]], repeats: int) -> dict[int, float]:
    """Median of what each side says of its turns."""
    names = list(sides)
    samples: dict[int, list[Any]] = {name: [] for name in names}
    for repeat in range(repeats):
        for turn in range(len(names)):
            name = names[(repeat + turn) % len(names)]
            samples[name].append(sides[name]())
    return {name: round(statistics.median(values), 3) for name, values in samples.items()}


if __name__ == "__main__":
    main()
