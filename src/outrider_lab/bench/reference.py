"""Figures that others published and that ours are printed beside; each file says where it is from.

They are of other engines, models and machines, so they are no goals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class PublishedEngine:
    """An engine of ours at a level, as its source has it. `cumulative_p95_ms` is what the source
    calls "Token P95 (ms)"; acceptance is None where none was printed."""

    level: int
    engine: str
    tokens_per_second: float
    cumulative_p95_ms: float
    acceptance: float | None = None


@dataclass(frozen=True, slots=True)
class EngineTable:
    """`label` stands above the table; `names` are what the source calls our engines."""

    label: str
    names: Mapping[str, str]
    rows: Sequence[PublishedEngine]

    def at(self, level: int, engine: str) -> PublishedEngine | None:
        return next((p for p in self.rows if (p.level, p.engine) == (level, engine)), None)


@cache
def engine_table() -> EngineTable:
    """Three engines by concurrency."""
    found = _read("engines.json")
    named = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    rows = [PublishedEngine(**row) for row in named]
    return EngineTable(found["label"], found["names"], rows)


@cache
def draft_shares(pair: str) -> Mapping[int, float]:
    """T_SD by K of a pair; empty for one that nobody published."""
    return {int(k): share for k, share in _read("draft_shares.json")["pairs"].get(pair, {}).items()}


def _read(name: str) -> dict[str, Any]:
    return json.loads(files("outrider_lab.bench").joinpath("references", name).read_text("utf-8"))
