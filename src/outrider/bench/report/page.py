"""A report as one HTML file that needs nothing else: no request, no script, both themes.

The same report gives the same bytes: the page says when numbers were measured and not when it was
made. A figure that cannot be drawn from the values it was given is left out, and the part says so.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from outrider.bench import figure_style
from outrider.bench.figure_style import DARK, LIGHT, THEMES, save, themed
from outrider.bench.report.embed import Canvas, smaller
from outrider.bench.report.summary import summarise
from outrider.bench.report.template import MACROS, NIGHT, PAGE, STYLE
from outrider.bench.report.values import Figure, Part, Picture, Report, Table

TITLE = "Outrider: what was measured"
# What values that nobody expected can make a drawing do.
_UNDRAWABLE = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
_NUMBER = re.compile(r"[+-]?[\d.,]+×?( \([\d.]+ to [\d.]+\)| ± [\d.]+)?")
_UNSAFE = '/\\ :*?"<>|\0'


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure of a part: markup that has its title, and what it shows in words."""

    markup: Markup
    caption: str


@dataclass(frozen=True, slots=True)
class _Laid:
    """A table, and which of its columns hold numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str
    numeric: Sequence[bool]


@dataclass(frozen=True, slots=True)
class _PartPage:
    """A part with its figures drawn."""

    title: str
    place: str
    about: Sequence[str]
    warnings: Sequence[str]
    findings: Sequence[str]
    shown: Sequence[Shown]
    tables: Sequence[_Laid]
    origins: Sequence[object]


def render(report: Report, *, drawn: Callable[[Figure], None] = lambda _: None) -> str:
    """The page. `drawn` is told of every figure once it is there, for a progress bar."""
    canvas, summary = Canvas(), summarise(report)
    parts = [_drawn(part, canvas, drawn) for part in report.parts]
    page = (
        _environment()
        .get_template("page")
        .render(
            title=TITLE,
            summary=summary,
            overview=_laid(summary.table) if summary.table else None,
            parts=parts,
            skipped=report.skipped,
            style=_style(canvas),
            # Letters of a font that comes with the package.
            letters=Markup(canvas.letters()),  # nosec B704
        )
    )
    # Empty lines are what the template's own lines leave behind.
    return "".join(line + "\n" for line in page.split("\n") if line.strip())


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
            for theme in THEMES:
                try:
                    with themed(theme):
                        written += save(figure.draw(theme), place, _file_name(figure.name), theme)
                except _UNDRAWABLE:
                    break
    return written


def _drawn(part: Part, canvas: Canvas, drawn: Callable[[Figure], None]) -> _PartPage:
    shown: list[Shown] = []
    warnings = list(part.warnings)
    reason = figure_style.why_not()
    if reason is not None and part.figures:
        warnings.append(f"This page has {reason}.")
    for figure in part.figures if reason is None else ():
        try:
            # Drawn here; what records say in it is escaped by whoever draws.
            shown.append(Shown(Markup(canvas.embed(figure)), figure.alt))  # nosec B704
        except _UNDRAWABLE as error:
            warnings.append(f"{figure.title} cannot be drawn: {type(error).__name__}.")
        drawn(figure)
    shown += [_pictured(picture) for picture in part.pictures]
    return _PartPage(
        title=part.title,
        place=part.place,
        about=part.about,
        warnings=warnings,
        findings=part.findings,
        shown=shown,
        tables=[_laid(table) for table in part.tables],
        origins=[origin for origin in part.origins if origin.facts],
    )


def _pictured(picture: Picture) -> Shown:
    dark = picture.dark or picture.light
    images = [
        f'<img class="on-{name}" alt="{escape(picture.title, quote=True)}" '
        f'src="data:image/svg+xml;base64,{b64encode(smaller(data)).decode("ascii")}">'
        for name, data in (("light", picture.light), ("dark", dark))
    ]
    # Our tags around base64.
    return Shown(Markup("".join(images)), picture.alt)  # nosec B704


def _environment() -> Environment:
    macros = '{% from "macros" import warned, tabled %}'
    return Environment(
        loader=DictLoader({"page": macros + PAGE, "macros": MACROS}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _laid(table: Table) -> _Laid:
    columns = [[row[i] for row in table.rows] for i in range(len(table.header))]
    return _Laid(
        title=table.title,
        header=table.header,
        rows=table.rows,
        note=table.note,
        numeric=[_is_numeric(column) for column in columns],
    )


def _is_numeric(column: Sequence[str]) -> bool:
    """Whether it holds numbers, with their intervals, and nothing else."""
    found = [text for text in column if text not in ("", "-")]
    return bool(found) and all(_NUMBER.fullmatch(text) for text in found)


def _style(canvas: Canvas) -> Markup:
    night = NIGHT.replace("DARK", canvas.styles(DARK))
    # Colours of this package.
    return Markup(STYLE.replace("NIGHT", night).replace("LIGHT", canvas.styles(LIGHT)))  # nosec B704


def _file_name(name: str) -> str:
    """Without what would lead out of a folder."""
    return "".join("_" if char in _UNSAFE or ord(char) < 32 else char for char in name).lstrip(".")
