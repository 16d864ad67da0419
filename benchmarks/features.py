"""Parity of every rule, drafter, controller and sampling feature, all pairs of them.

    python benchmarks/features.py --output benchmarks/results/features.json   # minutes
    python benchmarks/features.py --prompts 1 --max-tokens 16                  # a taste

Also: acceptance is a property of the pair. Greedily it is the same, to the last digit, whatever the
batch, the prompt chunk and the way of verifying. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.features import FACTORS, FeatureMatrix
from outrider.bench.machine import provenance
from outrider.bench.pairwise import covering_rows
from outrider.bench.store import write_json
from outrider.bench.workload import WORKLOADS, load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10, help="of each workload")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    prompts = [p for name in WORKLOADS for p in load_prompts(name)[: options.prompts]]
    rows = covering_rows(FACTORS)
    cells: list[dict[str, Any]] = []
    failures = 0
    for cell in FeatureMatrix(prompts, options.max_tokens).run(rows):
        cells.append(cell.to_dict())
        failures += not cell.holds
        told = " ".join(f"{name}={value}" for name, value in cell.row.items())
        print(
            f"[{len(cells):2}/{len(rows)}] {told}: {cell.num_equal}/{cell.num_tokens} equal, "
            f"acceptance {cell.acceptance_rate}",
            file=sys.stderr,
            flush=True,
        )
    acceptance = acceptance_everywhere(prompts, options.max_tokens)
    equal, total = (sum(cell[key] for cell in cells) for key in ("num_equal", "num_tokens"))
    report = {
        "benchmark": "features",
        "provenance": provenance(),
        "num_prompts": len(prompts),
        "num_rows": len(rows),
        "num_rows_that_hold": len(rows) - failures,
        "num_tokens": total,
        "num_equal": equal,
        "cells": cells,
        "acceptance": acceptance,
    }
    same = len({(entry["accepted"], entry["drafted"]) for entry in acceptance}) == 1
    print(f"{equal} of {total} tokens equal in {len(rows)} rows; acceptance the same: {same}")
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))
    sys.exit(0 if same and not failures else 1)


def acceptance_everywhere(prompts: list[str], max_tokens: int) -> list[dict[str, Any]]:
    """Accepted and drafted tokens of one pair under every arrangement of the same work."""
    found: list[dict[str, Any]] = []
    for batch_size, chunk, batched in product((1, 2, 4, 8), (16, 256), (True, False)):
        config = EngineConfig(batch_size=batch_size, prefill_chunk=chunk, batched_verify=batched)
        results = LLM(config=config).generate(prompts, SamplingParams(max_tokens=max_tokens))
        found.append(
            {
                "batch_size": batch_size,
                "prefill_chunk": chunk,
                "batched_verify": batched,
                "accepted": sum(result.stats.num_accepted for result in results),
                "drafted": sum(result.stats.num_drafted for result in results),
            }
        )
    return found


if __name__ == "__main__":
    main()
