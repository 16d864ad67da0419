"""How our figures look, and how they are written so that the same numbers give the same bytes.

Every figure exists for light and for dark pages. Hues are those of Okabe and Ito, which people with
the common kinds of colour blindness tell apart; K is an ordered quantity, so its colours are steps
of one ramp (viridis), and plain decoding is grey. Words stand at what they name where that is
possible. No date, no random identifier and no installed font enters a file.

matplotlib is an optional dependency and has no complete types; only the figure modules touch it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WIDTH_INCHES = 9.0
_DPI = 144


def why_not() -> str | None:
    """Why no figure can be drawn here, or None."""
    if find_spec("matplotlib") is None:
        return "no figures: matplotlib is not installed (pip install 'outrider[bench]')"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of one kind of page. `ramp` is the stretch of viridis that is readable on it;
    `diverging` runs from a loss over no change to a gain."""

    suffix: str
    page: str
    ink: str
    muted: str
    faint: str
    hues: tuple[str, ...]
    ramp: tuple[float, float]
    stages: Mapping[str, str]
    diverging: tuple[str, str, str]

    def of_k(self, ks: Sequence[int]) -> dict[int, Any]:
        """A colour for each K; 0 is grey."""
        from matplotlib import colormaps

        low, high = self.ramp
        drafted = [k for k in ks if k]
        steps = max(len(drafted) - 1, 1)
        ramp = colormaps["viridis"]
        found = {k: ramp(low + (high - low) * i / steps) for i, k in enumerate(drafted)}
        return {0: self.muted, **found}


LIGHT = Theme(
    suffix="",
    page="#ffffff",
    ink="#1f2328",
    muted="#6e7781",
    faint="#e3e6ea",
    hues=("#0072b2", "#d55e00", "#008060", "#a8457e", "#7a6a00", "#444444"),
    ramp=(0.0, 0.72),
    stages={"draft": "#e69f00", "target": "#0072b2", "accept": "#009e73", "other": "#7d8790"},
    diverging=("#d55e00", "#f3f4f6", "#0072b2"),
)
DARK = Theme(
    suffix="-dark",
    page="#0d1117",
    ink="#e6edf3",
    muted="#9198a1",
    faint="#2a313a",
    hues=("#56b4e9", "#f0883e", "#2bcb9c", "#e79bc4", "#f0e442", "#c9d1d9"),
    ramp=(0.42, 1.0),
    stages={"draft": "#f0b43c", "target": "#56b4e9", "accept": "#2bcb9c", "other": "#8b949e"},
    diverging=("#c2540a", "#22272e", "#2f81c7"),
)
THEMES = (LIGHT, DARK)


@contextmanager
def themed(theme: Theme) -> Generator[None]:
    """matplotlib's settings while a figure is drawn and saved."""
    matplotlib: Any = import_module("matplotlib")
    with matplotlib.rc_context(
        {
            "svg.hashsalt": "outrider",
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "text.color": theme.ink,
            "axes.labelcolor": theme.ink,
            "axes.edgecolor": theme.muted,
            "axes.facecolor": theme.page,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlecolor": theme.ink,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "grid.color": theme.faint,
            "grid.linewidth": 0.8,
            "xtick.color": theme.muted,
            "ytick.color": theme.muted,
            "xtick.labelcolor": theme.ink,
            "ytick.labelcolor": theme.ink,
            "xtick.bottom": False,
            "ytick.left": False,
            "figure.facecolor": theme.page,
            "savefig.facecolor": theme.page,
            "lines.linewidth": 1.8,
            "lines.markersize": 5.5,
            "errorbar.capsize": 3,
        }
    ):
        yield


def new_figure(height: float, title: str) -> Any:
    """A figure that lays itself out, with its title at the left."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def caption(figure: Any, text: str, theme: Theme) -> None:
    """Small print at the foot."""
    figure.supxlabel(text, fontsize=7.5, color=theme.muted, x=0.01, ha="left")


def save(figure: Any, folder: Path, name: str, theme: Theme) -> list[Path]:
    """SVG for pages and PNG for everything else."""
    folder.mkdir(parents=True, exist_ok=True)
    # Laid out once for both files; it is the slowest part.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    svg, png = (folder / f"{name}{theme.suffix}.{kind}" for kind in ("svg", "png"))
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    figure.savefig(png, dpi=_DPI, metadata={"Software": None})
    return [svg, png]


def readable_on(color: Sequence[float]) -> str:
    """Black or white, whichever stands out from an RGB colour (relative luminance, WCAG 2)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


def spread_out(places: Sequence[float], gap: float) -> list[float]:
    """`places` moved as little as keeps neighbours `gap` apart, for labels that would overlap."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = [places[i] for i in order]
    for _ in range(50):
        for i in range(len(moved) - 1):
            lack = gap - (moved[i + 1] - moved[i])
            if lack > 0:
                moved[i] -= lack / 2
                moved[i + 1] += lack / 2
    found = [0.0] * len(places)
    for place, i in zip(moved, order, strict=True):
        found[i] = place
    return found
