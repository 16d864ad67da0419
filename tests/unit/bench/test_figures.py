"""Figures: all of them, for both kinds of page, the same bytes from the same samples."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.sweeps import folder_of, numbers, sample, small_sweep
from outrider.bench import figure_style, figures
from outrider.bench.figure_panels import gather
from outrider.bench.figure_style import (
    LIGHT,
    THEMES,
    Theme,
    readable_on,
    spread_out,
    themed,
    why_not,
)
from outrider.bench.figures import FIGURES, draw_all
from outrider.bench.studies.sweep_record import ResultsFolder


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what would be saved; laying out and rendering take most of the time."""
    names: list[str] = []

    def save(_: object, folder: Path, name: str, theme: Theme) -> list[Path]:
        names.append(name + theme.suffix)
        return [folder / names[-1]]

    monkeypatch.setattr(figures, "save", save)
    return names


def test_every_figure_is_drawn_for_both_kinds_of_page(tmp_path: Path, saved: list[str]) -> None:
    draw_all(small_sweep(tmp_path))
    assert saved == [f"{name}{theme.suffix}" for name in FIGURES for theme in THEMES]


def test_plain_decoding_alone_has_the_figures_that_say_something(
    tmp_path: Path, saved: list[str]
) -> None:
    draw_all(folder_of(tmp_path, sample(0, 0, numbers(0, 1.0))))
    names = {name.removesuffix("-dark") for name in saved}
    assert names == {"throughput_vs_k", "latency_cdf", "time_breakdown"}


@pytest.mark.slow
def test_figures_drawn_again_are_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "FIGURES", {"acceptance_vs_k": FIGURES["acceptance_vs_k"]})
    first = {path: path.read_bytes() for path in draw_all(small_sweep(tmp_path))}
    assert {path.name for path in first} == {
        f"acceptance_vs_k{theme}.{kind}" for theme in ("", "-dark") for kind in ("svg", "png")
    }
    again = {path: path.read_bytes() for path in draw_all(ResultsFolder.read(tmp_path))}
    assert again == first


@pytest.mark.parametrize("name", FIGURES)
def test_a_sweep_in_which_everything_failed_is_drawn_empty(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, sample(0, 0, None, reason="x"), sample(2, 0, None, reason="x"))
    (pair,) = gather(folder)
    with themed(LIGHT):
        FIGURES[name](pair, LIGHT).draw_without_rendering()


def no_module(_: str) -> None:
    """Stands for `find_spec` where nothing is installed."""


def test_missing_matplotlib_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not() is None
    monkeypatch.setattr(figure_style, "find_spec", no_module)
    assert "outrider[bench]" in str(why_not())


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_labels_are_moved_apart_in_their_order(places: list[float]) -> None:
    moved = spread_out(places, 5.0)
    order = sorted(range(len(places)), key=lambda i: places[i])
    assert all(moved[b] - moved[a] > 4.5 for a, b in pairwise(order))
    if all(places[b] - places[a] >= 5 for a, b in pairwise(order)):
        assert moved == places


def test_ink_is_chosen_by_what_it_stands_on() -> None:
    assert readable_on((1.0, 1.0, 1.0, 1.0)) == "#000000"
    assert readable_on((0.0, 0.1, 0.4, 1.0)) == "#ffffff"
