"""The part of a cost study (`outrider bench ssd`): plain decoding, drafting in turns and ahead.

Its rows are the dataclasses of bench/gemm/record.py, which says which figure takes which cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from outrider.bench.figure_style import Theme
from outrider.bench.frame import Ratio
from outrider.bench.gemm.record import (
    Ceilings,
    Cell,
    DraftShare,
    ProductRow,
    Theory,
    WindowRow,
)
from outrider.bench.gemm.report import scatter_of
from outrider.bench.report import study_costs, study_speed
from outrider.bench.report.figure_pareto import pareto
from outrider.bench.report.pieces import plain_table
from outrider.bench.report.reading import (
    Record,
    doubts,
    object_of,
    objects_of,
    origin_of,
    several,
    text_of,
    texts_of,
    value_of,
)
from outrider.bench.report.sources import Source
from outrider.bench.report.values import Claim, Figure, Origin, Part, Table
from outrider.bench.store import RecordError
from outrider.planner.advise import Point

NAMES = {"ar": "plain", "sd": "SD", "ssd": "SSD"}


def part(source: Source) -> list[Part]:
    """Raises RecordError."""
    record = source.record
    cells = several("cell", objects_of(record, "cells"), _cell)
    windows = several("window", objects_of(record, "windows"), partial(value_of, WindowRow))
    products = several("product", objects_of(record, "products"), partial(value_of, ProductRow))
    shares = several("share", objects_of(record, "draft_shares"), partial(value_of, DraftShare))
    if not (cells or windows or products or shares):
        raise RecordError("nothing was measured yet")
    roof = object_of(record, "ceilings")
    ceilings = value_of(Ceilings, roof) if roof else None
    setting = object_of(record, "setting")
    claims = [_claim(cell) for cell in cells if cell.method != "ar"]
    origins = [origin_of(record)]
    pairs = list(dict.fromkeys(item.pair for item in (*cells, *windows, *shares)))
    models = objects_of(record, "models")
    return [
        Part(
            kind="cost study",
            title=f"Cost study: {', '.join(pairs)}",
            place=source.place,
            about=list(_about(setting, models)),
            findings=texts_of(record, "findings"),
            claims=claims,
            figures=list(_figures(pairs, cells, windows, (products, ceilings), source.record)),
            tables=list(_tables(record, cells)),
            warnings=_warnings(record, claims, origins, scatter_of(windows)),
            origins=origins,
        )
    ]


def _warnings(
    record: Record, claims: Sequence[Claim], origins: Sequence[Origin], scatter: Sequence[str]
) -> list[str]:
    """The study's own, and those that it, or an older version, does not have."""
    said = ("quick", "foreign_cpu_share")
    rest = {name: value for name, value in record.items() if name not in said}
    said_here = [*texts_of(record, "warnings"), *scatter, *doubts(rest, claims, origins)]
    return list(dict.fromkeys(said_here))


def _cell(record: Record) -> Cell:
    theory = object_of(record, "theory")
    found = value_of(Cell, record, theory=value_of(Theory, theory) if theory else None)
    for name in ("tokens_per_second", "token_ms", "speed_up"):
        if getattr(found, name) <= 0:
            raise RecordError(f"{name} is {getattr(found, name)}")
    return found


def _claim(cell: Cell) -> Claim:
    parts = [cell.pair, NAMES[cell.method], f"K={cell.k}", f"alpha={cell.alpha:g}"]
    if cell.p_hit is not None:
        parts.append(f"p_hit={cell.p_hit:g}")
    if cell.batch > 1:
        parts.append(f"batch {cell.batch}")
    if cell.study == "fan_out":
        parts.append(f"fan-out {cell.fan_out}")
    ratio = Ratio(cell.speed_up, cell.low, cell.high, cell.num_samples)
    return Claim(kind="speculation", where=", ".join(parts), against="plain decoding", ratio=ratio)


def _about(setting: Record, models: Sequence[Record]) -> Iterator[str]:
    yield (
        f"Models of matrix products with acceptance by rule, {text_of(setting, 'dtype', '?')}, "
        f"{text_of(setting, 'max_tokens', '?')} tokens, {text_of(setting, 'repeats', '?')} repeats."
    )
    for model in models:
        sampled = text_of(model, "sampled")
        if sampled:
            name = f"{text_of(model, 'pair')}, {text_of(model, 'role')}"
            yield f"{name} ({text_of(model, 'shape')}): {sampled}"


def _figures(
    pairs: Sequence[str],
    cells: Sequence[Cell],
    windows: Sequence[WindowRow],
    roofline: tuple[Sequence[ProductRow], Ceilings | None],
    record: Record,
) -> Iterator[Figure]:
    """The eight of the study, for each pair what it has."""
    run = text_of(record, "run_id", "unknown")
    for pair in pairs:
        own = [cell for cell in cells if cell.pair == pair]
        foot = f"{pair}, run {run}"
        suffix = f"-{pair}" if len(pairs) > 1 else ""
        for name, title, alt, study, draw in _OF_CELLS:
            if any(cell.study == study and cell.method != "ar" for cell in own):
                yield _figure(name + suffix, f"{title}, {pair}", alt, partial(draw, own, foot))
        fitting = [row for row in windows if row.pair == pair]
        if fitting:
            title = f"Verification window, {pair}"
            alt = "Draft passes that fit beside a verification, by K, a line a number of branches."
            draw = partial(study_costs.windows, fitting, foot)
            yield _figure("fig5_verification_window" + suffix, title, alt, draw)
    products, ceilings = roofline
    if products and ceilings is not None:
        alt = "Gigaflops a second of matrix products by operations a byte, below the roof."
        draw = partial(study_costs.roofline, products, ceilings, f"run {run}")
        yield _figure("fig6_roofline", "Roofline of matrix products", alt, draw)


def _figure(name: str, title: str, alt: str, draw: Callable[[Theme], Any]) -> Figure:
    return Figure(name=name, title=title, alt=f"{alt} Numbers are in the tables below.", draw=draw)


def _points(cells: Sequence[Cell], foot: str, theme: Theme) -> Any:
    series: dict[str, list[Point]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.method, cell.batch)):
        if cell.study == "batch":
            point = Point(str(cell.batch), 1000 / cell.token_ms, cell.tokens_per_second)
            series.setdefault(NAMES[cell.method], []).append(point)
    return pareto(series, foot, theme)


_OF_CELLS: Sequence[tuple[str, str, str, str, Callable[[Sequence[Cell], str, Theme], Any]]] = (
    (
        "fig1_alpha_and_k",
        "Plain, SD and SSD over acceptance and K",
        "Speed-up over plain decoding by K, a panel an acceptance rate, SD and SSD with intervals.",
        "alpha",
        study_speed.alpha_and_k,
    ),
    (
        "fig2_hits",
        "SSD against SD by hits",
        "Speed-up over plain decoding by the share of foreseen verdicts, SSD as points, SD a line.",
        "hits",
        study_speed.hits,
    ),
    (
        "fig3_fan_out",
        "Work ahead and hits by fan-out",
        "Share of foreseen verdicts, and draft tokens made ahead, by fan-out.",
        "fan_out",
        study_speed.fan_out,
    ),
    (
        "fig4_round_breakdown",
        "A round's parts by method",
        "Milliseconds a round of drafting, verifying, accepting and the rest, a bar a method.",
        "alpha",
        study_costs.breakdown,
    ),
    (
        "fig7_batch",
        "Speed-up by batch",
        "Speed-up over plain decoding of the same batch, SD and SSD with intervals, by batch.",
        "batch",
        study_speed.batch,
    ),
    (
        "fig8_pareto",
        "Throughput against latency",
        "Tokens a second of all sequences against those of one, a line a method over batches.",
        "batch",
        _points,
    ),
)


def _tables(record: Record, cells: Sequence[Cell]) -> Iterator[Table]:
    titles = {
        "models": "Models",
        "draft_shares": "T_SD by K",
        "windows": "Verification windows",
        "products": "Matrix products",
    }
    for name, title in titles.items():
        rows = objects_of(record, name)
        if rows:
            yield plain_table(title, rows)
    if cells:
        rows = [
            {**raw, **_theory(cell)}
            for raw, cell in zip(objects_of(record, "cells"), cells, strict=True)
        ]
        note = "theory: speed-up from this run's own times; over plain takes verifying as a pass."
        yield plain_table("Cells", rows, note=note)


def _theory(cell: Cell) -> Record:
    if cell.theory is None:
        return {"theory": None, "verdict": ""}
    return {
        "theory": cell.theory.over_verify,
        "theory_over_plain": cell.theory.over_plain,
        "verdict": _claim(cell).verdict if cell.method != "ar" else "",
    }
