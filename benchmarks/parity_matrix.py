"""Parity: speculation on equals speculation off, token for token, over a matrix of settings.

    python benchmarks/parity_matrix.py --output FILE              # the embedded pair; minutes
    python benchmarks/parity_matrix.py --prompts 4 --max-tokens 32     # a taste
    python benchmarks/parity_matrix.py features                   # rules, features, controllers
    python benchmarks/parity_matrix.py engines [--rows pairs]     # schedules, batches, memory
    python benchmarks/parity_matrix.py drafters [--hybrid FOLDER] # every drafter, trees, hybrids

Also: acceptance is a property of the pair of models. Greedily it is the same, to the last digit,
whatever the batch, the prompt chunk, the schedule and the way of verifying (`features`, `engines`),
and float32 text is that of transformers (the pair). `--rows pairs` runs a few rows that meet every
pair of two settings. Exit code 1 if anything differs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hf_peer import HfPeer
from matrices.drafters import drafters
from matrices.engines import acceptance_by_draft, engines
from matrices.features import features, pair
from matrices.matrix import EMBEDDED, Cell, Matrix, Runner, first_difference, num_equal
from matrices.pairwise import Row

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.machine import provenance
from outrider.bench.store import write_json
from outrider.bench.studies.drafters_lineup import Drafts, available
from outrider.bench.workload import WORKLOADS, load_prompts
from outrider.core.errors import ConfigError
from outrider.models.loading import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`prompts` of each workload (None: all), `cut` to so many characters by their place;
    `max_tokens` of each text; all rows of the matrix, or pairs."""

    benchmark: str
    prompts: int | None
    max_tokens: int
    rows: str = "all"
    cut: Callable[[int], int] = lambda _: sys.maxsize

    def texts(self, prompts: int | None) -> list[str]:
        every = [p for name in WORKLOADS for p in load_prompts(name)[: prompts or self.prompts]]
        return [prompt[: self.cut(place)] for place, prompt in enumerate(every)]


SIZES = {
    "pair": Size(benchmark="parity", prompts=None, max_tokens=128),
    "features": Size(benchmark="features", prompts=10, max_tokens=96, rows="pairs"),
    "engines": Size(
        benchmark="engines_parity", prompts=8, max_tokens=16, cut=lambda place: 40 + 20 * place
    ),
    # A prompt, its text and a draft must fit the small windows of the matrix.
    "drafters": Size(
        benchmark="drafters_parity",
        prompts=4,
        max_tokens=12,
        cut=lambda place: min(20 + 20 * place, 150),
    ),
}


def main() -> None:
    options = parsed()
    size = SIZES[options.matrix]
    texts, max_tokens = size.texts(options.prompts), options.max_tokens or size.max_tokens
    matrices = matrices_of(options)
    cells: list[Cell] = []
    for matrix in matrices:
        pairs = (options.rows or size.rows) == "pairs"
        rows = matrix.pair_rows() if pairs else matrix.all_rows()
        cells += measured(matrix, rows, texts, max_tokens)
    report: dict[str, Any] = {"benchmark": size.benchmark, "provenance": provenance()}
    report["num_prompts"] = len(texts)
    report |= summed(cells)
    same = True
    if options.matrix == "pair":
        report["cells"] = [flat(cell, len(texts)) for cell in cells]
        if not options.no_transformers:
            report["transformers_float32"] = beside_transformers(texts, max_tokens)
    elif options.matrix == "features":
        report["acceptance"] = found = acceptance_everywhere(texts, max_tokens)
        same = len({(entry["accepted"], entry["drafted"]) for entry in found}) == 1
    elif options.matrix == "engines":
        acceptance = acceptance_by_draft(cells)
        report["acceptance"] = {name: sorted(rates) for name, rates in acceptance.items()}
        same = all(len(rates) == 1 for rates in acceptance.values())
    else:
        report["drafters"] = {m.factors["ground"][0]: list(m.drafts) for m in matrices}
    told = "" if same else ", but acceptance is NOT the same everywhere"
    equal, total = report["num_equal"], report["num_tokens"]
    print(f"{equal} of {total} tokens equal in {len(cells)} rows{told}")
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))
    sys.exit(0 if same and all(cell.holds for cell in cells) else 1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("matrix", nargs="?", choices=tuple(SIZES), default="pair")
    parser.add_argument("--prompts", type=int, default=None, help="of each workload")
    parser.add_argument("--max-tokens", type=int, default=None)
    parser.add_argument("--rows", choices=("all", "pairs"), default=None)
    parser.add_argument("--hybrid", type=Path, default=None, help="a hybrid checkpoint's folder")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--output", type=Path, default=None)
    return parser.parse_args()


def matrices_of(options: argparse.Namespace) -> list[Matrix]:
    if options.matrix != "drafters":
        return [{"pair": pair, "features": features, "engines": engines}[options.matrix]()]
    found = [with_drafters("dense", EMBEDDED, None)]
    if options.hybrid is not None:
        found.append(with_drafters("hybrid", str(options.hybrid), str(options.hybrid)))
    return found


def with_drafters(name: str, target: str, draft: str | None) -> Matrix:
    """Every drafter that finds what it needs: heads in the target's folder or beside it."""
    found = Drafts.of(target, draft)
    drafts: dict[str, str | None] = {}
    for drafter in available():
        try:
            own = found.of_drafter(drafter)
            LLM(target, draft=own, config=EngineConfig(drafter=drafter)).close()
            drafts[drafter] = own
        except ConfigError as error:
            say(f"{name}: {drafter} is left out: {error}")
    return drafters(name, target, drafts, recurrent=name == "hybrid")


def measured(
    matrix: Matrix, rows: Sequence[Row], texts: Sequence[str], max_tokens: int
) -> list[Cell]:
    cells: list[Cell] = []
    for cell in Runner(matrix, texts, max_tokens).run(rows):
        cells.append(cell)
        told = " ".join(f"{name}={value}" for name, value in cell.row.items())
        say(
            f"[{len(cells):4}/{len(rows)}] {told}: {cell.num_equal}/{cell.num_tokens} equal, "
            f"{cell.num_accepted} of {cell.num_drafted} kept, {cell.num_preempted} pre-empted"
        )
    return cells


def summed(cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "num_rows": len(cells),
        "num_rows_that_hold": sum(cell.holds for cell in cells),
        "num_tokens": sum(cell.num_tokens for cell in cells),
        "num_equal": sum(cell.num_equal for cell in cells),
        "num_accepted": sum(cell.num_accepted for cell in cells),
        "num_preempted": sum(cell.num_preempted for cell in cells),
        "num_rows_with_trees": sum(cell.branched for cell in cells),
        "cells": [cell.to_dict() for cell in cells],
    }


def flat(cell: Cell, num_prompts: int) -> dict[str, object]:
    """A cell whose settings stand beside its counts."""
    row = {name: int(value) if value.isdecimal() else value for name, value in cell.row.items()}
    counts = {name: value for name, value in cell.to_dict().items() if name != "row"}
    return {**row, "num_prompts": num_prompts, **counts}


def acceptance_everywhere(prompts: Sequence[str], max_tokens: int) -> list[dict[str, Any]]:
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


def beside_transformers(prompts: Sequence[str], max_tokens: int) -> Mapping[str, object]:
    """Plain float32 decoding beside Hugging Face's greedy `generate`, which shares no code."""
    peer = HfPeer(resolve(EMBEDDED), resolve("outrider/embedded-draft"), torch.float32)
    tokenizer = LLM().tokenizer
    plain = Runner(pair(), prompts, max_tokens).plain_tokens({"dtype": "float32"})
    ids = (tokenizer.encode(prompt) for prompt in prompts)
    theirs = [tuple(peer.generate([one], max_tokens=max_tokens)[0]) for one in ids]
    return {
        "num_tokens": sum(map(len, theirs)),
        "num_equal": num_equal(theirs, plain),
        "first_difference": first_difference(theirs, plain),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
