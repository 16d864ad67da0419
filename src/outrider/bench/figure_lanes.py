"""The lane timeline: what each lane did when, and how many sequences waited meanwhile.

Drawn from the records of jobs alone. A job is a bar in the colours of its stages; where the records
of its rounds are at hand it is cut into them, and what is left of it (packing, commits, waiting for
a device) is grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.figure_style import THEMES, Theme, caption, new_figure, save, themed
from outrider.core.budget import JobTrace, RoundTrace
from outrider.metrics.chrome_trace import rounds_of, slices
from outrider.metrics.timeline import QUEUES, WAITING, timeline

# More bars than this would be too thin to tell apart.
MAX_JOBS = 80
_LEAST_MS = 1e-3
STAGES = ("prefill", "draft", "ahead", "verify", "accept", "other")


@dataclass(frozen=True, slots=True)
class LanePicture:
    """`title` says what ran, `small_print` on what; `seconds` draws only so much from the
    beginning, 0 as much as can be told apart."""

    jobs: Sequence[JobTrace]
    rounds: Sequence[RoundTrace] = ()
    title: str = "What lanes did"
    small_print: str = ""
    seconds: float = 0.0


def draw_lanes(picture: LanePicture, folder: Path, name: str) -> list[Path]:
    """Write the figure for light and for dark pages, as SVG and PNG."""
    written: list[Path] = []
    for theme in THEMES:
        with themed(theme):
            written += save(lanes(picture, theme), folder, name, theme)
    return written


def lanes(picture: LanePicture, theme: Theme) -> Any:
    """Raises ValueError when there is no job to draw."""
    if not picture.jobs:
        raise ValueError("no job was recorded")
    shown, end = _stretch(picture)
    names = list(dict.fromkeys(job.lane for job in shown))
    figure = new_figure(1.9 + 0.5 * len(names), picture.title)
    bars, depths = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [0.5 * len(names) + 0.1, 1.0]}
    )
    origin = shown[0].began
    stages = _bars(bars, picture, shown, names, theme)
    _depths(depths, shown, end, theme)
    depths.set_xlim(0, max(1e3 * (end - origin), _LEAST_MS))
    depths.set_xlabel("milliseconds since the first job")
    _legend(figure, stages, theme, has_waiting=any(job.num_waiting for job in shown))
    caption(figure, _small_print(picture, shown, end), theme)
    return figure


def _stretch(picture: LanePicture) -> tuple[list[JobTrace], float]:
    """The jobs that are drawn, in order, and the end of what is drawn."""
    jobs = sorted(picture.jobs, key=lambda job: (job.began, job.ended))
    origin, whole = jobs[0].began, max(job.ended for job in jobs)
    if picture.seconds:
        end = min(origin + picture.seconds, whole)
        return [job for job in jobs if job.began < end] or jobs[:1], end
    if len(jobs) <= MAX_JOBS:
        return jobs, whole
    return jobs[:MAX_JOBS], jobs[MAX_JOBS].began


def _bars(
    axes: Any,
    picture: LanePicture,
    shown: Sequence[JobTrace],
    names: Sequence[str],
    theme: Theme,
) -> set[str]:
    """The stages that were drawn."""
    origin = shown[0].began
    colors = _colors(theme)
    # Rounds are matched over the whole run, for a sequence's rounds are told apart by their order.
    ordered = sorted(picture.jobs, key=lambda job: (job.began, job.ended))
    rounds = rounds_of(ordered, picture.rounds)[: len(shown)]
    drawn = {"other"} if picture.rounds else set[str]()
    for job, own in zip(shown, rounds, strict=True):
        row = (names.index(job.lane) - 0.34, 0.68)
        axes.broken_barh([_span(job.began, job.ended, origin)], row, color=colors["other"])
        for part in slices(job, own):
            drawn.add(part.stage)
            axes.broken_barh(
                [_span(part.began, part.ended, origin)],
                row,
                facecolor=colors[part.stage],
                edgecolor=theme.page,
                linewidth=0.4,
            )
    use = timeline(shown).lanes
    axes.set_yticks(range(len(names)), [f"{n}\n{100 * use[n].busy_fraction:.0f} %" for n in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    return drawn


def _depths(axes: Any, shown: Sequence[JobTrace], end: float, theme: Theme) -> None:
    """Steps: what a job found holds until the next one begins."""
    origin = shown[0].began
    moments = [1e3 * (job.began - origin) for job in shown] + [1e3 * (end - origin)]
    colors = _colors(theme)
    found = {name: [job.queues[i] for job in shown] for i, name in enumerate(QUEUES)}
    found[WAITING] = [job.num_waiting for job in shown]
    top = max(1, *(max(values) for values in found.values()))
    for number, (name, values) in enumerate(found.items()):
        if not any(values):
            continue
        # A little apart, so that no line hides another.
        steps = [value + 0.018 * top * number for value in (*values, values[-1])]
        color = colors.get(name, theme.muted)
        style = ":" if name == WAITING else "-"
        axes.step(moments, steps, where="post", color=color, linestyle=style, linewidth=1.4)
    axes.set_ylim(0, 1.2 * top)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("waiting")


def _legend(figure: Any, stages: set[str], theme: Theme, *, has_waiting: bool) -> None:
    """A coloured square and a word for each stage that was drawn, above the lanes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colors = _colors(theme)
    handles: list[Any] = [
        Patch(color=colors[stage], label=stage) for stage in STAGES if stage in stages
    ]
    if has_waiting:
        handles.append(Line2D([], [], color=theme.muted, linestyle=":", label="not yet admitted"))
    figure.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(0.995, 0.995),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        handlelength=1.0,
        columnspacing=1.2,
    )


def _colors(theme: Theme) -> Mapping[str, str]:
    return {
        "prefill": theme.hues[3],
        "draft": theme.stages["draft"],
        "ahead": theme.hues[1],
        "verify": theme.stages["target"],
        "accept": theme.stages["accept"],
        "other": theme.faint,
    }


def _small_print(picture: LanePicture, shown: Sequence[JobTrace], end: float) -> str:
    seconds = end - shown[0].began
    part = f"the first {1e3 * seconds:.0f} ms, " if len(shown) < len(picture.jobs) else ""
    of_all = f"{len(shown)} of {len(picture.jobs)} jobs" if part else f"{len(shown)} jobs"
    overlap = 100 * timeline(shown).overlap_fraction
    told = f"{part}{of_all}; two lanes or more ran in {overlap:.0f} % of the busy time"
    return f"{picture.small_print}; {told}" if picture.small_print else told


def _span(began: float, ended: float, origin: float) -> tuple[float, float]:
    """Beginning and length in milliseconds."""
    return 1e3 * (began - origin), 1e3 * (ended - began)
