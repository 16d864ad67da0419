"""The page of a report: one file, no request, no script, all escaped, the same bytes again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from checks.html import read
from doubles import report_results
from doubles.sweeps import small_sweep
from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench import drawing
from outrider_lab.bench.charts import Axis, Chart, Line, Lines
from outrider_lab.bench.drawing import LIGHT, Theme
from outrider_lab.bench.report.build import build
from outrider_lab.bench.report.page import render, write_figures
from outrider_lab.bench.report.parts import Claim, Figure, Origin, Part, Report, Skipped, picture
from outrider_lab.measure.store import Section

HOSTILE = '<script>alert("1")</script>\'"&{{ 7 * 7 }}{% raw %}'


def no_module(_: str) -> None:
    """Stands for `find_spec` where nothing is installed."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time; what it would give is known."""

    def svg(_: Chart, theme: Theme) -> bytes:
        return f"<svg>{theme.suffix}</svg>".encode()

    monkeypatch.setattr(drawing, "svg", svg)


def figure(name: str = "f", *, words: str = "what it shows") -> Figure:
    return Figure(name=name, chart=Chart(title=f"Title of {name}", panels=[]), words=words)


def part(**changes: Any) -> Part:
    given: dict[str, Any] = {"kind": "k", "title": "A part", "place": "a/b", "about": ["about"]}
    return Part(**(given | changes))


def hostile() -> Report:
    table = Section(title=HOSTILE, header=[HOSTILE], rows=[[HOSTILE]], text=[HOSTILE])
    ratio = Ratio(0.5, 0.4, 0.6, 9)
    origin = Origin(facts=[(HOSTILE, HOSTILE)], machine=HOSTILE, commit=HOSTILE, dirty=True)
    claim = Claim(kind="speculation", where=HOSTILE, against=HOSTILE, ratio=ratio)
    stored = picture(HOSTILE, HOSTILE.encode(), HOSTILE.encode(), HOSTILE)
    whole = part(
        kind=HOSTILE,
        title=HOSTILE,
        place=HOSTILE,
        about=[HOSTILE],
        findings=[HOSTILE],
        claims=[claim],
        figures=[figure(HOSTILE, words=HOSTILE)],
        pictures=[stored],
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


@pytest.mark.usefixtures("quick")
def test_a_page_can_be_read_without_seeing_it() -> None:
    table = Section(title="t", header=["a"], rows=[["1"]])
    found = read(render(Report([part(figures=[figure()], tables=[table])], [])))
    light, dark = found.all("img")
    assert light["alt"] == dark["alt"] == "Title of f"
    assert "what it shows" in found.text
    assert {th["scope"] for th in found.all("th")} == {"col", "row"}
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


def test_a_figure_that_cannot_be_drawn_is_a_warning() -> None:
    panel = Lines(lines=[Line(points=[(1, 1)], color="no such")], x=Axis())
    broken = Figure(name="b", chart=Chart(title="Broken", panels=[[panel]]), words="b")
    text = render(Report([part(figures=[broken])], []))
    assert "Broken cannot be drawn: KeyError." in text
    assert "<figure>" not in text


def test_without_altair_a_page_has_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "find_spec", no_module)
    table = Section(title="t", header=["a"], rows=[["1"]])
    text = render(Report([part(figures=[figure()], tables=[table])], []))
    assert "altair is not installed" in text
    assert "<td" in text or 'scope="row"' in text


def test_figures_are_written_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_: object, folder: Path, name: str) -> list[Path]:
        return [folder / f"{name}.svg"]

    monkeypatch.setattr(drawing, "write", write)
    (path,) = write_figures(Report([part(figures=[figure("../../up")])], []), tmp_path)
    assert path.relative_to(tmp_path).as_posix() == "01-k/_.._up.svg"


@pytest.mark.slow
def test_every_figure_of_every_kind_can_be_drawn(tmp_path: Path) -> None:
    found = build([report_results.everything(tmp_path)])
    figures = [figure for part in found.parts for figure in part.figures]
    assert len(figures) >= 20
    for one in figures:
        assert one.chart.title
        assert one.words
        drawing.svg(one.chart, LIGHT)
