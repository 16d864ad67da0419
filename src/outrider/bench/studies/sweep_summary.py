"""The summary of a sweep: cells at their values of the axes, and each axis by itself.

An axis by itself has, for each of its values, the geometric mean of the speed-ups of all cells with
it: ratios average so. A cell without a speed-up, such as plain decoding, is not in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from outrider.bench.frame import Ratio, csv_text, grouped, mean, median
from outrider.bench.sample import good_numbers, mean_foreign_share
from outrider.bench.store import Plain, write_json, write_text
from outrider.bench.studies.sweep_axes import CONCURRENCY, FIELDS, OF_WAYS, named
from outrider.bench.studies.sweep_cells import (
    Cell,
    Place,
    by_config,
    cell_of,
    cells,
    plain_by_place,
)
from outrider.bench.studies.sweep_record import K_SWEEP, BenchmarkConfig, ResultsFolder, Sample
from outrider.core.settings import SETTINGS
from outrider.metrics.summary import percentile

_CONFIG = tuple(item.name for item in fields(BenchmarkConfig) if item.name != "others")
_AXIS_OF: Mapping[str, str] = {field: axis for axis, field in FIELDS.items()}
# Goes with the domain, and is no axis of its own.
_PROMPTS = "prompt_set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A cell of a grid. `name` has what differs among cells, and `values` are those of the axes;
    plain decoding has none of a way axis. The milliseconds are percentiles 95 over all requests:
    from handing in to the last token, to the first one, and, as the source of some published
    figures has it, to every token."""

    config: BenchmarkConfig
    name: str
    values: Mapping[str, Plain]
    cell: Cell
    request_p95_ms: float | None
    first_p95_ms: float | None
    cumulative_p95_ms: float | None

    @property
    def is_plain(self) -> bool:
        return self.config.k == 0

    @property
    def ratio(self) -> Ratio | None:
        return self.cell.speedup

    @property
    def times(self) -> dict[str, float | None]:
        return {
            "request_p95_ms": self.request_p95_ms,
            "first_p95_ms": self.first_p95_ms,
            "cumulative_p95_ms": self.cumulative_p95_ms,
        }

    def to_dict(self) -> dict[str, object]:
        return {
            "values": dict(self.values),
            "config": self.config.to_dict(),
            "config_hash": self.config.config_hash(),
            **self.times,
            **self.cell.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Marginal:
    """One value of an axis, over all cells that have it. `mean` is geometric; `num_gains` and
    `num_losses` count cells whose interval leaves out 1."""

    axis: str
    value: Plain
    num_cells: int
    mean: float
    least: float
    most: float
    acceptance: float | None
    num_gains: int
    num_losses: int


def points(folder: ResultsFolder) -> list[Point]:
    """Scenes in the order in which they were first measured, plain decoding before what drafts."""
    axes = axes_in(folder)
    plain = plain_by_place(folder)
    found = [_point(config, samples, plain, axes) for config, samples in by_config(folder).items()]
    scenes = [name for name in axes if name not in OF_WAYS]
    order = {tuple(p.values[n] for n in scenes): i for i, p in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda p: (order[tuple(p.values[n] for n in scenes)], not p.is_plain))


def value_of(config: BenchmarkConfig, axis: str) -> Plain:
    """What `axis` is in a cell, None for a way axis of plain decoding."""
    if config.k == 0 and axis in OF_WAYS:
        return None
    name = FIELDS.get(axis, axis)
    if name in _CONFIG:
        value: Plain = getattr(config, name)
        return value
    others = dict(config.others)
    default: Any = SETTINGS[axis].default if axis in SETTINGS and axis not in FIELDS else None
    return others.get(name, default)


def axes_in(folder: ResultsFolder) -> dict[str, list[Plain]]:
    """Names and values, as runs declare them, then what else differs among cells; scene axes come
    before way axes."""
    configs = list(by_config(folder))
    drafting = [config for config in configs if config.k] or configs
    declared = [name for run in folder.runs for name in _declared(run)]
    others = [_AXIS_OF.get(name, name) for c in drafting for name in (*_CONFIG, *dict(c.others))]
    found: dict[str, list[Plain]] = {}
    for name in dict.fromkeys([*declared, *others]):
        values = list(dict.fromkeys(value_of(config, name) for config in drafting))
        if name != _PROMPTS and (len(values) > 1 or name in declared):
            found[name] = values
    if CONCURRENCY in found and "batch_size" not in declared:
        # It is made to hold what is in flight.
        found.pop("batch_size", None)
    return dict(sorted(found.items(), key=lambda item: item[0] in OF_WAYS))


def marginals(found: Sequence[Point], axis: str) -> list[Marginal]:
    """Only of values that have a speed-up."""
    pairs = [(point, point.ratio) for point in found if point.ratio is not None]
    groups = grouped(pairs, lambda pair: pair[0].values[axis])
    return [_marginal(axis, value, group) for value, group in groups.items()]


def verdicts(found: Sequence[Cell | Point]) -> list[str]:
    """A sentence for each cell where speculation lost, or may have, and one if it never did. Cells
    without an interval are not judged."""
    every = [(one.name, one.cell if isinstance(one, Point) else one) for one in found]
    drafting = [(name, cell) for name, cell in every if cell.k]
    judged = [(n, cell) for n, cell in drafting if cell.speedup and cell.speedup.low is not None]
    lost = [words for name, cell in judged if (words := _loss(cell, name))]
    if judged and not lost:
        which = "of this sweep" if len(judged) == len(drafting) else "that has an interval"
        return [f"Speculation lost in no cell {which}."]
    return lost


def best(found: Sequence[Point]) -> Point | None:
    """The cell with the greatest speed-up."""
    with_ratio = [point for point in found if point.ratio is not None]
    return max(with_ratio, key=lambda p: p.ratio.value if p.ratio else 0.0, default=None)


def summary(folder: ResultsFolder) -> dict[str, object]:
    """Everything, ready for JSON."""
    if folder.schema == K_SWEEP:
        found = cells(folder)
        head: dict[str, object] = {"benchmark": "k", "schema": folder.schema.name}
        return {**head, **_overview(folder, found), "runs": folder.runs}
    grid, axes = points(folder), axes_in(folder)
    head = {"benchmark": "sweep", "schema": folder.schema.name, "axes": axes}
    by_axis = {name: [asdict(one) for one in marginals(grid, name)] for name in axes}
    return {**head, **_overview(folder, grid), "by_axis": by_axis, "runs": folder.runs}


def write_summary(folder: ResultsFolder, claims: Sequence[str] | None = None) -> dict[str, object]:
    """Write summary.json, with what came of published `claims` if any were to be tested, and
    summary.csv into the folder; what the former holds."""
    record = summary(folder) | ({} if claims is None else {"claims": list(claims)})
    write_json(folder.path / "summary.json", record)
    if folder.schema == K_SWEEP:
        rows = [_flat_row(cell) for cell in cells(folder)]
    else:
        rows = [{**p.values, **p.times, **_flat_row(p.cell)} for p in points(folder)]
    write_text(folder.path / "summary.csv", csv_text(rows))
    return record


def _overview(folder: ResultsFolder, found: Sequence[Cell | Point]) -> dict[str, object]:
    every = [one.cell if isinstance(one, Point) else one for one in found]
    checked = [cell.identical for cell in every if cell.identical is not None and cell.k]
    return {
        "greedy_identical": all(checked) if checked else None,
        "num_samples": sum(cell.num_samples for cell in every),
        "num_failures": sum(cell.num_failures for cell in every),
        "foreign_cpu_share": mean_foreign_share(folder.samples),
        "verdicts": verdicts(found),
        "cells": [one.to_dict() for one in found],
    }


def _declared(run: Mapping[str, Any]) -> list[str]:
    """A folder may have been edited by anybody: what is no list of names says nothing."""
    axes: object = run.get("axes", {})
    named_axes = cast("dict[object, object]", axes) if isinstance(axes, dict) else {}
    return [str(name) for name in named_axes]


def _loss(cell: Cell, name: str) -> str | None:
    """A sentence if speculation lost, or may have."""
    ratio = cell.speedup
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low > 1:
        return None
    verb = "loses" if ratio.high < 1 else "does not measurably win"
    acceptance = f", {100 * cell.acceptance.mean:.0f} % accepted" if cell.acceptance else ""
    return (
        f"{name}: speculation {verb}: "
        f"{ratio.value:.2f}× ({ratio.low:.2f} to {ratio.high:.2f}){acceptance}, "
        f"slower on {cell.num_slower} of {ratio.num_pairs} pieces."
    )


def _point(
    config: BenchmarkConfig,
    samples: Sequence[Sample],
    plain: Mapping[Place, Sample],
    axes: Mapping[str, Sequence[Plain]],
) -> Point:
    values = {name: value_of(config, name) for name in axes}
    differing = {n: v for n, v in values.items() if v is not None and len(axes[n]) > 1}
    good = good_numbers(samples)
    return Point(
        config=config,
        name=named(differing) or config.label,
        values=values,
        cell=cell_of(samples, plain),
        request_p95_ms=_p95([ms for n in good for ms in n.request_ms]),
        first_p95_ms=_p95([ms for n in good for ms in n.first_ms]),
        cumulative_p95_ms=median(n.cumulative_p95_ms for n in good),
    )


def _p95(values: Sequence[float]) -> float | None:
    return round(percentile(values, 95), 4) if values else None


def _marginal(axis: str, value: Plain, group: Sequence[tuple[Point, Ratio]]) -> Marginal:
    ratios = [ratio.value for _, ratio in group]
    return Marginal(
        axis=axis,
        value=value,
        num_cells=len(group),
        mean=round(statistics.geometric_mean(ratios), 4),
        least=round(min(ratios), 4),
        most=round(max(ratios), 4),
        acceptance=mean(p.cell.acceptance and p.cell.acceptance.mean for p, _ in group),
        num_gains=sum(ratio.low is not None and ratio.low > 1 for _, ratio in group),
        num_losses=sum(ratio.high is not None and ratio.high < 1 for _, ratio in group),
    )


def _flat_row(cell: Cell) -> dict[str, object]:
    row: dict[str, object] = {
        "pair": cell.pair,
        "domain": cell.domain,
        "k": cell.k,
        "label": cell.label,
        "samples": cell.num_samples,
        "failures": cell.num_failures,
        "success_percent": round(100 * cell.success_rate, 2),
    }
    spreads = {
        "latency_ms": cell.latency_ms,
        "first_token_ms": cell.first_token_ms,
        "tokens_per_second": cell.tokens_per_second,
        "acceptance": cell.acceptance,
        "drafted": cell.num_drafted,
        "accepted": cell.num_accepted,
        "verify_ms": cell.verify_ms,
    }
    for name, spread in spreads.items():
        row[f"{name}_mean"] = spread and spread.mean
        row[f"{name}_std"] = spread and spread.std
    ratio = cell.speedup
    row["speedup"] = ratio and round(ratio.value, 4)
    row["speedup_low"] = ratio and ratio.low and round(ratio.low, 4)
    row["speedup_high"] = ratio and ratio.high and round(ratio.high, 4)
    row["tokens_per_round"] = cell.tokens_per_round
    row["identical"] = cell.identical
    return row
