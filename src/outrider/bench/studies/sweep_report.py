"""A sweep's results as sections of a page: cells, each axis by itself, and what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

from outrider.bench.frame import MIN_PAIRS, Ratio, Spread
from outrider.bench.machine import said_of
from outrider.bench.pages import Section, number
from outrider.bench.store import Plain
from outrider.bench.studies.sweep_axes import CONCURRENCY, CONTEXT, FIELDS, OF_WAYS
from outrider.bench.studies.sweep_recipes import ALIASES, RECIPES, Recipe, Reference
from outrider.bench.studies.sweep_record import ResultsFolder
from outrider.bench.studies.sweep_summary import (
    Marginal,
    Point,
    axes_in,
    best,
    marginals,
    points,
    summary,
    verdicts,
)
from outrider.core.config import EXACT_SAMPLERS

_COLUMNS = (
    "samples",
    "failed",
    "tok/s",
    "speed-up (95 %)",
    "accepted %",
    "tok/round",
    "verify ms",
)
_LOOP_COLUMNS = ("request p95 ms", "first p95 ms", "cumulative p95 ms")
_NOTE = (
    "Each row that drafts stands beside plain decoding of the same prompts, settings and moments: "
    "the speed-up is the ratio of median seconds a token within visits, with its 95 % bootstrap "
    "interval."
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
    found, values = points(folder), axes_in(folder)
    # What is the same in all cells is said once, above them.
    axes = [name for name, listed in values.items() if len(listed) > 1] or list(values)
    loops = any(point.values.get(CONCURRENCY) is not None for point in found)
    yield Section(
        title="Cells",
        text=[_NOTE, f"All cells: {_fixed(found, axes)}."],
        header=(*axes, *_COLUMNS, *(_LOOP_COLUMNS if loops else ())),
        rows=[_row(point, axes, loops=loops) for point in found],
    )
    for axis in axes:
        rows = marginals(found, axis)
        if len(rows) > 1:
            yield _by_axis(axis, rows)
    if shows := list(_sentences(folder, found)):
        yield Section(title="What this sweep shows", points=shows)
    if tested := tested_claims(folder):
        yield Section(title="What was published, tested here", points=tested)
    if recipe is not None and recipe.references:
        yield references(recipe.references)


def shown(value: Plain) -> str:
    """Plain decoding has no value of a way axis."""
    if value is None:
        return "plain"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fixed(found: Sequence[Point], axes: Sequence[str]) -> str:
    """What a table must say to mean anything, of what no axis says."""
    config = next((p.config for p in found if not p.is_plain), found[0].config)
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


def _row(point: Point, axes: Sequence[str], *, loops: bool) -> tuple[str, ...]:
    cell = point.cell
    times = (point.request_p95_ms, point.first_p95_ms, point.cumulative_p95_ms)
    return (
        *(shown(point.values[name]) for name in axes),
        str(cell.num_samples),
        str(cell.num_failures),
        spread_text(cell.tokens_per_second, 1),
        "1" if point.is_plain else _ratio(point.ratio),
        spread_text(cell.acceptance, 1, scale=100),
        number(cell.tokens_per_round, 2),
        number(cell.verify_ms and cell.verify_ms.mean, 3),
        *((number(value, 1) for value in times) if loops else ()),
    )


def _by_axis(axis: str, rows: Sequence[Marginal]) -> Section:
    return Section(
        title=f"By {axis}",
        text=[_AXIS_NOTE],
        header=(axis, "cells", "mean speed-up", "least", "most", "accepted %", "gains", "losses"),
        rows=[
            (
                shown(one.value),
                str(one.num_cells),
                f"{one.mean:.2f}",
                f"{one.least:.2f}",
                f"{one.most:.2f}",
                number(one.acceptance and 100 * one.acceptance, 1),
                str(one.num_gains),
                str(one.num_losses),
            )
            for one in rows
        ],
    )


def _sentences(folder: ResultsFolder, found: Sequence[Point]) -> Iterator[str]:
    record = summary(folder)
    same = record["greedy_identical"]
    if same is not None:
        verb = "are" if same else "are NOT"
        yield f"Greedy tokens of every exact cell {verb} those of plain decoding, in this same run."
    top = best(found)
    if top is not None:
        yield f"Greatest speed-up: {_ratio(top.ratio)} at {top.name}."
    yield from verdicts(found)
    if any(point.ratio and point.ratio.low is None for point in found):
        yield f"An interval and a verdict need {MIN_PAIRS} pieces of work (--prompts)."
    reasons: Counter[str] = Counter()
    for point in found:
        reasons.update(point.cell.failures)
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
    """Published figures, which are of other engines, machines and counters."""
    rows = [
        (
            one.pair,
            one.device,
            one.setting,
            number(one.tokens_per_second, 2),
            number(one.acceptance and 100 * one.acceptance, 1),
            one.note,
        )
        for one in listed
    ]
    return Section(
        title="Published elsewhere, by other engines",
        header=("what", "device", "setting", "tok/s", "accepted %", "note"),
        rows=rows,
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
