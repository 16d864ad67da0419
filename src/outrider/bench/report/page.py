"""A report as one HTML file that needs nothing else: no request, no script, both themes.

The same report gives the same bytes: the page says when numbers were measured and not when it was
made. A figure that cannot be drawn from the values it was given is left out, and the part says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.bench import drawing
from outrider.bench.drawing import THEMES
from outrider.bench.pages import Page, Picture, Section, html
from outrider.bench.report.parts import Figure, Part, Report
from outrider.bench.report.reading import picture
from outrider.bench.report.summary import summarise

TITLE = "Outrider: what was measured"
# What values that nobody expected can make a drawing do.
_UNDRAWABLE = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
_UNSAFE = '/\\ :*?"<>|\0'


def render(report: Report, *, drawn: Callable[[Figure], None] = lambda _: None) -> str:
    """The page. `drawn` is told of every figure once it is there, for a progress bar."""
    sections = [_summary(report), *(_section(part, drawn) for part in report.parts)]
    if report.skipped:
        rows = [(item.place, item.why) for item in report.skipped]
        sections.append(Section(title="Skipped", header=("file", "why"), rows=rows))
    return html(Page(TITLE, sections, whole=True))


def num_figures(report: Report) -> int:
    """How many `render` draws."""
    return sum(len(part.figures) for part in report.parts)


def write_figures(report: Report, folder: Path) -> list[Path]:
    """Every figure as SVG and PNG, for light and for dark pages, in a folder a part. What cannot be
    drawn is left out, as from the page."""
    written: list[Path] = []
    for number, part in enumerate(report.parts, start=1):
        place = folder / f"{number:02d}-{part.kind.replace(' ', '-')}"
        for figure in part.figures:
            try:
                written += drawing.write(figure.chart, place, _file_name(figure.name))
            except _UNDRAWABLE:
                continue
    return written


def _summary(report: Report) -> Section:
    found = summarise(report)
    inner = [
        Section(title="Where speculation gains", points=found.gains),
        Section(title="Where speculation loses", points=found.losses),
    ]
    return Section(
        title="Summary",
        text=[" ".join(found.sentences)],
        warnings=found.warnings,
        sections=[*(one for one in inner if one.points), *([found.table] if found.table else [])],
    )


def _section(part: Part, drawn: Callable[[Figure], None]) -> Section:
    pictures: list[Picture] = []
    warnings = list(part.warnings)
    reason = drawing.why_not()
    if reason is not None and part.figures:
        warnings.append(f"This page has {reason}.")
    for figure in part.figures if reason is None else ():
        try:
            light, dark = (drawing.svg(figure.chart, theme) for theme in THEMES)
            pictures.append(picture(figure.chart.title, light, dark, figure.words))
        except _UNDRAWABLE as error:
            warnings.append(f"{figure.chart.title} cannot be drawn: {type(error).__name__}.")
        drawn(figure)
    return Section(
        title=part.title,
        place=part.place,
        text=part.about,
        warnings=warnings,
        points=part.findings,
        pictures=[*pictures, *part.pictures],
        sections=part.tables,
        facts=[origin.facts for origin in part.origins if origin.facts],
    )


def _file_name(name: str) -> str:
    """Without what would lead out of a folder."""
    return "".join("_" if char in _UNSAFE or ord(char) < 32 else char for char in name).lstrip(".")
