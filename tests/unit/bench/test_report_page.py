"""The page of a report: one file, no request, no script, all escaped, the same bytes again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from doubles import report_results
from doubles.sweeps import small_sweep
from outrider.bench import figure_style
from outrider.bench.figure_style import DARK, LIGHT, Theme, new_figure
from outrider.bench.frame import Ratio
from outrider.bench.report import embed, page
from outrider.bench.report.build import build
from outrider.bench.report.embed import Canvas
from outrider.bench.report.page import num_figures, render, write_figures
from outrider.bench.report.values import (
    Claim,
    Figure,
    Origin,
    Part,
    Picture,
    Report,
    Skipped,
    Table,
)

HOSTILE = '<script>alert("1")</script>\'"&{{ 7 * 7 }}{% raw %}'
VOID = {"meta", "input", "img", "br", "link"}


class Reading(HTMLParser):
    """What a page has; unbalanced elements fail."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.seen if name == tag]


def read(text: str) -> Reading:
    found = Reading()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


def picture_of(theme: Theme, extra: str = "") -> str:
    """As matplotlib writes one, with what an embedded one must not keep."""
    return (
        '<?xml version="1.0"?>\n<!DOCTYPE svg PUBLIC "x" "http://www.w3.org/svg11.dtd">\n'
        '<svg xmlns:xlink="http://www.w3.org/1999/xlink" width="648pt" '
        'viewBox="0 0 648 200" xmlns="http://www.w3.org/2000/svg">\n'
        "<metadata><x>http://purl.org</x></metadata>\n"
        '<defs><style type="text/css">*{stroke-linejoin: round}</style></defs>\n'
        f'<g id="patch_1"><path d="M 1.23456 2.5" clip-path="url(#clip{theme.suffix})" '
        f'style="fill: {theme.page}; stroke: #abcdef"/></g>\n'
        '<!-- words --><g transform="scale(0.075 -0.075)"><defs>'
        '<path id="DejaVuSans-41" d="M 1 1" transform="scale(0.015625)"/></defs>'
        f'<use xlink:href="#DejaVuSans-41" style="fill: {theme.ink}"/></g>{extra}\n'
        f'<defs><clipPath id="clip{theme.suffix}"><rect/></clipPath></defs></svg>\n'
    )


def known(_: Figure, theme: Theme) -> str:
    return picture_of(theme)


def no_module(_: str) -> None:
    """Stands for `find_spec` where nothing is installed."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time; what it would give is known."""

    monkeypatch.setattr(embed, "drawn", known)


def figure(name: str = "f", *, alt: str = "what it shows") -> Figure:
    return Figure(name=name, title=f"Title of {name}", alt=alt, draw=lambda theme: theme)


def part(**changes: Any) -> Part:
    given: dict[str, Any] = {"kind": "k", "title": "A part", "place": "a/b", "about": ["about"]}
    return Part(**(given | changes))


def hostile() -> Report:
    table = Table(title=HOSTILE, header=[HOSTILE], rows=[[HOSTILE]], note=HOSTILE)
    ratio = Ratio(0.5, 0.4, 0.6, 9)
    origin = Origin(facts=[(HOSTILE, HOSTILE)], machine=HOSTILE, commit=HOSTILE, dirty=True)
    claim = Claim(kind="speculation", where=HOSTILE, against=HOSTILE, ratio=ratio)
    picture = Picture(title=HOSTILE, alt=HOSTILE, light=HOSTILE.encode(), dark=None)
    whole = part(
        kind=HOSTILE,
        title=HOSTILE,
        place=HOSTILE,
        about=[HOSTILE],
        findings=[HOSTILE],
        claims=[claim],
        figures=[figure(HOSTILE, alt=HOSTILE)],
        pictures=[picture],
        tables=[table],
        warnings=[HOSTILE],
        origins=[origin],
    )
    return Report([whole], [Skipped(HOSTILE, HOSTILE)])


@pytest.mark.usefixtures("quick")
def test_what_results_say_is_text_and_never_markup() -> None:
    text = render(hostile())
    found = read(text)
    assert not found.all("script")
    assert "<script" not in text
    assert "49" not in "".join(found.text)
    assert "".join(found.text).count(HOSTILE) >= 10
    assert not [name for _, attributes in found.seen for name in attributes if name[:2] == "on"]


@pytest.mark.usefixtures("quick")
def test_a_page_needs_nothing_else() -> None:
    text = render(hostile())
    found = read(text)
    assert not re.search(r"https?://", text)
    assert not found.all("link")
    policy = next(m for m in found.all("meta") if m.get("http-equiv"))["content"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert all(
        str(image["src"]).startswith("data:image/svg+xml;base64,") for image in found.all("img")
    )
    assert all(str(use["href"])[0] == "#" for use in found.all("use"))


@pytest.mark.usefixtures("quick")
def test_a_page_can_be_read_without_seeing_it() -> None:
    report = Report(
        [part(figures=[figure()], tables=[Table(title="t", header=["a"], rows=[["1"]])])], []
    )
    found = read(render(report))
    (_, svg) = found.all("svg")
    assert (svg["role"], svg["aria-label"]) == ("img", "Title of f")
    assert "what it shows" in found.text
    assert len(found.all("figcaption")) == 1
    assert {th["scope"] for th in found.all("th")} == {"col", "row"}
    assert len(found.all("caption")) == 1
    assert found.all("html") == [{"lang": "en"}]
    names = {attributes["id"] for _, attributes in found.seen if "id" in attributes}
    assert all(str(a["href"])[1:] in names for a in found.all("a"))
    assert all(s["aria-labelledby"] in names for s in found.all("section"))


@pytest.mark.usefixtures("quick")
def test_the_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    small_sweep(tmp_path)
    first = render(build([tmp_path]))
    assert render(build([tmp_path])) == first
    found = read(first)
    ids = [str(attributes["id"]) for _, attributes in found.seen if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.usefixtures("quick")
def test_one_drawing_serves_both_themes() -> None:
    canvas = Canvas()
    text = canvas.embed(figure()) + canvas.embed(figure())
    assert text.count("<svg") == 2
    assert text.count("var(--c0)") == text.count("var(--c1)") == 2
    assert canvas.styles(LIGHT) == f"--c0: {LIGHT.page}; --c1: {LIGHT.ink};"
    assert canvas.styles(DARK) == f"--c0: {DARK.page}; --c1: {DARK.ink};"
    assert "#abcdef" in text
    assert canvas.letters().count("<path") == 1
    assert "metadata" not in text
    assert "words" not in text
    assert "M 1.23 2.5" in text
    assert "scale(0.075 -0.075)" in text


def test_drawings_that_differ_in_more_than_colours_are_both_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drawn(_: Figure, theme: Theme) -> str:
        return picture_of(theme, f'<image width="{len(theme.suffix)}"/>')

    monkeypatch.setattr(embed, "drawn", drawn)
    text = Canvas().embed(figure())
    assert text.count("<svg") == 2
    assert 'class="on-light"' in text
    assert 'class="on-dark"' in text
    assert len(set(re.findall(r'id="([^"]+)"', text))) == 2


def test_a_figure_that_cannot_be_drawn_is_a_warning() -> None:
    def fails(_: Theme) -> Any:
        raise ZeroDivisionError

    broken = Figure(name="b", title="Broken", alt="b", draw=fails)
    text = render(Report([part(figures=[broken])], []))
    assert "Broken cannot be drawn: ZeroDivisionError." in text
    assert "<figure>" not in text


def test_without_matplotlib_a_page_has_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_style, "find_spec", no_module)
    table = Table(title="t", header=["a"], rows=[["1"]])
    text = render(Report([part(figures=[figure()], tables=[table])], []))
    assert "matplotlib is not installed" in text
    assert "<td" in text or 'scope="row"' in text


def test_every_figure_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "drawn", known)
    report = Report([part(figures=[figure("a"), figure("b")])], [])
    told: list[str] = []
    render(report, drawn=lambda one: told.append(one.name))
    assert told == ["a", "b"]
    assert num_figures(report) == 2


def test_figures_are_written_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(_: object, folder: Path, name: str, theme: Theme) -> list[Path]:
        return [folder / f"{name}{theme.suffix}.svg"]

    monkeypatch.setattr(page, "save", save)
    found = write_figures(Report([part(figures=[figure("../../up")])], []), tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in found] == [
        "01-k/_.._up.svg",
        "01-k/_.._up-dark.svg",
    ]


def every_figure(tmp_path: Path) -> Iterator[Figure]:
    found = build([report_results.everything(tmp_path)])
    for one in found.parts:
        yield from one.figures


@pytest.mark.slow
def test_every_figure_of_every_kind_can_be_drawn(tmp_path: Path) -> None:
    """Of the kinds that no other test draws, with no rendering, which takes most of the time."""
    own = [
        f for f in every_figure(tmp_path) if "report" in getattr(f.draw, "func", f.draw).__module__
    ]
    assert len(own) >= 14
    for one in own:
        one.draw(LIGHT)


@pytest.mark.slow
def test_a_real_figure_is_embedded_once_for_both_themes() -> None:
    def draw(theme: Theme) -> Any:
        drawing = new_figure(2.0, "A $title_{of")
        axes = drawing.subplots()
        axes.plot([0, 1], [0, 1], color=theme.hues[0], marker="o")
        return drawing

    canvas = Canvas()
    one = Figure(name="a", title="a", alt="a", draw=draw)
    text = canvas.embed(one)
    assert text.count("<svg") == 1
    assert "var(--c" in text
    assert Canvas().embed(one) == text
    assert len(text) < 30_000
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    made = set(re.findall(r'\bid="([^"]+)"', text + canvas.letters()))
    assert used <= made
    assert not re.search(r"https?://", text)
