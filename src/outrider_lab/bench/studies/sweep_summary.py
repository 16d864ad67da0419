"""From the samples of a sweep to cells, each axis by itself, and the files that sum them up.

A cell is one configuration, with plain decoding of the same moments. Means and standard deviations
are over successful samples, the speed-up is a ratio of paired medians with its interval
(measure/frame.py). An axis by itself has, for each of its values, the geometric mean of the
speed-ups of all cells with it: ratios average so. The same samples give the same cells.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any, cast

from outrider.core.settings import SETTINGS
from outrider.metrics import percentile
from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench.studies.sweep_plan import CONCURRENCY, DOMAIN, FIELDS, OF_WAYS, PAIR, named
from outrider_lab.bench.studies.sweep_record import (
    BenchmarkConfig,
    ResultsFolder,
    SweepNumbers,
    SweepSample,
)
from outrider_lab.measure.frame import (
    Spread,
    csv_text,
    failures,
    good_numbers,
    grouped,
    mean,
    mean_foreign_share,
    median,
    medians,
    paired_ratio,
    share,
)
from outrider_lab.measure.store import Plain, write_json, write_text

STAGES = ("draft", "target", "accept", "other")
Place = tuple[object, ...]
_CONFIG = tuple(item.name for item in fields(BenchmarkConfig) if item.name != "others")
_AXIS_OF: Mapping[str, str] = {field: axis for axis, field in FIELDS.items()}
# Goes with the domain, and is no axis of its own.
_PROMPTS = "prompt_set"
# A row of summary.csv has the mean and the standard deviation of each.
_SPREADS = {
    "latency_ms": "latency_ms",
    "first_token_ms": "first_token_ms",
    "tokens_per_second": "tokens_per_second",
    "acceptance": "acceptance",
    "drafted": "num_drafted",
    "accepted": "num_accepted",
    "verify_ms": "verify_ms",
}
_TIMES = ("request_p95_ms", "first_p95_ms", "cumulative_p95_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCell:
    """`name` has what differs among cells, and `values` are those of the axes; plain decoding has
    none of a way axis. What is None could not be told: nothing was drafted, or no sample succeeded.
    `identical` says whether all greedy ids were those of plain decoding; `num_slower` counts the
    pieces that took longer than it. `stage_ms` is milliseconds a token. Percentiles 95 are over all
    requests: from handing in to the last token, to the first one, and, as the source of some
    published figures has it, to every token."""

    config: BenchmarkConfig
    name: str
    values: Mapping[str, Plain]
    num_samples: int
    num_failures: int
    failures: Mapping[str, int]
    latency_ms: Spread | None
    first_token_ms: Spread | None
    tokens_per_second: Spread | None
    speedup: Ratio | None
    num_slower: int
    acceptance: Spread | None
    num_drafted: Spread | None
    num_accepted: Spread | None
    tokens_per_round: float | None
    drafted_per_round: float | None
    accepted_histogram: Sequence[int]
    stage_ms: Mapping[str, float]
    verify_ms: Spread | None
    identical: bool | None
    request_p95_ms: float | None
    first_p95_ms: float | None
    cumulative_p95_ms: float | None

    @property
    def pair(self) -> str:
        return self.config.model_pair_name

    @property
    def domain(self) -> str:
        return self.config.prompt_domain

    @property
    def k(self) -> int:
        return self.config.k

    @property
    def is_plain(self) -> bool:
        return self.k == 0

    @property
    def success_rate(self) -> float:
        return 1 - self.num_failures / self.num_samples

    def to_dict(self) -> dict[str, object]:
        return {
            **asdict(self),
            "config": self.config.to_dict(),
            "config_hash": self.config.config_hash(),
            "pair": self.pair,
            "domain": self.domain,
            "k": self.k,
            "label": self.config.label,
            "success_rate": round(self.success_rate, 4),
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


def cells(folder: ResultsFolder) -> list[SweepCell]:
    """Scenes in the order in which they were first measured; in a scene plain decoding before what
    drafts, and in a sweep over K by K."""
    axes = axes_in(folder)
    scenes = [name for name in axes if name not in OF_WAYS]
    of_k = folder.schema.one_setting
    # Where a sample and its plain decoding meet.
    plain = {_place(sample): sample for sample in folder.samples if sample.config.k == 0}
    order: dict[Place, int] = {}
    found: list[tuple[int, int, SweepCell]] = []
    for config, samples in by_config(folder).items():
        values = {name: value_of(config, name) for name in axes}
        scene = order.setdefault(tuple(values[name] for name in scenes), len(order))
        differing = {n: v for n, v in values.items() if v is not None and len(axes[n]) > 1}
        name = named(differing) or config.label
        if of_k:
            name = f"{config.model_pair_name}, {config.prompt_domain}, K={config.k}"
        cell = _cell(samples, plain, name, values)
        found.append((scene, config.k if of_k else min(config.k, 1), cell))
    return [cell for _, _, cell in sorted(found, key=lambda one: one[:2])]


def by_config(folder: ResultsFolder) -> dict[BenchmarkConfig, list[SweepSample]]:
    return grouped(folder.current().values(), lambda sample: sample.config)


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
    of_k = [PAIR, DOMAIN, "k"] if folder.schema.one_setting else []
    declared = [*of_k, *(name for run in folder.runs for name in _declared(run))]
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


def marginals(found: Sequence[SweepCell], axis: str) -> list[Marginal]:
    """Only of values that have a speed-up."""
    pairs = [(cell, cell.speedup) for cell in found if cell.speedup is not None]
    groups = grouped(pairs, lambda pair: pair[0].values[axis])
    return [_marginal(axis, value, group) for value, group in groups.items()]


def verdicts(found: Sequence[SweepCell]) -> list[str]:
    """A sentence for each cell where speculation lost, or may have, and one if it never did. Cells
    without an interval are not judged."""
    drafting = [cell for cell in found if cell.k]
    judged = [cell for cell in drafting if cell.speedup and cell.speedup.low is not None]
    lost = [words for cell in judged if (words := _loss(cell))]
    if judged and not lost:
        which = "of this sweep" if len(judged) == len(drafting) else "that has an interval"
        return [f"Speculation lost in no cell {which}."]
    return lost


def summary(folder: ResultsFolder) -> dict[str, object]:
    """Everything, ready for JSON."""
    found, axes = cells(folder), axes_in(folder)
    checked = [cell.identical for cell in found if cell.identical is not None and cell.k]
    return {
        "benchmark": "k" if folder.schema.one_setting else "sweep",
        "schema": folder.schema.name,
        "axes": axes,
        "greedy_identical": all(checked) if checked else None,
        "num_samples": sum(cell.num_samples for cell in found),
        "num_failures": sum(cell.num_failures for cell in found),
        "foreign_cpu_share": mean_foreign_share(folder.samples),
        "verdicts": verdicts(found),
        "cells": [cell.to_dict() for cell in found],
        "by_axis": {name: [asdict(one) for one in marginals(found, name)] for name in axes},
        "runs": folder.runs,
    }


def write_summary(folder: ResultsFolder, claims: Sequence[str] | None = None) -> dict[str, object]:
    """Write summary.json, with what came of published `claims` if any were to be tested, and
    summary.csv into the folder; what the former holds."""
    record = summary(folder) | ({} if claims is None else {"claims": list(claims)})
    write_json(folder.path / "summary.json", record)
    write_text(folder.path / "summary.csv", csv_text([_flat_row(cell) for cell in cells(folder)]))
    return record


def _declared(run: Mapping[str, Any]) -> list[str]:
    """A folder may have been edited by anybody: what is no list of names says nothing."""
    axes: object = run.get("axes", {})
    named_axes = cast("dict[object, object]", axes) if isinstance(axes, dict) else {}
    return [str(name) for name in named_axes]


def _place(sample: SweepSample) -> Place:
    pair, domain = sample.config.model_pair_name, sample.config.prompt_domain
    return sample.visit, pair, domain, sample.piece, sample.repeat


def _cell(
    samples: Sequence[SweepSample],
    plain: Mapping[Place, SweepSample],
    name: str,
    values: Mapping[str, Plain],
) -> SweepCell:
    config = samples[0].config
    good = good_numbers(samples)
    reasons = failures(sample.reason for sample in samples)
    usual, own = _times(samples if config.k else (), plain)
    identical = [s.numbers.identical for s in samples if s.numbers is not None]
    num_rounds = sum(n.num_rounds for n in good)
    return SweepCell(
        config=config,
        name=name,
        values=values,
        num_samples=len(samples),
        num_failures=sum(reasons.values()),
        failures=reasons,
        latency_ms=Spread.of(1000 * n.seconds for n in good),
        first_token_ms=Spread.of(1000 * n.first_token_seconds for n in good),
        tokens_per_second=Spread.of(n.tokens_per_second for n in good),
        speedup=paired_ratio(usual, own),
        num_slower=sum(seconds > usual[piece] for piece, seconds in own.items()),
        acceptance=Spread.of(n.acceptance_rate for n in good),
        num_drafted=Spread.of(n.num_drafted for n in good),
        num_accepted=Spread.of(n.num_accepted for n in good),
        tokens_per_round=share(sum(n.num_tokens for n in good), num_rounds),
        drafted_per_round=share(sum(n.num_drafted for n in good), num_rounds),
        accepted_histogram=_histogram(good),
        stage_ms=_stage_ms(good),
        verify_ms=Spread.of(n.verify_ms for n in good),
        identical=None if None in identical or not identical else all(identical),
        request_p95_ms=_p95([ms for n in good for ms in n.request_ms]),
        first_p95_ms=_p95([ms for n in good for ms in n.first_ms]),
        cumulative_p95_ms=median(n.cumulative_p95_ms for n in good),
    )


def _times(
    samples: Sequence[SweepSample], plain: Mapping[Place, SweepSample]
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds a token of plain decoding and of the cell, by piece, where a visit has both."""
    both: list[tuple[str, float, float]] = []
    for sample in samples:
        beside = plain.get(_place(sample))
        usual, own = beside and beside.good, sample.good
        if usual is not None and own is not None:
            both.append((sample.piece, usual.seconds_per_token, own.seconds_per_token))
    return (
        medians((piece, usual) for piece, usual, _ in both),
        medians((piece, own) for piece, _, own in both),
    )


def _stage_ms(good: Sequence[SweepNumbers]) -> dict[str, float]:
    """Where the time of a token goes; `target` is reading the prompt and verifying."""
    num_tokens = sum(n.num_tokens for n in good)
    if not num_tokens:
        return {}
    seconds = {
        "draft": sum(n.draft_seconds for n in good),
        "target": sum(n.prefill_seconds + n.verify_seconds for n in good),
        "accept": sum(n.accept_seconds for n in good),
        "other": sum(n.other_seconds for n in good),
    }
    return {name: round(1000 * seconds[name] / num_tokens, 6) for name in STAGES}


def _histogram(good: Sequence[SweepNumbers]) -> list[int]:
    """Empty if no round drafted, which is so where a drafter found nothing to propose."""
    histograms = [n.accepted_histogram for n in good]
    counts = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
    return counts if any(counts) else []


def _p95(values: Sequence[float]) -> float | None:
    return round(percentile(values, 95), 4) if values else None


def _loss(cell: SweepCell) -> str | None:
    """A sentence if speculation lost, or may have."""
    ratio = cell.speedup
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low > 1:
        return None
    verb = "loses" if ratio.high < 1 else "does not measurably win"
    acceptance = f", {100 * cell.acceptance.mean:.0f} % accepted" if cell.acceptance else ""
    return (
        f"{cell.name}: speculation {verb}: "
        f"{ratio.value:.2f}× ({ratio.low:.2f} to {ratio.high:.2f}){acceptance}, "
        f"slower on {cell.num_slower} of {ratio.num_pairs} pieces."
    )


def _marginal(axis: str, value: Plain, group: Sequence[tuple[SweepCell, Ratio]]) -> Marginal:
    ratios = [ratio.value for _, ratio in group]
    return Marginal(
        axis=axis,
        value=value,
        num_cells=len(group),
        mean=round(statistics.geometric_mean(ratios), 4),
        least=round(min(ratios), 4),
        most=round(max(ratios), 4),
        acceptance=mean(cell.acceptance and cell.acceptance.mean for cell, _ in group),
        num_gains=sum(ratio.verdict == "gain" for _, ratio in group),
        num_losses=sum(ratio.verdict == "loss" for _, ratio in group),
    )


def _flat_row(cell: SweepCell) -> dict[str, object]:
    row: dict[str, object] = {
        **cell.values,
        "pair": cell.pair,
        "domain": cell.domain,
        "k": cell.k,
        "label": cell.config.label,
        "samples": cell.num_samples,
        "failures": cell.num_failures,
        "success_percent": round(100 * cell.success_rate, 2),
    }
    for name, attribute in _SPREADS.items():
        spread: Spread | None = getattr(cell, attribute)
        row[f"{name}_mean"] = spread and spread.mean
        row[f"{name}_std"] = spread and spread.std
    ratio = cell.speedup
    row["speedup"] = ratio and round(ratio.value, 4)
    row["speedup_low"] = ratio and ratio.low and round(ratio.low, 4)
    row["speedup_high"] = ratio and ratio.high and round(ratio.high, 4)
    row["tokens_per_round"] = cell.tokens_per_round
    row["identical"] = cell.identical
    return row | {name: getattr(cell, name) for name in _TIMES}
