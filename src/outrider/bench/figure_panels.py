"""What every figure of a sweep begins with: one pair's cells, and panels with one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.figure_style import Theme, new_figure, spread_out
from outrider.bench.figure_style import caption as caption  # for whoever draws panels
from outrider.bench.studies.sweep_cells import Cell, cells
from outrider.bench.studies.sweep_record import ResultsFolder


@dataclass(frozen=True, slots=True)
class PairData:
    """One pair's cells by domain and K, and each token's milliseconds of every cell."""

    name: str
    cells: Mapping[str, Mapping[int, Cell]]
    token_ms: Mapping[tuple[str, int], Sequence[float]]
    caption: str

    @property
    def domains(self) -> list[str]:
        return list(self.cells)

    @property
    def ks(self) -> list[int]:
        return sorted({k for by_k in self.cells.values() for k in by_k})


def gather(folder: ResultsFolder) -> list[PairData]:
    found: dict[str, dict[str, dict[int, Cell]]] = {}
    for cell in cells(folder):
        found.setdefault(cell.pair, {}).setdefault(cell.domain, {})[cell.k] = cell
    times: dict[tuple[str, str, int], list[float]] = {}
    for sample in folder.current().values():
        if sample.ok and sample.numbers is not None:
            config = sample.config
            place = (config.model_pair_name, config.prompt_domain, config.k)
            times.setdefault(place, []).extend(sample.numbers.token_ms)
    return [
        PairData(
            name,
            by_domain,
            {(d, k): ms for (pair, d, k), ms in times.items() if pair == name},
            _caption(folder, name),
        )
        for name, by_domain in found.items()
    ]


def _caption(folder: ResultsFolder, pair: str) -> str:
    """What a figure must say to mean anything."""
    sample = next(s for s in folder.samples if s.config.model_pair_name == pair)
    config = sample.config
    run = next(run for run in folder.runs if run["run"] == sample.run)
    how = "greedy" if config.temperature == 0 else f"temperature {config.temperature:g}"
    machine = run["machine"]["gpu"] or run["machine"]["cpu"]
    return f"{pair}, {how}, {config.max_tokens} tokens, batch {config.batch_size}, {machine}"


def panels_of(pair: PairData, theme: Theme, title: str, label: str) -> tuple[Any, list[Any]]:
    """A panel for each domain, side by side over one scale."""
    figure = new_figure(3.4, title)
    grid = figure.subplots(1, len(pair.domains), sharey=True, squeeze=False)
    panels = list(grid[0])
    for axes, domain in zip(panels, pair.domains, strict=True):
        axes.set_title(domain, loc="left")
    panels[0].set_ylabel(label)
    caption(figure, pair.caption, theme)
    return figure, panels


def k_axis(axes: Any, ks: Sequence[int]) -> None:
    axes.set_xticks(range(len(ks)), [str(k) for k in ks])
    axes.set_xlim(-0.5, len(ks) - 0.5)
    axes.set_xlabel("K (0 = plain)")


def label_ends(axes: Any, x: float, ends: Sequence[tuple[str, float, str]], gap: float) -> None:
    places = spread_out([y for _, y, _ in ends], gap)
    for (text, _, color), y in zip(ends, places, strict=True):
        axes.text(x, y, text, color=color, va="center", fontweight="bold")
