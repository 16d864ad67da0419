"""Figures of a comparison of drafters: speed-up by domain, and acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.bench.charts import Axis, Chart, Dots, Panel, Square, Squares, dot_of, rows_of
from outrider.bench.drawing import write_all
from outrider.bench.studies.drafters_lineup import OFF
from outrider.bench.studies.drafters_report import EVERYTHING, Cell

# Inches of a panel's head and foot, and of each drafter in it.
_FRAME, _LINE = 0.7, 0.24
# Panels side by side, by how many there are; more stand in rows of three.
_COLUMNS = {1: 1, 2: 2, 4: 2}
# Positions that a column has room for.
_MOST_POSITIONS = 8


def draw_all(found: Sequence[Cell], words: str, folder: Path) -> list[Path]:
    """Write every figure, light and dark, as SVG and PNG; `words` stand at the foot."""
    return write_all(charts(found, words), folder)


def charts(found: Sequence[Cell], words: str) -> dict[str, Chart]:
    """By the name of their files; without a drafter there are none."""
    drafted = [cell for cell in found if cell.contestant != OFF]
    domains = [d for d in dict.fromkeys(cell.domain for cell in drafted) if d != EVERYTHING]
    if not domains:
        return {}
    names = list(dict.fromkeys(cell.contestant for cell in drafted))
    own = {d: {cell.contestant: cell for cell in drafted if cell.domain == d} for d in domains}
    columns = _COLUMNS.get(len(domains), 3)
    height = 0.6 + -(-len(domains) // columns) * (_FRAME + _LINE * len(names))

    def chart(title: str, panels: Sequence[Panel]) -> Chart:
        rows = rows_of(panels, columns)
        return Chart(title=title, panels=rows, foot=words, height=height, share="y")

    return {
        "speedup_by_drafter": chart(
            "Speed-up over plain decoding, tokens a round, time spent drafting",
            [_speedups(domain, own[domain], names, drafted) for domain in domains],
        ),
        "acceptance_by_position": chart(
            "Kept at each position of a draft, %",
            [_positions(domain, own[domain], names) for domain in domains],
        ),
    }


def _speedups(
    domain: str, own: dict[str, Cell], names: Sequence[str], drafted: Sequence[Cell]
) -> Panel:
    """A dot a drafter, with its interval; beside it, tokens a round and the share of drafting."""
    cells = [own.get(name) for name in names]
    ratios = [cell.speedup for cell in drafted if cell.speedup]
    low = min([0.9, *(ratio.low or ratio.value for ratio in ratios)])
    high = max([1.1, *(ratio.high or ratio.value for ratio in ratios)])
    return Dots(
        title=domain,
        names=names,
        dots=[
            dot_of(cell.contestant, cell.speedup, _told(cell)) if cell and cell.speedup else None
            for cell in cells
        ],
        x=Axis(
            label="times plain decoding",
            low=low - 0.05 * (high - low),
            high=high + 0.05 * (high - low),
        ),
    )


def _positions(domain: str, own: dict[str, Cell], names: Sequence[str]) -> Panel:
    """A row a drafter, a column a position; the share of drafts that kept it. Columns end at
    `_MOST_POSITIONS`; a table has the rest."""
    longest = max((len(cell.by_position) for cell in own.values()), default=0)
    return Squares(
        title=domain,
        rows=names,
        columns=[str(i + 1) for i in range(min(longest, _MOST_POSITIONS))],
        squares=[
            [
                Square(value=share, text="" if share is None else f"{100 * share:.0f}")
                for share in (own[name].by_position if name in own else ())[:_MOST_POSITIONS]
            ]
            for name in names
        ],
        x=Axis(label="position in the draft"),
    )


def _told(cell: Cell) -> str:
    parts = [f"{cell.speedup.value:.2f}×"] if cell.speedup else []
    if cell.tokens_per_round is not None:
        parts.append(f"{cell.tokens_per_round:.2f} t/r")
    if cell.draft_share is not None:
        parts.append(f"{100 * cell.draft_share:.0f} %")
    return " · ".join(parts)
