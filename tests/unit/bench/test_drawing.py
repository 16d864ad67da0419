"""Charts: every kind of panel can be drawn, light and dark, the same bytes from the same data."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from doubles.sweeps import folder_of, numbers, sample, small_sweep
from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench import drawing
from outrider_lab.bench.charts import (
    Axis,
    Bars,
    Chart,
    Dots,
    JobBar,
    Line,
    Lines,
    Square,
    Squares,
    TimelineChart,
    dot_of,
    rows_of,
    span_of,
)
from outrider_lab.bench.drawing import DARK, LIGHT, altair_chart, readable_on, svg, why_not, write
from outrider_lab.bench.figures import FIGURES, charts, gather

needs_altair = pytest.mark.skipif(why_not() is not None, reason="altair is not installed")
GAIN = Ratio(2.0, 1.5, 2.5, 9)
KINDS = [
    Lines(
        title="A $title_{of",
        lines=[
            Line(
                name="measured",
                points=[(1, 1), (8, 3)],
                spans=[(1, 2), (2, 4)],
                color=0,
                mark=0,
            ),
            Line(points=[(1, 1), (8, 2)], color="muted", dash="--", steps=True, texts=["a", "b"]),
            Line(name="empty", points=[], color=1),
        ],
        levels=[("plain decoding", 1.0)],
        band=[(1, 0.5, 1.5), (8, 6, 10)],
        x=Axis(low=1, high=8, scale="log"),
    ),
    Bars(parts=[("a", 0, [1.0, 2.0]), ("b", "draft", [0.5, 0.0])], x=Axis(ticks=["x", "y"])),
    Dots(names=["a", "b"], dots=[dot_of("a", GAIN, "2.00×"), None], x=Axis(label="times")),
    Squares(
        rows=["a"],
        columns=["1", "2", "3"],
        squares=[[Square(value=-1, text="0.5", small="0.4 to 0.6"), Square(value=None, text="-")]],
        diverging=True,
    ),
    TimelineChart(
        rows=["lane"], jobs=[JobBar(row=0, span=(0, 2), color=0.5, name="draft", edged=True)]
    ),
]


@needs_altair
@pytest.mark.slow
def test_every_kind_of_panel_is_drawn_light_and_dark_with_its_letters_as_text() -> None:
    chart = Chart(title="All kinds", panels=rows_of(KINDS, 3), foot="small print", height=6.0)
    light, dark = svg(chart, LIGHT), svg(chart, DARK)
    assert svg(chart, LIGHT) == light
    words = "".join(ElementTree.fromstring(light).itertext())
    for text in ("All kinds", "A $title_{of", "measured", "plain decoding", "2.00×", "0.4 to 0.6"):
        assert text in words
    assert "empty" not in words
    for picture, own, other in ((light, LIGHT, DARK), (dark, DARK, LIGHT)):
        assert own.named["page"].encode() in picture
        assert other.named["ink"].encode() not in picture


@needs_altair
@pytest.mark.slow
def test_files_written_again_are_the_same_bytes(tmp_path: Path) -> None:
    chart = Chart(title="One", panels=[KINDS[1:2]])
    first = {path: path.read_bytes() for path in write(chart, tmp_path, "one")}
    names = ["one.svg", "one.png", "one-dark.svg", "one-dark.png"]
    assert [path.name for path in first] == names
    assert {path: path.read_bytes() for path in write(chart, tmp_path, "one")} == first


@needs_altair
@pytest.mark.slow
def test_a_sweep_in_which_everything_failed_is_drawn_empty(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, sample(0, 0, None, reason="x"), sample(2, 0, None, reason="x"))
    (pair,) = gather(folder)
    for chart in charts(pair).values():
        svg(chart, LIGHT)


def test_a_sweep_by_k_has_all_its_figures_and_plain_decoding_alone_three(tmp_path: Path) -> None:
    (pair,) = gather(small_sweep(tmp_path / "k"))
    assert list(charts(pair)) == list(FIGURES)
    (plain,) = gather(folder_of(tmp_path / "plain", sample(0, 0, numbers(0, 1.0))))
    assert set(charts(plain)) == {"throughput_vs_k", "latency_cdf", "time_breakdown"}


def test_an_interval_that_does_not_hold_its_ratio_is_stretched_to_it() -> None:
    assert span_of(GAIN) == (1.5, 2.5)
    assert span_of(Ratio(2.0, 2.1, 2.5, 9)) == (2.0, 2.5)
    assert span_of(Ratio(2.0, None, None, 2)) == (2.0, 2.0)


def no_module(_: str) -> None:
    """Stands for `find_spec` where nothing is installed."""


def test_missing_altair_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "find_spec", no_module)
    assert "pip install 'altair<" in str(why_not())


def test_ink_is_chosen_by_what_it_stands_on() -> None:
    assert readable_on("#ffffff") == "#000000"
    assert readable_on("#001a66") == "#ffffff"


def test_colours_lie_between_those_of_a_ramp() -> None:
    assert LIGHT.color(0.0) == "#440154"
    assert DARK.color(1.0) == "#fde725"
    # A quarter of the way from the middle, white, to the gain.
    half = LIGHT.shade(0.25, diverging=True)
    assert half == "#b6d4e5"
    assert LIGHT.shade(None, diverging=True) == LIGHT.named["page"]


@needs_altair
def test_an_axis_keeps_the_ends_that_it_was_given() -> None:
    """Of a free end Vega finds a round number; a picture of nothing has axes all the same."""
    given = Lines(lines=[Line(points=[(3, 40)], color=0)], x=Axis(low=1, high=8), y=Axis(low=0))
    chart = altair_chart(Chart(title="One", panels=[[given, Lines(lines=[])]]))
    measured, empty = chart.to_dict()["concat"]
    x, y = (measured["layer"][0]["encoding"][name]["scale"] for name in "xy")
    assert (x["domainMin"], x["domainMax"], x["nice"]) == (1, 8, False)
    assert (y["domainMin"], y["nice"]) == (0, True)
    assert len(empty["layer"]) == 1
