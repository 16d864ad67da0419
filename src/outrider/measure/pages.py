"""A page of results, said once and written as Markdown or as one HTML file without scripts; and the
page of a run, round by round, whose script is part of it.

The templates are in templates/. What a page says is text: HTML escapes it where it is put in,
whatever a results file held, and shows pictures for light and for dark screens.
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
    """`light` and `dark` are addresses: files beside the page, or the data themselves. `words` say
    what it shows, for those who cannot see it too."""

    title: str
    light: str
    dark: str
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """In this order, and any may be empty: paragraphs, warnings, a table, a list, pictures,
    sections one level down, and facts (a name and a value each) that are folded away. `place` is
    where all of it comes from."""

    title: str
    place: str = ""
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
        """Which columns hold numbers, with their intervals, and nothing else."""
        return [_is_numeric([row[i] for row in self.rows]) for i in range(len(self.header))]


@dataclass(frozen=True, slots=True)
class Page:
    """One that is `whole` has its pictures in itself, so its policy lets nothing be fetched, and
    lists its sections after the first, the summary."""

    title: str
    sections: Sequence[Section]
    whole: bool = False


def number(value: float | None, digits: int) -> str:
    """As a cell of a table."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """As a cell of a table."""
    return "-" if share is None else f"{100 * share:.1f}"


def plain_table(title: str, records: Sequence[Mapping[str, Any]], *, note: str = "") -> Section:
    """A row an object, a column a field that holds one value in any of them."""
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
    """A value of a results file in a cell of a table: numbers short, nothing as a dash."""
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
    """As `report.md` and `report.html`."""
    write_text(folder / "report.md", markdown(page))
    write_text(folder / "report.html", html(page))


def markdown(page: Page) -> str:
    return _template("page.md.j2").render(page=page)


def html(page: Page) -> str:
    return _template("page.html.j2").render(page=page)


def run_page(title: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Runs as `run_of` gives them, round by round: one file whose policy lets nothing be fetched,
    and whose one script is named in it by its hash."""
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
    # Many read this module for its numbers alone.
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
