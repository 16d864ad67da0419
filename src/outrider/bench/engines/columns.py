"""Columns of tables of cells: the heading, and what each cell has under it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from outrider.bench.engines.cells import Cell
from outrider.bench.pages import number, percent


def _queues(cell: Cell) -> str:
    return "-" if cell.queues is None else "/".join(f"{depth:.1f}" for depth in cell.queues)


_COLUMNS: Mapping[str, Callable[[Cell], str]] = {
    "level": lambda cell: str(cell.level),
    "engine": lambda cell: cell.engine,
    "tok/s": lambda cell: number(cell.tokens_per_second, 1),
    "TTFT p50 ms": lambda cell: number(cell.ttft_p50_ms, 1),
    "TTFT p95 ms": lambda cell: number(cell.ttft_p95_ms, 1),
    "ITL p50 ms": lambda cell: number(cell.itl_p50_ms, 2),
    "ITL p95 ms": lambda cell: number(cell.itl_p95_ms, 2),
    "end-to-end ms": lambda cell: number(cell.total_mean_ms, 1),
    "end-to-end p95 ms": lambda cell: number(cell.total_p95_ms, 1),
    "round p50 ms": lambda cell: number(cell.round_p50_ms, 2),
    "accepted %": lambda cell: percent(cell.acceptance),
    "tok/round": lambda cell: number(cell.tokens_per_round, 2),
    "p_hit %": lambda cell: percent(cell.p_hit),
    "waiting": lambda cell: number(cell.waiting, 1),
    "busy %": lambda cell: percent(cell.busy),
    "overlap %": lambda cell: percent(cell.overlap),
    "CPU %": lambda cell: number(cell.cpu_percent, 0),
    "GPU %": lambda cell: number(cell.gpu_percent, 0),
    "queues p/d/v": _queues,
    "free tokens": lambda cell: number(cell.least_free_tokens, 0),
    "cumulative token time p95 ms": lambda cell: number(cell.cumulative_p95_ms, 1),
    "status": lambda cell: cell.status,
}

# What a load run says of a cell, wherever it is shown.
LOAD_COLUMNS = (
    "tok/s",
    "TTFT p50 ms",
    "TTFT p95 ms",
    "ITL p50 ms",
    "ITL p95 ms",
    "end-to-end ms",
    "end-to-end p95 ms",
    "accepted %",
    "waiting",
    "busy %",
)
LOAD_NOTE = (
    "Medians over repeats. Times count from a request's arrival, also while it waits for its turn."
)


def columns(cell: Cell, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(_COLUMNS[name](cell) for name in names)


def load_failures(found: Iterable[Cell], cases: Sequence[str]) -> list[str]:
    """A sentence for every reason for which requests of a load run failed; `cases` are the names of
    its levels."""
    return [
        f"{cases[cell.level]}, {cell.engine}: {num} of {cell.num_samples} failed: {reason}"
        for cell in found
        for reason, num in cell.failures.items()
    ]
