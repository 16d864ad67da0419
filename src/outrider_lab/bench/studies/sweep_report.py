"""A sweep's results as sections of a page and as figures, from its results folder alone.

A figure has an axis: left the speed-up over plain decoding, which is the line at 1, right the share
of drafts kept. A line joins cells that differ in this axis alone. Few lines are named; many are
faint, and their mean is drawn over them, geometric for ratios.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from outrider.core.config import EXACT_SAMPLERS
from outrider.plugins.measure.turns import MIN_PAIRS, Ratio, said_of
from outrider_lab.bench.charts import Axis, Chart, Line, Lines, Panel, span_of
from outrider_lab.bench.drawing import write_all
from outrider_lab.bench.studies.sweep_plan import CONCURRENCY, CONTEXT, FIELDS, OF_WAYS
from outrider_lab.bench.studies.sweep_recipes import ALIASES, RECIPES, Recipe, Reference
from outrider_lab.bench.studies.sweep_record import ResultsFolder
from outrider_lab.bench.studies.sweep_summary import SweepCell, axes_in, cells, marginals, summary
from outrider_lab.measure.frame import Spread
from outrider_lab.measure.store import Plain, Section, number, percent

_COLUMNS: Mapping[str, Callable[[SweepCell], str]] = {
    "samples": lambda cell: str(cell.num_samples),
    "failed": lambda cell: str(cell.num_failures),
    "latency ms": lambda cell: spread_text(cell.latency_ms, 1),
    "tok/s": lambda cell: spread_text(cell.tokens_per_second, 1),
    "speed-up (95 %)": lambda cell: "1" if cell.is_plain else _ratio(cell.speedup),
    "accepted %": lambda cell: spread_text(cell.acceptance, 1, scale=100),
    "drafted": lambda cell: "-" if cell.is_plain else spread_text(cell.num_drafted, 1),
    "accepted": lambda cell: "-" if cell.is_plain else spread_text(cell.num_accepted, 1),
    "tok/round": lambda cell: number(cell.tokens_per_round, 2),
    "verify ms": lambda cell: number(cell.verify_ms and cell.verify_ms.mean, 3),
}
_LOOP_COLUMNS: Mapping[str, Callable[[SweepCell], str]] = {
    "request p95 ms": lambda cell: number(cell.request_p95_ms, 1),
    "first p95 ms": lambda cell: number(cell.first_p95_ms, 1),
    "cumulative p95 ms": lambda cell: number(cell.cumulative_p95_ms, 1),
}
_NOTE = (
    "Each row that drafts stands beside plain decoding of the same prompts, settings and moments: "
    "the speed-up is the ratio of median seconds a token within visits, with its 95 % bootstrap "
    "interval; ± is the standard deviation of samples."
)
_AXIS_NOTE = "Over all cells that have the value; the mean is geometric."


def preset_of(folder: ResultsFolder) -> Recipe | None:
    """The preset that was run last, if any."""
    name = str(folder.runs[-1].get("preset"))
    return RECIPES.get(ALIASES.get(name, name))


def tested_claims(folder: ResultsFolder) -> list[str]:
    """A sentence for each claim of the preset about what was measured."""
    recipe = preset_of(folder)
    listed = recipe.claims if recipe is not None else ()
    return [words for claim in listed if (words := claim.tested(folder))]


def sections(folder: ResultsFolder) -> Iterator[Section]:
    """Without those that have nothing to say."""
    recipe = preset_of(folder)
    found, values = cells(folder), axes_in(folder)
    # What is the same in all cells is said once, above them.
    axes = [name for name, listed in values.items() if len(listed) > 1] or list(values)
    loops = any(cell.values.get(CONCURRENCY) is not None for cell in found)
    columns = {**_COLUMNS, **(_LOOP_COLUMNS if loops else {})}
    yield Section(
        title="Cells",
        text=[_NOTE, f"All cells: {_fixed(found, axes)}."],
        header=(*axes, *columns),
        rows=[
            (
                *(shown(cell.values[name]) for name in axes),
                *(read(cell) for read in columns.values()),
            )
            for cell in found
        ],
    )
    for axis in axes:
        rows = marginals(found, axis)
        if len(rows) > 1:
            yield Section(
                title=f"By {axis}",
                text=[_AXIS_NOTE],
                header=_marginal_header(axis),
                rows=[
                    (
                        shown(one.value),
                        str(one.num_cells),
                        *(f"{ratio:.2f}" for ratio in (one.mean, one.least, one.most)),
                        percent(one.acceptance),
                        str(one.num_gains),
                        str(one.num_losses),
                    )
                    for one in rows
                ],
            )
    if shows := list(_sentences(folder, found)):
        yield Section(title="What this sweep shows", points=shows)
    if tested := tested_claims(folder):
        yield Section(title="What was published, tested here", points=tested)
    if recipe is not None and recipe.references:
        yield references(recipe.references)


def _marginal_header(axis: str) -> tuple[str, ...]:
    return (axis, "cells", "mean speed-up", "least", "most", "accepted %", "gains", "losses")


def shown(value: Plain) -> str:
    """Plain decoding has no value of a way axis."""
    if value is None:
        return "plain"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fixed(found: Sequence[SweepCell], axes: Sequence[str]) -> str:
    """What a table must say to mean anything, of what no axis says."""
    config = next((cell.config for cell in found if not cell.is_plain), found[0].config)
    words = {
        "pair": config.model_pair_name,
        "domain": f"{config.prompt_domain} prompts",
        "temperature": "greedy"
        if config.temperature == 0
        else f"temperature {config.temperature:g}",
        "max_tokens": f"{config.max_tokens} tokens",
        "batch_size": f"batch {config.batch_size}",
        "drafter": f"drafter {config.drafter}",
        "k": f"K = {config.k}",
        "sampler": f"{'' if config.sampler in EXACT_SAMPLERS else 'LOSSY '}rule {config.sampler}",
    }
    others = dict(config.others)
    for name, text in ((CONTEXT, "prompts of {} tokens"), (CONCURRENCY, "{} in flight")):
        value = others.pop(FIELDS.get(name, name), None)
        if value is not None:
            words[name] = text.format(value)
    hidden = {*axes, *(("batch_size",) if CONCURRENCY in {*axes, *words} else ())}
    if config.k == 0:
        hidden |= OF_WAYS
    fixed = [text for name, text in words.items() if name not in hidden]
    fixed += [f"{name} {value}" for name, value in others.items() if name not in axes]
    return ", ".join(fixed)


def _sentences(folder: ResultsFolder, found: Sequence[SweepCell]) -> Iterator[str]:
    record = summary(folder)
    same = record["greedy_identical"]
    if same is not None:
        verb = "are" if same else "are NOT"
        yield f"Greedy tokens of every exact cell {verb} those of plain decoding, in this same run."
    yield from cast("list[str]", record["verdicts"])
    if any(cell.speedup and cell.speedup.low is None for cell in found):
        num = MIN_PAIRS * max(cell.config.batch_size for cell in found)
        yield f"An interval and a verdict need {MIN_PAIRS} pieces of work (--prompts {num})."
    reasons: Counter[str] = Counter()
    for cell in found:
        reasons.update(cell.failures)
    for reason, num in reasons.most_common(5):
        yield f"{num} failed: {reason}"
    for refused in _refused(folder):
        yield f"Not measured: {refused}"
    share = record["foreign_cpu_share"]
    if said := said_of(share if isinstance(share, float) else None):
        yield said


def _refused(folder: ResultsFolder) -> list[str]:
    """What runs say of ways that could not be loaded, each once."""
    listed: list[object] = [run.get("refused") for run in folder.runs]
    found = [cast("dict[object, object]", one) for one in listed if isinstance(one, dict)]
    return list(dict.fromkeys(f"{name}: {why}" for one in found for name, why in one.items()))


def references(listed: Sequence[Reference]) -> Section:
    return Section(
        title="Published elsewhere, by other engines",
        header=("what", "device", "setting", "tok/s", "accepted %", "note"),
        rows=[
            (
                one.pair,
                one.device,
                one.setting,
                number(one.tokens_per_second, 2),
                percent(one.acceptance),
                one.note,
            )
            for one in listed
        ],
    )


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}{interval}"


def spread_text(spread: Spread | None, digits: int, *, scale: float = 1) -> str:
    """Mean ± standard deviation, where there are several values."""
    if spread is None:
        return "-"
    std = "" if spread.std is None else f" ± {scale * spread.std:.{digits}f}"
    return f"{scale * spread.mean:.{digits}f}{std}"


_MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class _Panel:
    """`read` gives a cell's value, with its interval or without, `mean` that of several."""

    label: str
    read: Callable[[SweepCell], Ratio | Spread | None]
    mean: Callable[[Sequence[float]], float] = statistics.fmean
    scale: float = 1.0
    baseline: float | None = None


_DRAFTING = (
    _Panel(
        "speed-up over plain decoding",
        lambda cell: cell.speedup,
        mean=statistics.geometric_mean,
        baseline=1.0,
    ),
    _Panel("accepted, % of drafted", lambda cell: cell.acceptance, scale=100),
)
# What grows with K, beside what it brings.
_VERIFY = _Panel("milliseconds of a verifying pass", lambda cell: cell.verify_ms)
_PLAIN = (_Panel("tokens a second", lambda cell: cell.tokens_per_second),)


def draw_all(folder: ResultsFolder) -> list[Path]:
    """Write every figure, light and dark, as SVG and PNG."""
    return write_all(charts(folder), folder.path / "figures")


def charts(folder: ResultsFolder) -> dict[str, Chart]:
    """One for each axis with several values, by the name of their files."""
    found = cells(folder)
    drafting = [cell for cell in found if not cell.is_plain]
    panels = _DRAFTING if drafting else _PLAIN
    return {
        f"by_{axis}": Chart(
            title=f"By {axis}",
            panels=[
                [
                    _panel(_lines(drafting or found, axis), panel, axis, values)
                    for panel in ((*panels, _VERIFY) if axis == "k" else panels)
                ]
            ],
            foot=_caption(folder),
        )
        for axis, values in axes_in(folder).items()
        if len(values) > 1
    }


def _panel(
    lines: Mapping[str, Mapping[Plain, SweepCell]],
    panel: _Panel,
    axis: str,
    values: Sequence[Plain],
) -> Panel:
    return Lines(
        lines=list(_drawn(lines, panel, values)),
        levels=[] if panel.baseline is None else [("plain decoding", panel.baseline)],
        x=Axis(label=axis, ticks=[shown(value) for value in values]),
        y=Axis(label=panel.label, low=0),
    )


def _lines(found: Sequence[SweepCell], axis: str) -> dict[str, dict[Plain, SweepCell]]:
    """Cells by the value of `axis`, for each combination of all the others."""
    lines: dict[str, dict[Plain, SweepCell]] = {}
    names = [name for name in found[0].values if name != axis]
    several = [name for name in names if len({cell.values[name] for cell in found}) > 1]
    for cell in found:
        name = ", ".join(shown(cell.values[other]) for other in several)
        lines.setdefault(name, {})[cell.values[axis]] = cell
    return lines


def _drawn(
    lines: Mapping[str, Mapping[Plain, SweepCell]], panel: _Panel, values: Sequence[Plain]
) -> Iterator[Line]:
    """Lines without anything are left out."""
    read = {
        name: own
        for name, line in lines.items()
        if (own := {i: v for i, x in enumerate(values) if x in line and (v := panel.read(line[x]))})
    }
    many = len(read) > _MOST_NAMED
    by_place: dict[int, list[float]] = {}
    for number_of_line, (name, own) in enumerate(read.items()):
        # Beside each other, so that intervals do not hide one another.
        aside = 0.0 if many else 0.06 * (number_of_line - (len(read) - 1) / 2)
        for place, value in own.items():
            by_place.setdefault(place, []).append(panel.scale * _value(value))
        yield Line(
            name="" if many or len(read) == 1 else name,
            points=[(x + aside, panel.scale * _value(value)) for x, value in own.items()],
            spans=[] if many else [_span(value, panel.scale) for value in own.values()],
            color="muted" if many else number_of_line,
            mark=None if many else number_of_line,
            width=0.7 if many else 1.8,
        )
    if many:
        mean = [(place, panel.mean(by_place[place])) for place in sorted(by_place)]
        yield Line(name=f"mean of {len(read)}", points=mean, color=0, mark=0)


def _value(found: Ratio | Spread) -> float:
    return found.value if isinstance(found, Ratio) else found.mean


def _span(found: Ratio | Spread, scale: float) -> tuple[float, float]:
    if isinstance(found, Ratio):
        return span_of(found)
    return scale * found.mean, scale * found.mean


def _caption(folder: ResultsFolder) -> str:
    run = folder.runs[-1]
    config = folder.samples[-1].config
    machine = run["machine"]["gpu"] or run["machine"]["cpu"]
    pairs = ", ".join(dict.fromkeys(str(one["pair"]) for one in folder.runs))
    return f"{pairs}, {config.max_tokens} tokens, {machine}; bars are 95 % intervals"
