"""Parity of every way to arrange the work: schedules, executors, batches, drafting ahead, memory.

In tight memory requests are pre-empted, and read their text again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from matrices.matrix import Cell, Matrix
from matrices.pairwise import Factors, Row

from outrider.core.config import EngineConfig

FACTORS: Factors = {
    "schedule": ("single", "pd", "pdv", "ssd", "auto"),
    "executor": ("inline", "threads"),
    "batch_size": ("1", "2", "5", "16"),
    "drafter": ("none", "ngram", "model"),
    "k": ("0", "1", "4", "8"),
    "fallback": ("jit", "ngram", "none", "auto"),
    "force_hits": ("off", "0", "0.5", "1"),
    "prefill_chunk": ("3", "16", "256"),
    "memory": ("ample", "tight"),
}


def engines() -> Matrix:
    return Matrix(factors=FACTORS, config=_config, idle=_idle)


def _config(row: Row) -> EngineConfig:
    tight = row["memory"] == "tight"
    return EngineConfig(
        schedule=row["schedule"],
        concurrent_lanes=row["executor"] == "threads",
        batch_size=int(row["batch_size"]),
        drafter=row["drafter"],
        k=int(row["k"]),
        fallback=row["fallback"],
        force_hits=-1.0 if row["force_hits"] == "off" else float(row["force_hits"]),
        prefill_chunk=int(row["prefill_chunk"]),
        # Room for the longest request, and more of them let in than fit.
        reserve=0.0 if tight else 1.0,
        arena_tokens=160 if tight else 0,
        context=160 if tight else 0,
        page_size=4 if tight else 32,
    )


def _idle(row: Row) -> Collection[str]:
    idle: list[str] = []
    if row["drafter"] == "none" or row["k"] == "0":
        idle += ["drafter", "k", "fallback", "force_hits"]
    elif row["schedule"] != "ssd" or row["drafter"] != "model":
        idle += ["fallback", "force_hits"]
    return [*idle, "executor"] if row["schedule"] in ("single", "auto") else idle


def acceptance_by_draft(cells: Sequence[Cell]) -> dict[str, set[tuple[int, int]]]:
    """(accepted, drafted) by drafter and k, of rows that draft on the same terms: in ample memory,
    and where every draft is the drafter's own. One entry each says that acceptance is a property
    of the pair, whatever the schedule and batch."""
    found: dict[str, set[tuple[int, int]]] = {}
    for cell in cells:
        row = cell.row
        own = row["schedule"] != "ssd" or row["fallback"] == "jit"
        # With `auto` a controller may draft less, as time goes.
        if row["memory"] == "ample" and row["schedule"] != "auto" and own:
            name = f"{row['drafter']} k={row['k']}"
            found.setdefault(name, set()).add((cell.num_accepted, cell.num_drafted))
    return found
