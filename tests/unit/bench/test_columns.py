"""Every column of a table of cells has the figure that its heading names."""

from __future__ import annotations

import dataclasses
from typing import Any

from outrider.bench.studies.engines_cells import Cell
from outrider.bench.studies.engines_report import (
    ENGINE_COLUMNS,
    LOAD_COLUMNS,
    columns,
    load_failures,
)

FLOATS = {
    "tok/s": ("tokens_per_second", 1.25, "1.2"),
    "TTFT p50 ms": ("ttft_p50_ms", 2.0, "2.0"),
    "TTFT p95 ms": ("ttft_p95_ms", 3.0, "3.0"),
    "ITL p50 ms": ("itl_p50_ms", 4.125, "4.12"),
    "ITL p95 ms": ("itl_p95_ms", 5.0, "5.00"),
    "end-to-end ms": ("total_mean_ms", 6.0, "6.0"),
    "end-to-end p95 ms": ("total_p95_ms", 7.0, "7.0"),
    "round p50 ms": ("round_p50_ms", 8.0, "8.00"),
    "accepted %": ("acceptance", 0.5, "50.0"),
    "tok/round": ("tokens_per_round", 9.0, "9.00"),
    "p_hit %": ("p_hit", 0.25, "25.0"),
    "waiting": ("waiting", 10.0, "10.0"),
    "busy %": ("busy", 0.125, "12.5"),
    "overlap %": ("overlap", 0.75, "75.0"),
    "CPU %": ("cpu_percent", 99.0, "99"),
    "GPU %": ("gpu_percent", 88.0, "88"),
    "free tokens": ("least_free_tokens", 77, "77"),
    "cumulative token time p95 ms": ("cumulative_p95_ms", 11.0, "11.0"),
}
UNTOLD: dict[str, Any] = dict.fromkeys(
    field.name for field in dataclasses.fields(Cell) if field.name != "failures"
)
NAMED: dict[str, Any] = {"level": 1, "engine": "ssd", "num_samples": 3, "num_failures": 0}
NOTHING = Cell(**(UNTOLD | NAMED), failures={})
TOLD: dict[str, Any] = {name: value for name, value, _ in FLOATS.values()}
CELL = dataclasses.replace(NOTHING, queues=(0.5, 1.0, 2.0), **TOLD)
WORDS = {"level": "1", "engine": "ssd", "status": "success", "queues p/d/v": "0.5/1.0/2.0"}


def test_every_heading_has_its_figure() -> None:
    expected = {heading: shown for heading, (_, _, shown) in FLOATS.items()} | WORDS
    assert {*ENGINE_COLUMNS, *LOAD_COLUMNS} == expected.keys()
    assert dict(zip(expected, columns(CELL, expected), strict=True)) == expected


def test_what_could_not_be_told_is_a_dash() -> None:
    assert set(columns(NOTHING, [*FLOATS, "queues p/d/v"])) == {"-"}


def test_a_failure_is_said_with_its_case() -> None:
    failed = dataclasses.replace(NOTHING, num_failures=2, failures={"full": 2})
    assert load_failures([NOTHING, failed], ["closed", "open"]) == [
        "open, ssd: 2 of 3 failed: full"
    ]
