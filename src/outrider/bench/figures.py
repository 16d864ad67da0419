"""The figures of a K sweep, drawn from its results folder and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.bench import figure_rates, figure_times
from outrider.bench.figure_panels import PairData, gather
from outrider.bench.figure_style import THEMES, Theme, save, themed
from outrider.bench.studies.sweep_record import ResultsFolder

# What each figure is called, and those that say something without speculation.
FIGURES: Mapping[str, Callable[[PairData, Theme], Any]] = {
    "throughput_vs_k": figure_rates.throughput,
    "acceptance_vs_k": figure_rates.acceptance,
    "speedup_map": figure_rates.speedup_map,
    "accepted_per_round": figure_rates.accepted_per_round,
    "latency_cdf": figure_times.latency_cdf,
    "time_breakdown": figure_times.time_breakdown,
    "verify_time_vs_k": figure_times.verify_time,
}
_OF_PLAIN = ("throughput_vs_k", "latency_cdf", "time_breakdown")


def draw_all(folder: ResultsFolder) -> list[Path]:
    """Write every figure of every pair in the folder, light and dark, as SVG and PNG."""
    written: list[Path] = []
    for pair in gather(folder):
        for name, draw in FIGURES.items():
            if not any(pair.ks) and name not in _OF_PLAIN:
                continue
            for theme in THEMES:
                with themed(theme):
                    target = folder.path / "figures" / pair.name
                    written += save(draw(pair, theme), target, name, theme)
    return written
