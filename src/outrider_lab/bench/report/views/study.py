"""The part of a cost study (`run.py ssd`): plain decoding, drafting in turns and ahead.

Its rows are the dataclasses of bench/cost_record.py, which says which figure takes which cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outrider_lab.bench.charts import Chart
from outrider_lab.bench.cost_record import (
    TABLES,
    Ceilings,
    Cell,
    DraftShare,
    ProductRow,
    WindowRow,
    scatter_of,
    tables,
)
from outrider_lab.bench.report.parts import (
    Claim,
    Figure,
    Part,
    Record,
    Source,
    object_of,
    objects_of,
    part_of,
    text_of,
    texts_of,
)
from outrider_lab.bench.report.views.study_charts import (
    NAMES,
    OF_CELLS,
    ratio_of_cell,
    roofline,
    windows,
)
from outrider_lab.measure.store import RecordError, made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What is drawn of a study, whether it is whole or was interrupted."""

    draft_shares: Sequence[DraftShare] = ()
    ceilings: Ceilings | None = None
    products: Sequence[ProductRow] = ()
    windows: Sequence[WindowRow] = ()
    cells: Sequence[Cell] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for rates that nothing can have."""
        for cell in self.cells:
            if min(cell.tokens_per_second, cell.token_ms, cell.speed_up) <= 0:
                raise ValueError("a cell has a rate of 0")


def part(source: Source) -> list[Part]:
    """Raises RecordError."""
    record = source.record
    found = made(_Measured, record, tolerant=True)
    cells, fitting, products = found.cells, found.windows, found.products
    if not (cells or fitting or products or found.draft_shares):
        raise RecordError("nothing was measured yet")
    run = text_of(record, "run_id", "unknown")
    pairs = list(dict.fromkeys(item.pair for item in (*cells, *fitting, *found.draft_shares)))
    figures = list(_figures(pairs, cells, fitting, run))
    if products and found.ceilings is not None:
        words = "Gigaflops a second of matrix products by operations a byte, below the roof."
        chart = roofline(products, found.ceilings, f"run {run}")
        figures.append(_figure("fig6_roofline", chart, words))
    # The study's own warnings go before those that it, or an older version, does not have.
    said = ("quick", "foreign_cpu_share")
    own = part_of(
        source,
        {name: value for name, value in record.items() if name not in said},
        kind="cost study",
        title=f"Cost study: {', '.join(pairs)}",
        about=list(_about(record)),
        findings=texts_of(record, "findings"),
        claims=[_claim(cell) for cell in cells if cell.method != "ar"],
        figures=figures,
        tables=list(tables({name: objects_of(record, name) for name in TABLES})),
        warnings=[*texts_of(record, "warnings"), *scatter_of(fitting)],
    )
    return [replace(own, warnings=list(dict.fromkeys(own.warnings)))]


def _claim(cell: Cell) -> Claim:
    parts = [cell.pair, NAMES[cell.method], f"K={cell.k}", f"alpha={cell.alpha:g}"]
    if cell.p_hit is not None:
        parts.append(f"p_hit={cell.p_hit:g}")
    if cell.batch > 1:
        parts.append(f"batch {cell.batch}")
    if cell.study == "fan_out":
        parts.append(f"fan-out {cell.fan_out}")
    where = ", ".join(parts)
    return Claim(
        kind="speculation", where=where, against="plain decoding", ratio=ratio_of_cell(cell)
    )


def _about(record: Record) -> Iterator[str]:
    setting = object_of(record, "setting")
    yield (
        f"Models of matrix products with acceptance by rule, {text_of(setting, 'dtype', '?')}, "
        f"{text_of(setting, 'max_tokens', '?')} tokens, {text_of(setting, 'repeats', '?')} repeats."
    )
    for model in objects_of(record, "models"):
        sampled = text_of(model, "sampled")
        if sampled:
            name = f"{text_of(model, 'pair')}, {text_of(model, 'role')}"
            yield f"{name} ({text_of(model, 'shape')}): {sampled}"


def _figures(
    pairs: Sequence[str], cells: Sequence[Cell], rows: Sequence[WindowRow], run: str
) -> Iterator[Figure]:
    """The eight of the study but the roofline, for each pair what it has."""
    for pair in pairs:
        own = [cell for cell in cells if cell.pair == pair]
        foot = f"{pair}, run {run}"
        suffix = f"-{pair}" if len(pairs) > 1 else ""
        for name, (study, words, draw) in OF_CELLS.items():
            here = [cell for cell in own if cell.study == study]
            if any(cell.method != "ar" for cell in here):
                yield _figure(name + suffix, draw(here, foot), words)
        fitting = [row for row in rows if row.pair == pair]
        if fitting:
            words = "Draft passes that fit beside a verification, by K, a line for a width."
            yield _figure("fig5_verification_window" + suffix, windows(fitting, foot), words)


def _figure(name: str, chart: Chart, words: str) -> Figure:
    return Figure(name=name, chart=chart, words=f"{words} Numbers are in the tables below.")
