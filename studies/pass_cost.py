"""What a pass of the target costs by rows, and by what memory holds.

Shapes:  N = packed rows, I = inputs, O = outputs, E = fused q, k and v, T = positions,
H = half of a head.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import (
    NEEDS,
    TARGET,
    Report,
    bare_pass,
    fill,
    in_turns,
    kernel_names,
    medians,
    note,
    step_pass,
    study,
    take_turns,
    tier_folders,
    timed,
)
from gpu_check.models import QUICK_HYBRID, RANDOM_HYBRID, random_hybrid
from options import Options
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.core.protocols import StepRow
from outrider.core.spec import RecurrentCapacity
from outrider.kernels.native.cpu import hardware_threads
from outrider.kernels.registry import choose
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import read_config
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model, resolve
from outrider.models.weights import Placement
from outrider.plugins.doctor.ceilings import BandwidthReader, arithmetic_ceilings
from outrider.plugins.hybrids.model import HybridModel

ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 32)
CONTEXTS, QUICK_CONTEXTS = (256, 1000, 8000), (32,)
SCHEMES = ("none", "int8", "int4")
CPU = torch.device("cpu")
APPENDED_AT = (256, 2048, 8192, 32_768)
ROLLBACKS = (1, 16, 64)
APPEND_BAR, ROLLBACK_BAR = 1.10, 1.05
# What one turn of memory_cost does so often: a single call is near the clock's own cost.
CALLS = 8


@study(tiers=True, target=None, hybrid=False, quantise=SCHEMES, repeats=15)
def verify_cost(options: Options, report: Report) -> None:
    """What a pass over several rows costs, against one row and against what the machine allows.

    Passes of 1 to 32 rows, at 256, 1,000 and 8,000 tokens where the model's window allows, and a
    bare read of the same weights take turns in one run, so they share the machine's mood. `ms` is a
    pass as the engine's stages ask for it, plan included; `bare_ms` is the native call alone, which
    is all of it in a fused round. Ratios are of medians. Shares are of the time that reading the
    weights takes, and of the time that their multiplications take if nothing else is done
    (`arithmetic`; attention is not counted). The target is tier B, made anew unless a model is
    named by --target or --model.

    With --hybrid the target is a gated-delta hybrid of random weights, once with each way to return
    to an earlier state. Each of its passes keeps one token, as plain decoding does, so that what
    the next pass does about it counts; `recurrent_ms` is what its recurrences take of a pass.
    """
    repeats = 2 if options.quick else options.repeats
    report["quantise"] = options.quantise
    if options.hybrid:
        _hybrid_cost(options, repeats, report)
        return
    with _target_folder(options) as folder:
        window = read_config(folder).max_tokens
        fitting = tuple(context for context in CONTEXTS if context + max(ROWS) <= window)
        contexts = QUICK_CONTEXTS if options.quick else fitting
        capacity = ModelCapacity(num_slots=sum(contexts) + 512, max_logits=max(ROWS))
        model = load_model(
            folder, LoadOptions(capacity=capacity, device="cpu", quantise=options.quantise)
        )
        assert isinstance(model, LlamaModel)
        report |= {
            "target": options.target or "tier b",
            "num_parameters": model.spec.num_parameters,
            "kernels": kernel_names(model.kernels),
            "arithmetic": [asdict(one) for one in arithmetic_ceilings([len(hardware_threads())])],
        }
        for context in contexts:
            _verify_cells(model, context, repeats, report)


@contextmanager
def _target_folder(options: Options) -> Generator[Path]:
    if options.target is not None:
        yield resolve(options.target)
        return
    with tier_folders(options) as folders:
        yield folders["b"]


def _verify_cells(model: LlamaModel, context: int, repeats: int, report: Report) -> None:
    """A cell a number of rows. Bare reads are by one thread and by all; the faster counts."""
    fill(model, context, context)
    weights = model.streamed
    contestants = _readers(weights)
    for rows in ROWS:
        contestants["step", rows] = step_pass(model, context, rows)
        contestants["bare", rows] = bare_pass(model, context, rows)
    times = medians(take_turns(contestants, repeats))
    model.state.close(context)
    num_bytes = sum(tensor.nbytes for tensor in weights)
    row_seconds = _row_seconds(model, report)
    for rows in ROWS:
        bare = times["bare", rows]
        note(
            report,
            **_cell(times, context, rows),
            bare_ms=round(1e3 * bare, 4),
            bare_against_one_row=round(bare / times["bare", 1], 3),
            share_of_compute_ceiling=round(rows * row_seconds / bare, 3),
            read_gb_per_second=round(num_bytes / _read_seconds(times) / 1e9, 2),
        )


def _row_seconds(model: LlamaModel, report: Report) -> float:
    """What a row's products with all weights take at the ceiling of their arithmetic."""
    flops = {one["arithmetic"]: 1e9 * one["gflops"] for one in report["arithmetic"]}
    config, quantise = model.config, report["quantise"]
    head = config.vocab_size * config.hidden_size
    body = model.spec.num_parameters - (1 if config.tie_word_embeddings else 2) * head
    if quantise == "none":
        best = max(rate for name, rate in flops.items() if name.startswith("bfloat16"))
        return 2 * (body + head) / best
    # The output matrix of int4 has 8 bits.
    return 2 * (body / flops[quantise] + head / flops["int8"])


def _read_seconds(times: Mapping[tuple[str, int], float]) -> float:
    return min(seconds for (what, _), seconds in times.items() if what == "read")


def _cell(times: Mapping[tuple[str, int], float], context: int, rows: int) -> dict[str, Any]:
    spent = times["step", rows]
    return {
        "context": context,
        "rows": rows,
        "ms": round(1e3 * spent, 4),
        "against_one_row": round(spent / times["step", 1], 3),
        "share_of_read_ceiling": round(_read_seconds(times) / spent, 3),
    }


def _readers(weights: Sequence[Tensor]) -> dict[tuple[str, int], Callable[[], object]]:
    return {
        ("read", threads): partial(BandwidthReader(threads).read, weights)
        for threads in {1, len(hardware_threads())}
    }


def _hybrid_cost(options: Options, repeats: int, report: Report) -> None:
    kernels = choose(device=CPU, dtype=torch.bfloat16, quantise=options.quantise)
    context = QUICK_CONTEXTS[0] if options.quick else CONTEXTS[0]
    size = QUICK_HYBRID if options.quick else RANDOM_HYBRID
    report |= {"target": "random hybrid", "kernels": kernel_names(kernels)}
    for rollback in ("replay", "ring"):
        states = RecurrentCapacity(
            rollback=rollback, history=max(ROWS), num_sequences=1, num_checkpoints=0
        )
        capacity = ModelCapacity(num_slots=context + 2048, max_logits=max(ROWS), states=states)
        placement = Placement("random hybrid", torch.bfloat16, CPU, options.quantise)
        model, weights = random_hybrid(size, kernels, placement, capacity)
        report["num_parameters"] = model.spec.num_parameters
        for cell in _hybrid_cells(model, weights, context, repeats):
            note(report, rollback=rollback, **cell)


def _hybrid_cells(
    model: HybridModel, weights: Sequence[Tensor], context: int, repeats: int
) -> list[dict[str, Any]]:
    fill(model, context, context)
    plain, spent = model.kernels, [0.0]

    def delta(*arguments: Any) -> None:
        spent[0] += timed(partial(plain.delta, *arguments))()

    def step(rows: int) -> tuple[float, float]:
        """Seconds of a pass, and of its recurrences."""
        spent[0], started = 0.0, perf_counter()
        tokens = [(11 * i) % model.spec.vocab_size for i in range(rows)]
        model.step([StepRow.chain(context, tokens)], NEEDS)
        model.state.commit({context: (0,)})
        return perf_counter() - started, spent[0]

    def read(call: Callable[[], object]) -> tuple[float, float]:
        return timed(call)(), 0.0

    model.kernels = replace(plain, delta=delta)
    contestants = {key: partial(read, call) for key, call in _readers(weights).items()}
    contestants |= {("step", rows): partial(step, rows) for rows in ROWS}
    found = in_turns(contestants, repeats)
    model.kernels = plain
    model.state.close(context)
    times = {key: statistics.median(whole for whole, _ in turns) for key, turns in found.items()}
    return [
        _cell(times, context, rows)
        | {"recurrent_ms": round(1e3 * statistics.median(own for _, own in found["step", rows]), 4)}
        for rows in ROWS
    ]


@study(repeats=400)
def memory_cost(options: Options, report: Report) -> None:
    """What the KV arena costs: appending at long context, rolling back many rows, nothing copied.

    Appending one token (page plan, and its keys and values written into every layer) is timed at
    contexts from 256 to 32,768 tokens, and rolling back 1 to 64 staged rows. The arena is the
    embedded target's; its pages are resident before anything is timed, and sequences are made long
    without running the model. All contexts, and all numbers of rows, take turns. Ratios are of
    medians: append at 32,768 over 256 (bar 1.10), rollback of 64 rows over 1 (bar 1.05).
    """
    repeats = 5 if options.quick else options.repeats
    capacity = ModelCapacity(num_slots=sum(APPENDED_AT) + 64 * len(APPENDED_AT))
    model = load_model(resolve(TARGET), LoadOptions(capacity=capacity, device="cpu"))
    assert isinstance(model, LlamaModel)
    kv = model.state
    kv.arena.fill_(0)
    for seq_id, context in enumerate(APPENDED_AT):
        _lengthen(kv, seq_id, context)
    report["kernels"] = kernel_names(model.kernels)
    sides: dict[str, dict[int, Callable[[], float]]] = {
        "append": {c: partial(_append_once, model, i) for i, c in enumerate(APPENDED_AT)},
        "rollback": {rows: partial(_rollback_once, kv, rows) for rows in ROLLBACKS},
    }
    for name, calls in sides.items():
        found = medians(in_turns(calls, repeats, warm_ups=0))
        least, most = min(found), max(found)
        spent = {key: round(value, 3) for key, value in found.items()}
        report[f"{name}_us"] = spent
        report[f"{name}_ratio"] = round(spent[most] / spent[least], 3)
        print(f"{name}: {spent} us, ratio {report[f'{name}_ratio']}")
    report["bars"] = {"append_ratio": APPEND_BAR, "rollback_ratio": ROLLBACK_BAR}


def _lengthen(kv: PagedKV, seq_id: int, context: int) -> None:
    """Commit `context` tokens whose keys and values stay what they are."""
    kv.open(seq_id, [])
    for start in range(0, context, 256):
        tokens = [1 + (seq_id * 7 + start + i) % 8000 for i in range(min(256, context - start))]
        kv.plan([StepRow.chain(seq_id, tokens)])
        kv.commit({seq_id: range(len(tokens))})


def _append_once(model: LlamaModel, seq_id: int) -> float:
    """Microseconds to place one token in all layers; it is rolled back untimed."""
    kernels, config, kv = model.kernels, model.config, model.state
    qkv_NE = torch.zeros(1, config.qkv_size)
    table_TH = torch.ones(APPENDED_AT[-1] + 64, config.head_dim // 2)
    row, spent = StepRow.chain(seq_id, [5]), 0.0
    for _ in range(CALLS):
        started = perf_counter()
        plan = kv.plan([row])
        for k_GSD, v_GSD in kv.layers:
            kernels.rope_append(qkv_NE, table_TH, table_TH, plan, k_GSD, v_GSD)
        spent += perf_counter() - started
        kv.commit({seq_id: ()})
    return 1e6 * spent / CALLS


def _rollback_once(kv: PagedKV, num_rows: int) -> float:
    """Microseconds to drop `num_rows` staged rows."""
    row, spent = StepRow.chain(0, range(100, 100 + num_rows)), 0.0
    for _ in range(CALLS):
        kv.plan([row])
        spent += timed(partial(kv.commit, {0: ()}))()
    return 1e6 * spent / CALLS
