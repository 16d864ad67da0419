"""The lane timeline: what each lane did when, and how many sequences waited meanwhile.

Made from the records of jobs alone. A job is a bar in the colours of its stages; where the records
of its rounds are at hand it is cut into them, and what is left of it (packing, commits, waiting for
a device) is grey.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.core.draft import JobTrace, RoundTrace
from outrider_lab.bench.charts import Axis, Chart, Color, JobBar, Line, Lines, Span, TimelineChart
from outrider_lab.metrics.chrome_trace import rounds_of, slices
from outrider_lab.metrics.timeline import QUEUES, WAITING, timeline

# More bars than this would be too thin to tell apart.
MAX_JOBS = 80
_LEAST_MS = 1e-3
_COLORS: Mapping[str, Color] = {
    "prefill": 3,
    "draft": "draft",
    "ahead": 1,
    "verify": "target",
    "accept": "accept",
    "other": "faint",
}


@dataclass(frozen=True, slots=True)
class LanePicture:
    """`title` says what ran, `small_print` on what; `seconds` draws only so much from the
    beginning, 0 as much as can be told apart."""

    jobs: Sequence[JobTrace]
    rounds: Sequence[RoundTrace] = ()
    title: str = "What lanes did"
    small_print: str = ""
    seconds: float = 0.0


def lane_chart(picture: LanePicture) -> Chart:
    """Raises ValueError when there is no job to draw."""
    if not picture.jobs:
        raise ValueError("no job was recorded")
    shown, end = _stretch(picture)
    use = timeline(shown).lanes
    names = list(dict.fromkeys(job.lane for job in shown))
    high = 0.5 * len(names)
    begun = Axis(low=0, high=max(1e3 * (end - shown[0].began), _LEAST_MS))
    since = Axis(label="milliseconds since the first job", low=begun.low, high=begun.high)
    bars = TimelineChart(
        rows=[f"{name}\n{100 * use[name].busy_fraction:.0f} %" for name in names],
        jobs=list(_jobs(picture, shown, names)),
        x=begun,
    )
    depths = _depths(shown, end)
    top = max([1.0, *(height for line in depths for _, height in line.points)])
    waiting = Lines(lines=depths, x=since, y=Axis(label="waiting", low=0, high=1.2 * top))
    return Chart(
        title=picture.title,
        panels=[[bars], [waiting]],
        foot=_small_print(picture, shown, end),
        height=1.9 + high,
        heights=[high + 0.1, 1.0],
        share="x",
    )


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


def _jobs(
    picture: LanePicture, shown: Sequence[JobTrace], names: Sequence[str]
) -> Iterator[JobBar]:
    """Each job, and over it the stages that its rounds tell."""
    origin = shown[0].began
    # Rounds are matched over the whole run, for a sequence's rounds are told apart by their order.
    ordered = sorted(picture.jobs, key=lambda job: (job.began, job.ended))
    rest = "other" if picture.rounds else ""
    rounds = rounds_of(ordered, picture.rounds)[: len(shown)]
    for job, own in zip(shown, rounds, strict=True):
        row = names.index(job.lane)
        yield JobBar(row=row, span=_span(job, origin), color=_COLORS["other"], name=rest)
        for part in slices(job, own):
            span = 1e3 * (part.began - origin), 1e3 * (part.ended - origin)
            color = _COLORS[part.stage]
            yield JobBar(row=row, span=span, color=color, name=part.stage, edged=True)


def _depths(shown: Sequence[JobTrace], end: float) -> list[Line]:
    """Steps: what a job found holds until the next one begins."""
    origin = shown[0].began
    moments = [*(1e3 * (job.began - origin) for job in shown), 1e3 * (end - origin)]
    found = {name: [job.queues[i] for job in shown] for i, name in enumerate(QUEUES)}
    found[WAITING] = [job.num_waiting for job in shown]
    top = max(1, *(max(values) for values in found.values()))
    return [
        Line(
            name="not yet admitted" if name == WAITING else f"waiting for {name}",
            # A little apart, so that no line hides another.
            points=[
                (moment, value + 0.018 * top * number)
                for moment, value in zip(moments, (*values, values[-1]), strict=True)
            ],
            color=_COLORS.get(name, "muted"),
            dash=":" if name == WAITING else "-",
            width=1.4,
            steps=True,
        )
        for number, (name, values) in enumerate(found.items())
        if any(values)
    ]


def _small_print(picture: LanePicture, shown: Sequence[JobTrace], end: float) -> str:
    seconds = end - shown[0].began
    part = f"the first {1e3 * seconds:.0f} ms, " if len(shown) < len(picture.jobs) else ""
    of_all = f"{len(shown)} of {len(picture.jobs)} jobs" if part else f"{len(shown)} jobs"
    overlap = 100 * timeline(shown).overlap_fraction
    sentence = f"{part}{of_all}; two lanes or more ran in {overlap:.0f} % of the busy time"
    return f"{picture.small_print}; {sentence}" if picture.small_print else sentence


def _span(job: JobTrace, origin: float) -> Span:
    """Beginning and end in milliseconds."""
    return 1e3 * (job.began - origin), 1e3 * (job.ended - origin)
