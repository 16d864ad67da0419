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

from outrider.estimate.theory import expected_tokens, speed_up


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


_ALPHA = 0.9
# Half of the last digit that is printed.
_ROUNDING = 0.005


@dataclass(frozen=True, slots=True)
class AheadPrediction:
    """What was printed of drafting ahead with 8b/1b at alpha = 0.9: T_SD, and the speed-up as
    predicted and as achieved. The prediction does not follow from T_SD by the formula beside it;
    docs/project/published-tables.md says more."""

    k: int
    draft_time: float
    predicted: float
    achieved: float

    @property
    def tokens(self) -> float:
        return expected_tokens(_ALPHA, self.k)

    @property
    def by_formula(self) -> float:
        return speed_up(self.tokens, self.draft_time)

    def time_for(self, gain: float) -> float:
        """T_SD with `gain` = E / (1 + T_SD)."""
        return self.tokens / gain - 1

    @property
    def implied(self) -> float:
        return self.time_for(self.predicted)

    @property
    def rounding(self) -> tuple[float, float]:
        """The least and the largest draft time that round to the prediction."""
        low, high = self.predicted + _ROUNDING, self.predicted - _ROUNDING
        return self.time_for(low), self.time_for(high)

    @property
    def follows(self) -> bool:
        """Whether some draft time that rounds to the printed one rounds to the prediction too."""
        low, high = self.rounding
        return low <= self.draft_time + _ROUNDING and self.draft_time - _ROUNDING <= high


@cache
def ahead_predictions() -> Sequence[AheadPrediction]:
    """By K."""
    found, shares = _read("draft_shares.json")["speed_ups"], draft_shares("8b/1b")
    columns = (found["k"], shares.values(), found["predicted"], found["achieved"])
    return [AheadPrediction(*row) for row in zip(*columns, strict=True)]


def _read(name: str) -> dict[str, Any]:
    return json.loads(files("outrider.bench").joinpath("references", name).read_text("utf-8"))
