"""Parity: speculation on equals speculation off, token for token, over a matrix of settings.

    python studies/parity_matrix.py --output FILE              # the embedded pair; minutes
    python studies/parity_matrix.py --prompts 4 --max-tokens 32     # a taste
    python studies/parity_matrix.py features                   # rules, features, controllers
    python studies/parity_matrix.py engines [--rows pairs]     # schedules, batches, memory
    python studies/parity_matrix.py drafters [--hybrid FOLDER] # every drafter, trees, hybrids

Also: acceptance is a property of the pair of models. Greedily it is the same, to the last digit,
whatever the batch, the prompt chunk, the schedule and the way of verifying (`features`, `engines`),
and float32 text is that of transformers (the pair). `--rows pairs` runs a few rows that meet every
pair of two settings. Exit code 1 if anything differs. The last line is one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from common import Report, first_prompts, study
from matrices.matrix import EMBEDDED, Cell, Matrix, Row, Runner, first_difference, num_equal
from matrices.settings import acceptance_by_draft, drafters, engines, pair
from matrices.settings import features as all_features
from options import Options
from vs_transformers import HfPeer

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import ConfigError
from outrider.models.loading import resolve
from outrider_lab.bench.studies.drafters_lineup import Drafts, available

# `prompts` are of each workload (0: all); `max_tokens` of each text.
FLAGS: dict[str, Any] = {"hybrid": None, "no_transformers": False}


@study(prompts=0, max_tokens=128, rows=("all", "pairs"), **FLAGS)
def parity(options: Options, report: Report) -> bool:
    """The embedded pair in each number format: text with speculation is that without, and float32
    text is that of transformers."""
    texts = texts_of(options)
    cells = run_all([pair()], options, texts, report)
    report["cells"] = [flat(cell, len(texts)) for cell in cells]
    if not options.no_transformers:
        report["transformers_float32"] = beside_transformers(texts, options.max_tokens)
    return holds(cells, report)


@study(prompts=10, max_tokens=96, rows=("pairs", "all"), **FLAGS)
def features(options: Options, report: Report) -> bool:
    """Every rule, feature and controller: texts, and one acceptance in every arrangement."""
    texts = texts_of(options)
    cells = run_all([all_features()], options, texts, report)
    report["acceptance"] = found = acceptance_everywhere(texts, options.max_tokens)
    return holds(
        cells, report, len({(entry["accepted"], entry["drafted"]) for entry in found}) == 1
    )


@study(prompts=8, max_tokens=16, rows=("all", "pairs"), **FLAGS)
def engines_parity(options: Options, report: Report) -> bool:
    """Every schedule, batch, way of drafting ahead and memory: texts, and one acceptance."""
    texts = texts_of(options, cut=lambda place: 40 + 20 * place)
    cells = run_all([engines()], options, texts, report)
    acceptance = acceptance_by_draft(cells)
    report["acceptance"] = {name: sorted(rates) for name, rates in acceptance.items()}
    return holds(cells, report, all(len(rates) == 1 for rates in acceptance.values()))


@study(prompts=4, max_tokens=12, rows=("all", "pairs"), **FLAGS)
def drafters_parity(options: Options, report: Report) -> bool:
    """Every drafter, as chain and tree, on a dense target and on the hybrid of `--hybrid FOLDER`.
    A prompt, its text and a draft fit the small windows of the matrix."""
    matrices = [with_drafters("dense", EMBEDDED, None)]
    if options.hybrid is not None:
        matrices.append(with_drafters("hybrid", options.hybrid, options.hybrid))
    texts = texts_of(options, cut=lambda place: min(20 + 20 * place, 150))
    cells = run_all(matrices, options, texts, report)
    report["drafters"] = {one.factors["ground"][0]: list(one.drafts) for one in matrices}
    return holds(cells, report)


MATRICES = {
    "pair": parity,
    "features": features,
    "engines": engines_parity,
    "drafters": drafters_parity,
}


def texts_of(options: Options, cut: Callable[[int], int] = lambda _: sys.maxsize) -> list[str]:
    """Prompts, `cut` to so many characters by their place."""
    if options.quick:
        options.prompts, options.max_tokens = 1, 8
    texts = first_prompts(options.prompts or None)
    return [prompt[: cut(place)] for place, prompt in enumerate(texts)]


def run_all(
    matrices: Sequence[Matrix], options: Options, texts: Sequence[str], report: Report
) -> list[Cell]:
    """Of each matrix all rows, or pairs."""
    cells: list[Cell] = []
    for matrix in matrices:
        rows = matrix.pair_rows() if options.rows == "pairs" else matrix.all_rows()
        cells += measured(matrix, rows, texts, options.max_tokens)
    report |= {"num_prompts": len(texts), **summed(cells)}
    return cells


def holds(cells: Sequence[Cell], report: Report, same: bool = True) -> bool:
    told = "" if same else ", but acceptance is NOT the same everywhere"
    counts = f"{report['num_equal']} of {report['num_tokens']} tokens equal"
    print(f"{counts} in {len(cells)} rows{told}")
    return same and all(cell.holds for cell in cells)


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
    peer = HfPeer(resolve(EMBEDDED), torch.float32)
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


def main(words: Sequence[str]) -> int:
    name = words[0] if words and words[0] in MATRICES else ""
    return MATRICES[name or "pair"].main(words[1:] if name else words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
