"""Parity of schedules, executors, batches, drafters, drafting ahead, chunks and pre-emption.

    python benchmarks/engines_parity.py --output benchmarks/results/engines_parity.json
    python benchmarks/engines_parity.py --rows pairs   # a minute: all pairs of two settings

Every arrangement must give the greedy tokens of plain decoding, and drafts accepted alike: where
memory is ample, acceptance depends on the drafter and on k alone. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from outrider.bench.lane_parity import FACTORS, LaneCell, LaneMatrix, acceptance_by_draft, all_rows
from outrider.bench.machine import provenance
from outrider.bench.pairwise import covering_rows
from outrider.bench.store import write_json
from outrider.bench.workload import WORKLOADS, load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", choices=("all", "pairs"), default="all")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    prompts = [p for name in WORKLOADS for p in load_prompts(name)[:8]]
    texts = [prompt[: 40 + 20 * index] for index, prompt in enumerate(prompts)]
    rows = all_rows() if options.rows == "all" else covering_rows(FACTORS)
    cells: list[LaneCell] = []
    for cell in LaneMatrix(texts, options.max_tokens).run(rows):
        cells.append(cell)
        told = " ".join(f"{name}={value}" for name, value in cell.row.items())
        print(
            f"[{len(cells):4}/{len(rows)}] {told}: {cell.num_equal}/{cell.num_tokens} equal, "
            f"{cell.num_preempted} pre-empted",
            file=sys.stderr,
            flush=True,
        )
    failures = [cell for cell in cells if not cell.holds]
    equal, total = sum(c.num_equal for c in cells), sum(c.num_tokens for c in cells)
    acceptance = acceptance_by_draft(cells)
    same = all(len(rates) == 1 for rates in acceptance.values())
    report: dict[str, object] = {
        "benchmark": "engines_parity",
        "provenance": provenance(),
        "num_prompts": len(texts),
        "num_rows": len(rows),
        "num_rows_that_hold": len(rows) - len(failures),
        "num_tokens": total,
        "num_equal": equal,
        "num_preempted": sum(cell.num_preempted for cell in cells),
        "acceptance": {name: sorted(rates) for name, rates in acceptance.items()},
        "cells": [cell.to_dict() for cell in cells],
    }
    print(f"{equal} of {total} tokens equal in {len(rows)} rows; acceptance the same: {same}")
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))
    sys.exit(0 if same and not failures else 1)


if __name__ == "__main__":
    main()
