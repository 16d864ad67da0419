"""From samples to the cells of a grid, each at its values of the axes, and to each axis by itself.

A cell's numbers are those of sweep_summary.py. An axis by itself has, for each of its values, the
geometric mean of the speed-ups of all cells with it: ratios average so. A cell without a speed-up,
such as plain decoding, is not in it. Nothing here is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from outrider.bench.config import BenchmarkConfig
from outrider.bench.frame import Ratio, csv_text
from outrider.bench.store import Plain, write_json, write_text
from outrider.bench.sweep_results import ResultsFolder
from outrider.bench.sweep_samples import Sample
from outrider.bench.sweep_summary import Cell, cell_dict, cell_of, flat_row, loss, plain_by_place
from outrider.bench.sweeps.axes import CONCURRENCY, OF_WAYS
from outrider.bench.sweeps.scenes import FIELDS, named
from outrider.core.settings import SETTINGS
from outrider.metrics.summary import percentile

_CONFIG = tuple(item.name for item in fields(BenchmarkConfig) if item.name != "others")
_AXIS_OF: Mapping[str, str] = {field: axis for axis, field in FIELDS.items()}
# Goes with the domain, and is no axis of its own.
_PROMPTS = "prompt_set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A cell of the grid. `name` has what differs among cells, and `values` are those of the axes;
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
    configs = {sample.config.config_hash(): sample.config for sample in folder.current().values()}
    drafting = [config for config in configs.values() if config.k] or list(configs.values())
    declared = [name for run in folder.runs for name in _declared(run)]
    others = [_AXIS_OF.get(name, name) for c in drafting for name in (*_CONFIG, *dict(c.others))]
    found: dict[str, list[Plain]] = {}
    for name in dict.fromkeys([*declared, *others]):
        if name == _PROMPTS:
            continue
        values = list(dict.fromkeys(value_of(config, name) for config in drafting))
        if len(values) > 1 or name in declared:
            found[name] = values
    if CONCURRENCY in found and "batch_size" not in declared:
        # It is made to hold what is in flight.
        found.pop("batch_size", None)
    return dict(sorted(found.items(), key=lambda item: item[0] in OF_WAYS))


def points(folder: ResultsFolder) -> list[Point]:
    """Scenes in the order in which they were first measured, plain decoding before what drafts."""
    groups: dict[BenchmarkConfig, list[Sample]] = {}
    for sample in folder.current().values():
        groups.setdefault(sample.config, []).append(sample)
    axes = axes_in(folder)
    names = list(axes)
    plain = plain_by_place(folder)
    found = [_point(config, samples, plain, axes) for config, samples in groups.items()]
    scenes = [name for name in names if name not in OF_WAYS]
    order = {tuple(p.values[n] for n in scenes): i for i, p in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda p: (order[tuple(p.values[n] for n in scenes)], not p.is_plain))


def marginals(found: Sequence[Point], axis: str) -> list[Marginal]:
    """Only of values that have a speed-up."""
    groups: dict[Plain, list[tuple[Point, Ratio]]] = {}
    for point in found:
        if point.ratio is not None:
            groups.setdefault(point.values[axis], []).append((point, point.ratio))
    return [_marginal(axis, value, group) for value, group in groups.items()]


def verdicts(found: Sequence[Point]) -> list[str]:
    """A sentence for each cell where speculation lost, or may have, and one if it never did."""
    drafting = [point for point in found if not point.is_plain]
    judged = [point for point in drafting if point.ratio and point.ratio.low is not None]
    lost = [words for point in judged if (words := loss(point.cell, point.name))]
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
    found = points(folder)
    axes = axes_in(folder)
    shares = [s.foreign_cpu_share for s in folder.samples if s.foreign_cpu_share is not None]
    checked = [p.cell.identical for p in found if p.cell.identical is not None and not p.is_plain]
    return {
        "benchmark": "sweep",
        "schema": folder.schema.name,
        "axes": axes,
        "greedy_identical": all(checked) if checked else None,
        "num_samples": sum(point.cell.num_samples for point in found),
        "num_failures": sum(point.cell.num_failures for point in found),
        "foreign_cpu_share": round(statistics.fmean(shares), 4) if shares else None,
        "verdicts": verdicts(found),
        "cells": [_record(point) for point in found],
        "by_axis": {name: [_fields(m) for m in marginals(found, name)] for name in axes},
        "runs": folder.runs,
    }


def write_summary(folder: ResultsFolder, claims: Sequence[str] = ()) -> dict[str, object]:
    """Write summary.json, with what came of published `claims`, and summary.csv into the folder;
    what the former holds."""
    record = {**summary(folder), "claims": list(claims)}
    write_json(folder.path / "summary.json", record)
    rows = [{**p.values, **_requests(p), **flat_row(p.cell)} for p in points(folder)]
    write_text(folder.path / "summary.csv", csv_text(rows))
    return record


def _declared(run: Mapping[str, Any]) -> list[str]:
    """A folder may have been edited by anybody: what is no list of names says nothing."""
    axes: object = run.get("axes", {})
    return (
        [str(name) for name in cast("dict[object, object]", axes)] if isinstance(axes, dict) else []
    )


def _point(
    config: BenchmarkConfig,
    samples: Sequence[Sample],
    plain: Mapping[tuple[object, ...], Sample],
    axes: Mapping[str, Sequence[Plain]],
) -> Point:
    values = {name: value_of(config, name) for name in axes}
    differing = {n: v for n, v in values.items() if v is not None and len(axes[n]) > 1}
    good = [s.numbers for s in samples if s.ok and s.numbers is not None]
    tokens = [n.cumulative_p95_ms for n in good if n.cumulative_p95_ms is not None]
    return Point(
        config=config,
        name=named(differing) or config.label,
        values=values,
        cell=cell_of(samples, plain),
        request_p95_ms=_p95([ms for n in good for ms in n.request_ms]),
        first_p95_ms=_p95([ms for n in good for ms in n.first_ms]),
        cumulative_p95_ms=round(statistics.median(tokens), 4) if tokens else None,
    )


def _p95(values: Sequence[float]) -> float | None:
    return round(percentile(values, 95), 4) if values else None


def _marginal(axis: str, value: Plain, group: Sequence[tuple[Point, Ratio]]) -> Marginal:
    ratios = [ratio.value for _, ratio in group]
    rates = [p.cell.acceptance.mean for p, _ in group if p.cell.acceptance is not None]
    return Marginal(
        axis=axis,
        value=value,
        num_cells=len(group),
        mean=round(statistics.geometric_mean(ratios), 4),
        least=round(min(ratios), 4),
        most=round(max(ratios), 4),
        acceptance=round(statistics.fmean(rates), 4) if rates else None,
        num_gains=_count(group, lambda ratio: ratio.low is not None and ratio.low > 1),
        num_losses=_count(group, lambda ratio: ratio.high is not None and ratio.high < 1),
    )


def _count(group: Sequence[tuple[Point, Ratio]], holds: Callable[[Ratio], bool]) -> int:
    return sum(holds(ratio) for _, ratio in group)


def _record(point: Point) -> dict[str, object]:
    return {
        "values": dict(point.values),
        "config": point.config.to_dict(),
        "config_hash": point.config.config_hash(),
        **_requests(point),
        **cell_dict(point.cell),
    }


def _requests(point: Point) -> dict[str, float | None]:
    return {
        "request_p95_ms": point.request_p95_ms,
        "first_p95_ms": point.first_p95_ms,
        "cumulative_p95_ms": point.cumulative_p95_ms,
    }


def _fields(marginal: Marginal) -> dict[str, object]:
    return {item.name: getattr(marginal, item.name) for item in fields(marginal)}
