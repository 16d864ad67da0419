"""Greedy parity over the whole matrix: speculation on equals speculation off, token for token.

    python benchmarks/parity.py --output benchmarks/results/parity.json      # the whole, minutes
    python benchmarks/parity.py --prompts 4 --max-tokens 32                   # a taste

Exit code 1 if any token differs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, EngineConfig
from outrider.bench.hf_peer import HfPeer
from outrider.bench.machine import provenance
from outrider.bench.parity import Matrix, compare_with_transformers, generate, run_matrix
from outrider.bench.store import write_json
from outrider.bench.workload import WORKLOADS, load_prompts
from outrider.models.loading import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=None, help="of each workload; default all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    prompts = [p for name in WORKLOADS for p in load_prompts(name)[: options.prompts]]
    matrix = Matrix(max_tokens=options.max_tokens)
    cells: list[dict[str, Any]] = []
    for cell in run_matrix(matrix, prompts):
        cells.append(cell.to_dict())
        print(
            f"[{len(cells):2}/{matrix.num_cells}] {cell.dtype} {cell.drafter} k={cell.k} "
            f"batch={cell.batch_size}: {cell.num_equal}/{cell.num_tokens} equal, "
            f"{cell.tokens_per_round:.2f} tokens a round",
            file=sys.stderr,
            flush=True,
        )
    equal = sum(cell["num_equal"] for cell in cells)
    total = sum(cell["num_tokens"] for cell in cells)
    report: dict[str, Any] = {
        "benchmark": "parity",
        "provenance": provenance(),
        "num_prompts": len(prompts),
        "num_tokens": total,
        "num_equal": equal,
        "cells": cells,
    }
    if not options.no_transformers:
        report["transformers_float32"] = beside_transformers(prompts, matrix)
        print(f"transformers float32: {report['transformers_float32']}", file=sys.stderr)
    print(f"{equal} of {total} tokens equal")
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))
    sys.exit(0 if equal == total else 1)


def beside_transformers(prompts: list[str], matrix: Matrix) -> dict[str, object]:
    target = resolve("outrider/embedded")
    peer = HfPeer(target, resolve("outrider/embedded-draft"), torch.float32)
    tokenizer = LLM().tokenizer
    plain = generate(prompts, EngineConfig(dtype="float32", drafter="none", batch_size=1), matrix)

    def theirs(prompt: str) -> tuple[int, ...]:
        ids = tokenizer.encode(prompt)
        return tuple(peer.generate([ids], max_tokens=matrix.max_tokens)[0])

    return compare_with_transformers(theirs, prompts, plain)


if __name__ == "__main__":
    main()
