"""A page of results, written as Markdown or as one HTML file without scripts; and the page of a
run, round by round, whose script is part of it.

The templates are in templates/. The content of a page is text: HTML escapes it on insertion, for
any content of a results file, and shows pictures for light and for dark screens.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.api.rounds import asset, page_script, text_of
from outrider.measure.store import write_text

if TYPE_CHECKING:
    from jinja2 import Template

_NUMBER = re.compile(r"[+-]?[\d.,]+×?( \([\d.]+ to [\d.]+\)| ± [\d.]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture. `light` and `dark` are addresses: files in the page's folder, or the data
    themselves. `words` describe it, also for readers who cannot see it."""

    title: str
    light: str
    dark: str
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of a page, in this order, any part may be empty: paragraphs, warnings, a table, a
    list, pictures, sections one level down, and facts (a name and a value each) that are folded
    away. `source` is the origin of all of it."""

    title: str
    source: str = ""
    text: Sequence[str] = ()
    warnings: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    points: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    sections: Sequence[Section] = ()
    facts: Sequence[Sequence[tuple[str, str]]] = ()

    @property
    def numeric(self) -> list[bool]:
        """True for each column that holds only numbers, with their intervals."""
        return [_is_numeric([row[i] for row in self.rows]) for i in range(len(self.header))]


@dataclass(frozen=True, slots=True)
class Page:
    """A page. If it is `whole`, it contains its pictures, so that its policy allows no requests,
    and lists its sections after the first, the summary."""

    title: str
    sections: Sequence[Section]
    whole: bool = False


def number(value: float | None, digits: int) -> str:
    """A number as a cell of a table."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """A percentage as a cell of a table."""
    return "-" if share is None else f"{100 * share:.1f}"


def plain_table(title: str, records: Sequence[Mapping[str, Any]], *, note: str = "") -> Section:
    """A table with a row per object, and a column per field that never holds a list or object."""
    names = list(dict.fromkeys(name for record in records for name in record))
    plain = [
        name for name in names if not any(isinstance(r.get(name), dict | list) for r in records)
    ]
    return Section(
        title=title,
        text=[note] if note else [],
        header=[name.replace("_", " ") for name in plain],
        rows=[[shown(record.get(name)) for name in plain] for record in records],
    )


def shown(value: object) -> str:
    """A value of a results file as a cell of a table: numbers short, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return str(value)


def write_page(folder: Path, page: Page) -> None:
    """Write `report.md` and `report.html`."""
    write_text(folder / "report.md", markdown(page))
    write_text(folder / "report.html", html(page))


def markdown(page: Page) -> str:
    return _template("page.md.j2").render(page=page)


def html(page: Page) -> str:
    return _template("page.html.j2").render(page=page)


def run_page(title: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """The page of runs, as `run_of` gives them, round by round: one file whose policy allows no
    requests, and allows its one script by its hash."""
    script = page_script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _template("run.html.j2").render(
        page=Page(title, (), whole=True),
        policy=f"sha256-{digest}",
        style=asset("rounds.css"),
        script=script,
        runs=list(runs),
        texts=[(run, text_of(run)) for run in runs],
    )


def _is_numeric(column: Sequence[str]) -> bool:
    found = [text for text in column if text not in ("", "-")]
    return bool(found) and all(_NUMBER.fullmatch(text) for text in found)


@cache
def _template(name: str) -> Template:
    # Many modules import this one only to format numbers.
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("outrider.measure"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)
