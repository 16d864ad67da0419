"""A report as one HTML file that needs nothing else: no request, no script, both themes.

The same report gives the same bytes: the page says when numbers were measured and not when it was
made. A figure that cannot be drawn from the values it was given is left out, and the part says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from outrider_lab.bench import drawing
from outrider_lab.bench.drawing import THEMES
from outrider_lab.bench.report.parts import ClaimKind, Figure, Part, Report, picture
from outrider_lab.measure.frame import spoken
from outrider_lab.measure.store import Page, Picture, Section, html

TITLE = "Outrider: what was measured"
# Of the gains and losses of a part so many are named in the summary.
MAX_NAMED = 3
_KINDS: Mapping[ClaimKind, str] = {
    "speculation": "Speculation against plain decoding",
    "arrangement": "Ways to run it against each other",
    "peer": "This program against others",
}
# What values that nobody expected can make a drawing do.
_UNDRAWABLE = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
_UNSAFE = '/\\ :*?"<>|\0'


def render(report: Report, *, drawn: Callable[[Figure], None] = lambda _: None) -> str:
    """The page. `drawn` is told of every figure once it is there, for a progress bar."""
    sections = [summary(report), *(_section(part, drawn) for part in report.parts)]
    if report.skipped:
        rows = [(item.place, item.why) for item in report.skipped]
        sections.append(Section(title="Skipped", header=("file", "why"), rows=rows))
    return html(Page(TITLE, sections, whole=True))


def num_figures(report: Report) -> int:
    """How many `render` draws."""
    return sum(len(part.figures) for part in report.parts)


def write_figures(report: Report, folder: Path) -> list[Path]:
    """Every figure as SVG and PNG, for light and for dark pages, in a folder a part. What cannot be
    drawn is left out, as from the page."""
    written: list[Path] = []
    for number, part in enumerate(report.parts, start=1):
        place = folder / f"{number:02d}-{part.kind.replace(' ', '-')}"
        for figure in part.figures:
            try:
                written += drawing.write(figure.chart, place, _file_name(figure.name))
            except _UNDRAWABLE:
                continue
    return written


def summary(report: Report) -> Section:
    """What was measured, where, and where speculation gains or loses, made from claims alone. A
    ratio counts as a gain or a loss only if its interval leaves out 1."""
    lists = [
        Section(title="Where speculation gains", points=named(report, "gain")),
        Section(title="Where speculation loses", points=named(report, "loss")),
    ]
    table = Section(
        title="Ratios by part",
        text=["Gain and loss: the 95 % interval lies above or below 1. No difference: it holds 1."],
        header=("part", "what", "gain", "loss", "no difference", "not judged", "best", "worst"),
        rows=[row for part in report.parts for row in _rows(part)],
    )
    return Section(
        title="Summary",
        text=[" ".join(_measured(report))],
        warnings=list(_warnings(report)),
        sections=[one for one in (*lists, table) if one.points or one.rows],
    )


def _section(part: Part, drawn: Callable[[Figure], None]) -> Section:
    pictures: list[Picture] = []
    warnings = list(part.warnings)
    reason = drawing.why_not()
    if reason is not None and part.figures:
        warnings.append(f"This page has {reason}.")
    for figure in part.figures if reason is None else ():
        try:
            light, dark = (drawing.svg(figure.chart, theme) for theme in THEMES)
            pictures.append(picture(figure.chart.title, light, dark, figure.words))
        except _UNDRAWABLE as error:
            warnings.append(f"{figure.chart.title} cannot be drawn: {type(error).__name__}.")
        drawn(figure)
    return Section(
        title=part.title,
        source=part.place,
        text=part.about,
        warnings=warnings,
        points=part.findings,
        pictures=[*pictures, *part.pictures],
        sections=part.tables,
        facts=[origin.facts for origin in part.origins if origin.facts],
    )


def _file_name(name: str) -> str:
    """Without what would lead out of a folder."""
    return "".join("_" if char in _UNSAFE or ord(char) < 32 else char for char in name).lstrip(".")


def _measured(report: Report) -> Iterator[str]:
    kinds: dict[str, int] = {}
    for part in report.parts:
        kinds[part.kind] = kinds.get(part.kind, 0) + 1
    named = ", ".join(f"{kind} ({num})" if num > 1 else kind for kind, num in kinds.items())
    num = len(report.parts)
    yield f"{num} {'part' if num == 1 else 'parts'}: {named}."
    machines = _machines(report.parts)
    if len(machines) == 1:
        yield f"Measured on {machines[0]}."
    commits = sorted({o.commit for part in report.parts for o in part.origins if o.commit})
    if len(commits) == 1:
        yield f"All numbers are of commit {commits[0]}."


def named(report: Report, verdict: Literal["gain", "loss"]) -> list[str]:
    """A line a part with the largest of its gains or losses over plain decoding."""
    return list(_named(report, verdict))


def _named(report: Report, verdict: str) -> Iterator[str]:
    for part in report.parts:
        own = [claim for claim in part.claims if claim.kind == "speculation"]
        ordered = sorted(own, key=lambda claim: claim.ratio.value, reverse=verdict == "gain")
        found = [claim for claim in ordered if claim.verdict == verdict]
        text = "; ".join(f"{spoken(claim.ratio)} at {claim.where}" for claim in found[:MAX_NAMED])
        more = len(found) - MAX_NAMED
        rest = f"; and {more} more in its tables" if more > 0 else ""
        if found:
            yield f"{part.title}: in {len(found)} of {len(own)} cells; {text}{rest}"


def _rows(part: Part) -> Iterator[tuple[str, ...]]:
    for kind, what in _KINDS.items():
        own = [claim for claim in part.claims if claim.kind == kind]
        if own:
            verdicts = [claim.verdict for claim in own]
            best = max(own, key=lambda claim: claim.ratio.value)
            worst = min(own, key=lambda claim: claim.ratio.value)
            yield (
                part.title,
                what,
                *(
                    str(verdicts.count(verdict))
                    for verdict in ("gain", "loss", "no measurable difference", "not judged")
                ),
                f"{spoken(best.ratio)} at {best.where}",
                f"{spoken(worst.ratio)} at {worst.where}",
            )


def _warnings(report: Report) -> Iterator[str]:
    machines = _machines(report.parts)
    if len(machines) > 1:
        yield (
            f"These are results of {len(machines)} machines ({'; '.join(machines)}): compare "
            "within a part only."
        )
    commits = {origin.commit for part in report.parts for origin in part.origins if origin.commit}
    if len(commits) > 1:
        yield f"These are results of {len(commits)} commits; each part names its own."
    doubted = [part.title for part in report.parts if part.warnings]
    if doubted:
        yield f"Warnings of their own stand in {len(doubted)} of {len(report.parts)} parts."
    if report.skipped:
        yield f"{len(report.skipped)} files were skipped; they are named at the end."


def _machines(parts: Sequence[Part]) -> list[str]:
    return sorted({o.machine for part in parts for o in part.origins if o.machine})
