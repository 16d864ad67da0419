"""Parity of drafters: chains and trees, dense and hybrid, ways to roll back, batches, chunks,
pre-emption.

    python benchmarks/drafters_parity.py --output benchmarks/results/drafters_parity.json
    python benchmarks/drafters_parity.py --rows pairs            # minutes: all pairs of settings
    python benchmarks/drafters_parity.py --hybrid FOLDER         # also a hybrid target of yours

Every row must give the greedy tokens of plain decoding. Drafters ride on the embedded target and,
if one is named, on a hybrid, with the heads in its folder or beside it and with itself as the draft
model. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider import LLM, EngineConfig
from outrider.bench.drafter_parity import DrafterCell, DrafterMatrix, Ground
from outrider.bench.machine import provenance
from outrider.bench.pairwise import Row
from outrider.bench.store import write_json
from outrider.bench.studies.drafters_lineup import Drafts, available
from outrider.bench.workload import WORKLOADS, load_prompts
from outrider.core.errors import ConfigError

TARGET = "outrider/embedded"
# A prompt, its text and a draft must fit the small windows of the matrix.
MOST_CHARACTERS = 150


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", choices=("all", "pairs"), default="all")
    parser.add_argument("--hybrid", type=Path, default=None, help="a hybrid checkpoint's folder")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    grounds = [ground_of("dense", TARGET, None)]
    if options.hybrid is not None:
        folder = str(options.hybrid)
        grounds.append(ground_of("hybrid", folder, folder))
    cells: list[DrafterCell] = []
    for ground in grounds:
        rows = ground.all_rows() if options.rows == "all" else ground.pair_rows()
        cells += measured(ground, rows, options.max_tokens)
    failures = [cell for cell in cells if not cell.holds]
    equal, total = sum(c.num_equal for c in cells), sum(c.num_tokens for c in cells)
    report: dict[str, object] = {
        "benchmark": "drafters_parity",
        "provenance": provenance(),
        "drafters": {ground.name: list(ground.drafts) for ground in grounds},
        "num_rows": len(cells),
        "num_rows_that_hold": len(cells) - len(failures),
        "num_tokens": total,
        "num_equal": equal,
        "num_accepted": sum(cell.num_accepted for cell in cells),
        "num_preempted": sum(cell.num_preempted for cell in cells),
        "num_rows_with_trees": sum(cell.branched for cell in cells),
        "cells": [cell.to_dict() for cell in cells],
    }
    print(f"{equal} of {total} tokens equal in {len(cells)} rows")
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))
    sys.exit(1 if failures else 0)


def ground_of(name: str, target: str, draft: str | None) -> Ground:
    """With every drafter that finds what it needs."""
    found = Drafts.of(target, draft)
    drafts: dict[str, str | None] = {}
    for drafter in available():
        try:
            draft = found.of_drafter(drafter)
            LLM(target, draft=draft, config=EngineConfig(drafter=drafter)).close()
            drafts[drafter] = draft
        except ConfigError as error:
            print(f"{name}: {drafter} is left out: {error}", file=sys.stderr)
    return Ground(name=name, target=target, drafts=drafts, recurrent=name == "hybrid")


def measured(ground: Ground, rows: Sequence[Row], max_tokens: int) -> list[DrafterCell]:
    prompts = [p for name in WORKLOADS for p in load_prompts(name)[:4]]
    texts = [prompt[: min(20 + 20 * i, MOST_CHARACTERS)] for i, prompt in enumerate(prompts)]
    cells: list[DrafterCell] = []
    for cell in DrafterMatrix(ground, texts, max_tokens).run(rows):
        cells.append(cell)
        told = " ".join(f"{name}={value}" for name, value in cell.row.items())
        print(
            f"[{len(cells):4}/{len(rows)}] {told}: {cell.num_equal}/{cell.num_tokens} equal, "
            f"{cell.num_accepted} of {cell.num_drafted} kept, {cell.num_preempted} pre-empted",
            file=sys.stderr,
            flush=True,
        )
    return cells


if __name__ == "__main__":
    main()
