"""Parity of every drafter: chains and trees, dense and hybrid targets, both ways to roll back,
batches, chunked prompts, pre-emption.

A new drafter joins by its line in the table of drafters; it takes part wherever it finds what it
drafts from.
"""

from __future__ import annotations

from collections.abc import Mapping

from matrices.matrix import Matrix
from matrices.pairwise import Row

from outrider.bench.studies.drafters_lineup import known
from outrider.core.config import ROLLBACKS, EngineConfig

SHAPES = ("chain", "tree")
_TREE_NODES = 12
# Room for the longest prompt of a check; tight memory holds one such text and little more.
_CONTEXT = 112


def drafters(
    name: str, target: str, drafts: Mapping[str, str | None], *, recurrent: bool = False
) -> Matrix:
    """Of `target`, called `name`, with the drafters of `drafts`. Recurrent targets have state to
    roll back in one of two ways."""
    return Matrix(
        factors={
            "ground": (name,),
            "drafter": tuple(drafts),
            "shape": SHAPES,
            "rollback": ROLLBACKS if recurrent else ROLLBACKS[:1],
            "k": ("1", "4"),
            "batch_size": ("1", "3", "8"),
            "prefill_chunk": ("3", "16", "256"),
            "memory": ("ample", "tight"),
        },
        config=_config,
        plain=lambda _: EngineConfig(drafter="none", batch_size=1, context=_CONTEXT),
        possible=_possible,
        target=target,
        drafts=drafts,
    )


def _config(row: Row) -> EngineConfig:
    tight = row["memory"] == "tight"
    return EngineConfig(
        drafter=row["drafter"],
        k=int(row["k"]),
        tree_nodes=_TREE_NODES if row["shape"] == "tree" else 0,
        batch_size=int(row["batch_size"]),
        prefill_chunk=int(row["prefill_chunk"]),
        # Room for the longest request, and more of them let in than fit.
        reserve=0.0 if tight else 1.0,
        arena_tokens=_CONTEXT if tight else 0,
        context=_CONTEXT,
        page_size=4 if tight else 32,
        state_rollback=row["rollback"],
        profile=True,
    )


def _possible(row: Row) -> Row:
    """What cannot branch drafts chains."""
    return row if known(row["drafter"]).branches else {**row, "shape": SHAPES[0]}
