"""Every pair of what native kernels are asked for, in few runs: `scripts/sanitise` looks for bad
reads and writes in them, and every greedy text is that of plain decoding.

The runs are few tokens long, since instrumented kernels are slow; without a sanitiser they are a
parity test like others, and `deep` for that reason.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from matrices.matrix import covering_rows

from outrider import LLM, EngineConfig, SamplingParams

pytestmark = [pytest.mark.weights, pytest.mark.deep]

ROWS = covering_rows(
    {
        "sampling": ("greedy", "sampled", "filtered"),
        "nodes": ("0", "12"),
        "drafter": (
            "model", "ngram", "eagle", "medusa", "mtp", "recycling", "layer-skip",
            "hybrid mtp", "hybrid ngram",
        ),
        "precision": ("float32", "bfloat16", "float16", "int8", "int4"),
        "threads": ("1", "2"),
        "fused": ("fused", "staged"),
    }
)  # fmt: skip
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=3),
    "filtered": SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=0.9, seed=3, top_k=50, top_p=0.9, min_p=0.01
    ),
}
# Short, longer than a page, and longer than a chunk.
PROMPTS = ["def f(x):", "def add(a, b):\n    return a + b\n" * 6, "for i in range(10):\n" * 30]


def written(target: str, precision: str, sampling: str, **config: Any) -> list[tuple[int, ...]]:
    quantise = precision if precision.startswith("int") else "none"
    config["dtype"] = "bfloat16" if quantise != "none" else precision
    llm = LLM(
        target,
        config=EngineConfig(
            device="cpu", context=512, batch_size=3, prefill_chunk=100, quantise=quantise, **config
        ),
    )
    try:
        return [result.token_ids for result in llm.generate(PROMPTS, SAMPLINGS[sampling])]
    finally:
        llm.close()


@functools.cache
def plain(target: str, precision: str) -> list[tuple[int, ...]]:
    return written(target, precision, "greedy", drafter="none", threads=1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()).replace(" ", "-"))
def test_every_pair_of_choices_runs(row: dict[str, str]) -> None:
    hybrid = row["drafter"].startswith("hybrid")
    target = "outrider/embedded-hybrid" if hybrid else "outrider/embedded"
    found = written(
        target,
        row["precision"],
        row["sampling"],
        drafter=row["drafter"].removeprefix("hybrid "),
        tree_nodes=int(row["nodes"]),
        threads=int(row["threads"]),
        fused_round=row["fused"] == "fused",
    )
    assert all(len(ids) == 20 for ids in found)
    if row["sampling"] == "greedy":
        assert found == plain(target, row["precision"])
