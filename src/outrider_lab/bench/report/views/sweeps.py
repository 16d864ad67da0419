"""The part of a sweep, from its samples: the sections of its own page, and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from outrider_lab.bench import figures
from outrider_lab.bench.report.parts import (
    Claim,
    Figure,
    Part,
    Source,
    origin_of,
    own_words,
    part_of,
    tables_of,
)
from outrider_lab.bench.studies.sweep_record import K_SWEEP, SWEEP, ResultsFolder
from outrider_lab.bench.studies.sweep_report import charts, sections
from outrider_lab.bench.studies.sweep_summary import axes_in, cells, summary
from outrider_lab.measure.store import RecordError

# What each figure shows, for those who cannot see it; its numbers are in the table.
_WORDS: Mapping[str, str] = {
    "throughput_vs_k": "Tokens a second by K, a panel a domain; plain dashed.",
    "acceptance_vs_k": "Share of drafted tokens kept, by K, a line a domain.",
    "speedup_map": "A map of speed-ups with their intervals, by domain and K.",
    "accepted_per_round": "Share of rounds that kept 0, 1, 2 drafts.",
    "latency_cdf": "How many tokens took at most so long, a line a K.",
    "time_breakdown": "Milliseconds a token of draft, target, accept, other.",
    "verify_time_vs_k": "Time of a verifying pass over that of a plain one, beside constant and "
    "linear cost.",
}
_BY_AXIS = "Speed-up over plain decoding and share of drafts kept, by the values of one axis."
_BELOW = "Numbers are in the table below."


def sweep(source: Source) -> list[Part]:
    """Raises RecordError for a folder without samples, and ConfigError for a damaged one."""
    schema = K_SWEEP if source.kind == K_SWEEP.name else SWEEP
    folder = ResultsFolder.read(source.path.parent, schema)
    if not folder.samples:
        raise RecordError("no sample was written yet; the run was stopped before its first visit")
    found, own = cells(folder), list(sections(folder))
    pairs = ", ".join(dict.fromkeys(str(run["pair"]) for run in folder.runs))
    kind = "K sweep" if schema.one_setting else f"sweep of {', '.join(axes_in(folder))}"
    torn = "The file ends in half a line: its last sample was cut off and is left out."
    return [
        part_of(
            source,
            summary(folder),
            kind="K sweep" if schema.one_setting else "sweep",
            title=f"{kind[0].upper()}{kind[1:]}: {pairs}",
            about=[f"{len(found)} cells, {len(folder.samples):,} samples."],
            findings=own_words([point for section in own for point in section.points]),
            claims=[
                Claim(
                    kind="speculation",
                    where=cell.name,
                    against="plain decoding",
                    ratio=cell.speedup,
                )
                for cell in found
                if cell.speedup is not None
            ],
            figures=list(_figures(folder)),
            tables=tables_of(own),
            warnings=[torn] if folder.store.log.torn else [],
            origins=[origin_of(run) for run in folder.runs],
        )
    ]


def _figures(folder: ResultsFolder) -> Iterator[Figure]:
    if not folder.schema.one_setting:
        for name, chart in charts(folder).items():
            yield Figure(name=name, chart=chart, words=f"{chart.title}: {_BY_AXIS} {_BELOW}")
        return
    pairs = figures.gather(folder)
    for pair in pairs:
        for name, chart in figures.charts(pair).items():
            yield Figure(
                name=f"{name}-{pair.name}" if len(pairs) > 1 else name,
                chart=chart,
                words=f"{pair.name}: {_WORDS[name]} {_BELOW}",
            )
