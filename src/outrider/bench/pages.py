"""A page of results, said once and written as Markdown or as one HTML file without scripts.

Tables have text in their cells. Pictures are named by their file without `-dark`; where a page can,
it shows the dark one on dark screens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from outrider.bench.store import write_text

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --muted: #6e7781; }
@media (prefers-color-scheme: dark) { :root { --line: #30363d; --muted: #9198a1; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; }
th { color: var(--muted); font-weight: 600; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; }
img { max-width: 100%; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Paragraphs, then a table, then a list, then pictures (title and path); any may be empty."""

    title: str
    text: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    points: Sequence[str] = ()
    pictures: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    sections: Sequence[Section]


def number(value: float | None, digits: int) -> str:
    """As a cell of a table."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """As a cell of a table."""
    return "-" if share is None else f"{100 * share:.1f}"


def write_page(folder: Path, page: Page) -> None:
    """As `report.md` and `report.html`."""
    write_text(folder / "report.md", markdown(page))
    write_text(folder / "report.html", html(page))


def markdown(page: Page) -> str:
    blocks = [f"# {page.title}"]
    for section in page.sections:
        blocks += [f"## {section.title}", *section.text]
        if section.rows:
            blocks.append("\n".join(_markdown_table(section)))
        if section.points:
            blocks.append("\n".join(f"- {point}" for point in section.points))
        blocks += [f"![{title}]({path})" for title, path in section.pictures]
    return "\n\n".join(blocks) + "\n"


def html(page: Page) -> str:
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(page.title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(page.title)}</h1>",
            *(line for section in page.sections for line in _html_section(section)),
            "</body></html>",
            "",
        ]
    )


def _markdown_table(section: Section) -> Iterator[str]:
    yield _markdown_row(section.header)
    yield _markdown_row(["---", *["--:"] * (len(section.header) - 1)])
    yield from map(_markdown_row, section.rows)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _html_section(section: Section) -> Iterator[str]:
    yield f"<h2>{escape(section.title)}</h2>"
    for paragraph in section.text:
        yield f"<p>{escape(paragraph)}</p>"
    if section.rows:
        yield "<table><thead>" + _html_row(section.header, "th") + "</thead><tbody>"
        yield from (_html_row(row, "td") for row in section.rows)
        yield "</tbody></table>"
    if section.points:
        yield "<ul>"
        yield from (f"<li>{escape(point)}</li>" for point in section.points)
        yield "</ul>"
    for title, path in section.pictures:
        stem, dot, kind = path.rpartition(".")
        dark = escape(f"{stem}-dark{dot}{kind}", quote=True)
        yield (
            f'<picture><source srcset="{dark}" media="(prefers-color-scheme: dark)">'
            f'<img src="{escape(path, quote=True)}" alt="{escape(title, quote=True)}"></picture>'
        )


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
