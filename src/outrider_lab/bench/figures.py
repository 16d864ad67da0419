"""The figures of a K sweep, made from its results folder and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider_lab.bench.charts import Axis, Bars, Chart, Color, Line, Lines, Panel, Square, Squares
from outrider_lab.bench.drawing import write
from outrider_lab.bench.studies.sweep_record import ResultsFolder
from outrider_lab.bench.studies.sweep_summary import STAGES, SweepCell, cells
from outrider_lab.measure.frame import Spread

# A distribution is drawn to here; a stall of the machine would squeeze everything else.
_SHOWN_PERCENT = 98
# Steps of a curve: nobody sees more.
_MAX_STEPS = 200


@dataclass(frozen=True, slots=True)
class PairData:
    """One pair's cells by domain and K, and each token's milliseconds of every cell."""

    name: str
    cells: Mapping[str, Mapping[int, SweepCell]]
    token_ms: Mapping[tuple[str, int], Sequence[float]]
    caption: str

    @property
    def domains(self) -> list[str]:
        return list(self.cells)

    @property
    def ks(self) -> list[int]:
        return sorted({k for by_k in self.cells.values() for k in by_k})

    @property
    def drafted(self) -> list[int]:
        return [k for k in self.ks if k]

    def along(self, domain: str) -> Iterator[tuple[int, SweepCell]]:
        """A domain's cells with their places along an axis of K."""
        found = self.cells[domain]
        return ((place, found[k]) for place, k in enumerate(self.ks) if k in found)


def gather(folder: ResultsFolder) -> list[PairData]:
    found: dict[str, dict[str, dict[int, SweepCell]]] = {}
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


def charts(pair: PairData) -> dict[str, Chart]:
    """By the name of their files; without speculation those that say something then."""
    of_plain = ("throughput_vs_k", "latency_cdf", "time_breakdown")
    return {name: make(pair) for name, make in FIGURES.items() if pair.drafted or name in of_plain}


def draw_all(folder: ResultsFolder) -> list[Path]:
    """Write every figure of every pair in the folder, light and dark, as SVG and PNG."""
    return [
        path
        for pair in gather(folder)
        for name, chart in charts(pair).items()
        for path in write(chart, folder.path / "figures" / pair.name, name)
    ]


def throughput(pair: PairData) -> Chart:
    def panel(domain: str) -> Panel:
        spreads = [(i, c.tokens_per_second) for i, c in pair.along(domain) if c.tokens_per_second]
        plain = pair.cells[domain].get(0)
        level = plain and plain.tokens_per_second
        return Lines(
            title=f"{domain}, plain {level.mean:.0f}" if level else domain,
            lines=[_spreads(spreads, 0)],
            levels=[("plain decoding", level.mean)] if level else [],
            x=_k_axis(pair),
            y=Axis(label=_first(pair, domain, "tokens a second"), low=0),
        )

    return _panels(pair, "Throughput by K (mean and standard deviation of samples)", panel)


def acceptance(pair: PairData) -> Chart:
    lines = [
        _spreads(
            [(i + _aside(n, pair), c.acceptance) for i, c in pair.along(domain) if c.acceptance],
            n,
            name=domain,
            scale=100,
        )
        for n, domain in enumerate(pair.domains)
    ]
    y = Axis(label="accepted, % of drafted", low=0, high=103)
    return Chart(
        title="Acceptance rate by K (mean and standard deviation of samples)",
        panels=[[Lines(lines=lines, x=_k_axis(pair), y=y)]],
        foot=f"{pair.caption}; plain decoding drafts nothing",
        height=3.6,
    )


def speedup_map(pair: PairData) -> Chart:
    grid = [[pair.cells[d].get(k) for k in pair.drafted] for d in pair.domains]
    values = [cell.speedup.value for row in grid for cell in row if cell and cell.speedup]
    far = max([0.05, *(abs(value - 1) for value in values)])

    def square(cell: SweepCell | None) -> Square:
        ratio = cell and cell.speedup
        if not ratio:
            return Square(value=None, text="-")
        small = "" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}"
        return Square(value=(ratio.value - 1) / far, text=f"{ratio.value:.2f}", small=small)

    squares = Squares(
        rows=pair.domains,
        columns=[f"K={k}" for k in pair.drafted],
        squares=[[square(cell) for cell in row] for row in grid],
        diverging=True,
    )
    return Chart(
        title="Speed-up over plain decoding (x)",
        panels=[[squares]],
        foot=f"{pair.caption}; below: 95 % interval; blue faster, orange slower",
        height=1.3 + 0.55 * len(pair.domains),
    )


def accepted_per_round(pair: PairData) -> Chart:
    def panel(row: int, domain: str, k: int) -> Panel:
        cell = pair.cells[domain].get(k)
        counts = cell.accepted_histogram if cell else ()
        step = 1 if k <= 4 else 2 if k <= 10 else 8
        return Bars(
            title=f"K={k}" if row == 0 else "",
            parts=[("", row, [100 * count / sum(counts) for count in counts])],
            x=Axis(
                label="drafts kept" if row == len(pair.domains) - 1 else "",
                ticks={i: str(i) for i in range(0, k + 1, step)},
                low=-0.6,
                high=k + 0.6,
            ),
            y=Axis(label=f"{domain}\n% of rounds" if k == pair.drafted[0] else "", low=0),
        )

    return Chart(
        title="Drafts kept in a round, share of rounds",
        panels=[[panel(i, d, k) for k in pair.drafted] for i, d in enumerate(pair.domains)],
        foot=pair.caption,
        height=1.1 + 1.15 * len(pair.domains),
        share="y",
    )


def latency_cdf(pair: PairData) -> Chart:
    drafted = pair.drafted
    last = max(len(drafted) - 1, 1)
    colors: dict[int, Color] = {k: float(i / last) for i, k in enumerate(drafted)}

    def panel(domain: str) -> Panel:
        times = {k: ms for k in pair.ks if len(ms := pair.token_ms.get((domain, k), ()))}
        longest = [float(np.percentile(ms, _SHOWN_PERCENT)) for ms in times.values()]
        return Lines(
            title=domain,
            lines=[
                Line(
                    name=f"K={k}" if k else "plain decoding",
                    points=_shares(ms),
                    color=colors.get(k, "muted"),
                    dash="-" if k else "--",
                    steps=True,
                )
                for k, ms in times.items()
            ],
            x=Axis(label="milliseconds a token", low=0, high=1.05 * max(longest, default=1.0)),
            y=Axis(label=_first(pair, domain, "tokens at most that slow, %"), low=0, high=100),
        )

    return _panels(pair, "Time of a token after the first round (its share of its round)", panel)


def time_breakdown(pair: PairData) -> Chart:
    def panel(domain: str) -> Panel:
        found = [pair.cells[domain].get(k) for k in pair.ks]
        return Bars(
            title=domain,
            parts=[
                (stage, stage, [cell.stage_ms.get(stage, 0.0) if cell else 0.0 for cell in found])
                for stage in STAGES
            ],
            x=_k_axis(pair),
            y=Axis(label=_first(pair, domain, "milliseconds a token"), low=0),
        )

    return _panels(pair, "Where the time of a token goes", panel)


def verify_time(pair: PairData) -> Chart:
    """T_verify(K) / T_verify(0): the means of passes over cached text, prompts left out."""
    found = {domain: _verify_spreads(pair, domain) for domain in pair.domains}
    lines = [
        _spreads(spreads, n, name=domain)
        for n, (domain, spreads) in enumerate(found.items())
        if len(spreads) > 1
    ]
    widest = max([0.8, *(place for line in lines for place, _ in line.points)])
    tallest = max([1.0, *(high for line in lines for _, high in line.spans)])
    linear = Line(
        name="token by token",
        points=[(0, 1), (1.25 * widest, 1 + 1.25 * widest)],
        color="muted",
        dash=":",
        width=1.2,
    )
    panel = Lines(
        lines=[*lines, linear],
        levels=[("constant", 1)],
        x=Axis(
            label="drafted tokens that a pass verifies (mean, for K = 1, 2, ...)",
            low=-0.02 * widest,
            high=1.25 * widest,
        ),
        y=Axis(label="time of a pass / plain pass", low=0, high=1.1 * tallest),
    )
    return Chart(
        title="A verifying pass against a plain one, by what it verifies",
        panels=[[panel]],
        foot=pair.caption,
        height=3.6,
    )


FIGURES: Mapping[str, Callable[[PairData], Chart]] = {
    "throughput_vs_k": throughput,
    "acceptance_vs_k": acceptance,
    "speedup_map": speedup_map,
    "accepted_per_round": accepted_per_round,
    "latency_cdf": latency_cdf,
    "time_breakdown": time_breakdown,
    "verify_time_vs_k": verify_time,
}


def _caption(folder: ResultsFolder, pair: str) -> str:
    """What a figure must say to mean anything."""
    sample = next(s for s in folder.samples if s.config.model_pair_name == pair)
    config = sample.config
    run = next(run for run in folder.runs if run["run"] == sample.run)
    how = "greedy" if config.temperature == 0 else f"temperature {config.temperature:g}"
    machine = run["machine"]["gpu"] or run["machine"]["cpu"]
    return f"{pair}, {how}, {config.max_tokens} tokens, batch {config.batch_size}, {machine}"


def _panels(pair: PairData, title: str, panel: Callable[[str], Panel]) -> Chart:
    """A panel for each domain, side by side over one scale."""
    own = [panel(domain) for domain in pair.domains]
    return Chart(title=title, panels=[own], foot=pair.caption, height=3.4, share="y")


def _first(pair: PairData, domain: str, label: str) -> str:
    """The panels of a row have one scale, which the first one names."""
    return label if domain == pair.domains[0] else ""


def _k_axis(pair: PairData) -> Axis:
    return Axis(label="K (0 = plain)", ticks=[*map(str, pair.ks)])


def _aside(number: int, pair: PairData) -> float:
    """Lines stand beside each other, so that their intervals do not hide one another."""
    return 0.06 * (number - (len(pair.domains) - 1) / 2)


def _spreads(
    found: Sequence[tuple[float, Spread]], color: int, *, name: str = "", scale: float = 1
) -> Line:
    ends = [(s.mean - (s.std or 0.0), s.mean + (s.std or 0.0)) for _, s in found]
    return Line(
        name=name,
        points=[(place, scale * spread.mean) for place, spread in found],
        spans=[(scale * low, scale * high) for low, high in ends],
        color=color,
        mark=color,
    )


def _shares(times: Sequence[float]) -> list[tuple[float, float]]:
    """Percents of `times` that are at most so long."""
    ordered = np.sort(times)
    places = np.linspace(0, len(ordered) - 1, min(len(ordered), _MAX_STEPS)).round().astype(int)
    return [(float(ordered[i]), 100 * (int(i) + 1) / len(ordered)) for i in places]


def _verify_spreads(pair: PairData, domain: str) -> list[tuple[float, Spread]]:
    plain = pair.cells[domain].get(0)
    if plain is None or plain.verify_ms is None:
        return []
    level = plain.verify_ms.mean
    return [
        (
            cell.drafted_per_round,
            Spread(cell.verify_ms.mean / level, (cell.verify_ms.std or 0.0) / level),
        )
        for _, cell in pair.along(domain)
        if cell.verify_ms and cell.drafted_per_round is not None
    ]
