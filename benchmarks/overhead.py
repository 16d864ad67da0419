"""How much of a round is spent outside the models: packing, laws, rules, commits, text.

    python benchmarks/overhead.py [--prompts 6] [--max-tokens 128] [--output FILE]

Every model step is timed from inside a normal run; the rest of the wall clock is overhead. Greedy
and sampled, batch 1 and 8. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.provenance import provenance, write_json
from outrider.bench.workloads import WORKLOADS, load_prompts
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.models.llama import LlamaModel

CELLS = (("none", 0), ("ngram", 4), ("ngram", 8), ("model", 4), ("model", 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=6, help="of each workload")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    prompts = [p for name in WORKLOADS for p in load_prompts(name)[: options.prompts]]
    cells: list[dict[str, Any]] = []
    for temperature in (0.0, 0.8):
        for batch_size in (1, 8):
            for drafter, k in CELLS:
                config = EngineConfig(
                    drafter=drafter, k=k, batch_size=batch_size, dtype=options.dtype
                )
                params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature)
                cells.append(measure(config, params, prompts))
                print(describe(cells[-1]))
    report: dict[str, Any] = {"benchmark": "overhead", "provenance": provenance(), "cells": cells}
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))


def measure(config: EngineConfig, params: SamplingParams, prompts: list[str]) -> dict[str, Any]:
    """The share of the wall clock outside model steps, and microseconds of it a round."""
    llm = LLM(config=config)
    with StepClock() as clock:
        llm.generate(prompts[: config.batch_size], params)
        clock.seconds = 0.0
        started = perf_counter()
        results = llm.generate(prompts, params)
        total = perf_counter() - started
    passes = sum(result.stats.num_target_passes for result in results) / config.batch_size
    return {
        "drafter": config.drafter,
        "k": config.k,
        "batch_size": config.batch_size,
        "temperature": params.temperature,
        "share_outside": round(1 - clock.seconds / total, 4),
        "outside_us_per_round": round((total - clock.seconds) / passes * 1e6, 1),
        "tokens_per_second": round(sum(len(r.token_ids) for r in results) / total, 1),
    }


def describe(cell: dict[str, Any]) -> str:
    return (
        f"T={cell['temperature']} batch {cell['batch_size']} {cell['drafter']:6} k={cell['k']}: "
        f"{100 * cell['share_outside']:.1f} % outside, {cell['outside_us_per_round']:.0f} us a "
        f"round, {cell['tokens_per_second']:.0f} tok/s"
    )


class StepClock:
    """While entered, adds up the seconds that any LlamaModel spends in `step`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._step = LlamaModel.step

    def __enter__(self) -> StepClock:
        clock, inner = self, self._step

        def timed(model: LlamaModel, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
            started = perf_counter()
            try:
                return inner(model, rows, needs)
            finally:
                clock.seconds += perf_counter() - started

        LlamaModel.step = timed
        return self

    def __exit__(self, *_: object) -> None:
        LlamaModel.step = self._step


if __name__ == "__main__":
    main()
