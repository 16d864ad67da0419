"""Figures of a comparison of drafters: speed-up by domain, and acceptance by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.bench.figure_panels import caption
from outrider.bench.figure_style import THEMES, Theme, new_figure, readable_on, save, themed
from outrider.bench.frame import Ratio
from outrider.bench.studies.drafters_lineup import OFF
from outrider.bench.studies.drafters_report import EVERYTHING, Cell

# Inches of a panel's head and foot, and of each drafter in it.
_FRAME, _LINE = 0.7, 0.24
# Room for the words beside the dots, over that of the dots.
_WORDS = 0.6
# Panels side by side, by how many there are; more stand in rows of three.
_COLUMNS = {1: 1, 2: 2, 4: 2}
# Positions that a column has room for.
_MOST_POSITIONS = 8


def draw_all(found: Sequence[Cell], words: str, folder: Path) -> list[Path]:
    """Write every figure, light and dark, as SVG and PNG; `words` stand at the foot."""
    drafted = [cell for cell in found if cell.contestant != OFF]
    if not drafted:
        return []
    written: list[Path] = []
    for name, draw in FIGURES.items():
        for theme in THEMES:
            with themed(theme):
                figure = draw(drafted, words, theme)
                written += save(figure, folder, name, theme)
    return written


def speedup(found: Sequence[Cell], words: str, theme: Theme) -> Any:
    """A dot a drafter, with its interval; beside it, tokens a round and the share of drafting."""
    title = "Speed-up over plain decoding, tokens a round, time spent drafting"
    figure, panels = _panels(found, title, words, theme)
    loss, none, gain = theme.diverging[0], theme.muted, theme.diverging[2]
    colors = {"gain": gain, "loss": loss}
    ends = [_ends(cell.speedup) for cell in found if cell.speedup]
    low, high = min([0.9, *(a for a, _ in ends)]), max([1.1, *(b for _, b in ends)])
    span = high - low
    names = _names(found)
    for domain, axes in panels.items():
        own = [(c, c.speedup) for c in found if c.domain == domain and c.speedup]
        axes.axvline(1, color=theme.muted, linewidth=1)
        for cell, ratio in own:
            place = names.index(cell.contestant)
            color = colors.get(cell.verdict, none)
            axes.plot(_ends(ratio), [place, place], color=color, linewidth=2)
            axes.plot([ratio.value], [place], color=color, marker="o")
            text = _told(cell, ratio)
            axes.text(high + 0.06 * span, place, text, va="center", fontsize=7.5, color=theme.ink)
        axes.set_xlim(low - 0.05 * span, high + (0.06 + _WORDS) * span)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("times plain decoding")
    return figure


def acceptance(found: Sequence[Cell], words: str, theme: Theme) -> Any:
    """A row a drafter, a column a position; the share of drafts that kept it. Columns end at
    `_MOST_POSITIONS`; a table has the rest."""
    from matplotlib import colormaps

    figure, panels = _panels(found, "Kept at each position of a draft, %", words, theme)
    low, high = theme.ramp
    ramp: Any = colormaps["viridis"]
    names = _names(found)
    for domain, axes in panels.items():
        own = [cell for cell in found if cell.domain == domain]
        longest = max((len(cell.by_position) for cell in own), default=0)
        width = min(longest, _MOST_POSITIONS)
        for cell in own:
            place = names.index(cell.contestant)
            for i, share in enumerate(cell.by_position[:_MOST_POSITIONS]):
                if share is None:
                    continue
                color = ramp(low + (high - low) * share)
                axes.fill_between([i + 0.52, i + 1.48], place - 0.46, place + 0.46, color=color)
                axes.text(
                    *(i + 1, place, f"{100 * share:.0f}"),
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color=readable_on(color),
                )
        axes.set_xlim(0.4, max(width, 1) + 0.6)
        axes.set_xticks(range(1, width + 1), [str(i) for i in range(1, width + 1)])
        axes.grid(visible=False)
        axes.set_xlabel("position in the draft")
    return figure


FIGURES: Mapping[str, Callable[[Sequence[Cell], str, Theme], Any]] = {
    "speedup_by_drafter": speedup,
    "acceptance_by_position": acceptance,
}


def _panels(
    found: Sequence[Cell], title: str, words: str, theme: Theme
) -> tuple[Any, Mapping[str, Any]]:
    """A panel for each domain, with the drafters from top to bottom."""
    domains = [d for d in dict.fromkeys(cell.domain for cell in found) if d != EVERYTHING]
    names = _names(found)
    columns = _COLUMNS.get(len(domains), 3)
    rows = -(-len(domains) // columns)
    figure = new_figure(0.6 + rows * (_FRAME + _LINE * len(names)), title)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    every = [axes for row in grid for axes in row]
    for axes in every[len(domains) :]:
        axes.set_visible(False)
    panels = dict(zip(domains, every, strict=False))
    for domain, axes in panels.items():
        axes.set_title(domain, loc="left")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
    caption(figure, words, theme)
    return figure, panels


def _names(found: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.contestant for cell in found))


def _ends(ratio: Ratio) -> tuple[float, float]:
    """Where its interval begins and ends."""
    return ratio.low or ratio.value, ratio.high or ratio.value


def _told(cell: Cell, ratio: Ratio) -> str:
    parts = [f"{ratio.value:.2f}×"]
    if cell.tokens_per_round is not None:
        parts.append(f"{cell.tokens_per_round:.2f} t/r")
    if cell.draft_share is not None:
        parts.append(f"{100 * cell.draft_share:.0f} %")
    return " · ".join(parts)
