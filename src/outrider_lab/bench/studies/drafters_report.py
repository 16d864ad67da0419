"""What a comparison of drafters came to: cells, sections, figures, `results.json`, `samples.csv`.

A speed-up is a ratio of medians of seconds a token beside plain decoding, paired by piece, whose
repeats are first reduced to their median. Acceptance, tokens a round and the share of time spent
drafting are sums over sums. Nothing here is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest

from outrider.plugins.measure.turns import MIN_PAIRS, Ratio, said_of
from outrider_lab.bench.charts import Axis, Chart, Dots, Panel, Square, Squares, dot_of, rows_of
from outrider_lab.bench.studies.drafters import (
    DrafterNumbers,
    DrafterSample,
    RacePlan,
    bounds_of_copies,
)
from outrider_lab.bench.studies.drafters_lineup import OFF, Lineup, Runner
from outrider_lab.measure.frame import (
    failures,
    good_numbers,
    grouped,
    mean_foreign_share,
    medians,
    paired_ratio,
    share,
    spoken,
)
from outrider_lab.measure.store import Section, number, percent

SCHEMA = "outrider-bench-drafters/1"
SAMPLES = "samples.csv"
EVERYTHING = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCell:
    """A contestant in a domain; `domain` is EVERYTHING over all of them. What is None could not be
    told. Entry i of `by_position` is the share of drafts with an i-th token in a row that kept it.
    `verdict` says what the speed-up's interval says."""

    domain: str
    contestant: str
    num_pieces: int
    num_failures: int
    reason: str | None
    tokens_per_second: float | None
    speedup: Ratio | None
    tokens_per_round: float | None
    acceptance: float | None
    by_position: tuple[float | None, ...]
    draft_share: float | None
    num_drafted: int
    most_nodes: int

    @property
    def verdict(self) -> str:
        if self.contestant == OFF:
            return ""
        return "not judged" if self.speedup is None else self.speedup.verdict

    @property
    def status(self) -> str:
        return "success" if self.reason is None else f"{self.num_failures} failed: {self.reason}"


def cells(samples: Sequence[DrafterSample]) -> list[DrafterCell]:
    """By domain, then all of them together if there are several; contestants as they were run."""
    domains = list(dict.fromkeys(sample.domain for sample in samples))
    found = [cell for domain in domains for cell in _domain(domain, samples)]
    if len(domains) > 1:
        found += _domain(EVERYTHING, samples)
    return found


def agreement(samples: Sequence[DrafterSample]) -> SameTokens:
    drafted = [sample for sample in samples if sample.contestant != OFF]
    return SameTokens(len(drafted), sum(sample.ok for sample in drafted))


def _domain(domain: str, samples: Sequence[DrafterSample]) -> Iterator[DrafterCell]:
    mine = [s for s in samples if domain in (s.domain, EVERYTHING)]
    by_name = grouped(mine, lambda sample: sample.contestant)
    plain = _times(by_name.get(OFF, ()))
    for name, own in by_name.items():
        yield _cell(domain, name, own, plain)


def _cell(
    domain: str, name: str, samples: Sequence[DrafterSample], plain: Mapping[tuple[str, int], float]
) -> DrafterCell:
    good = good_numbers(samples)
    reasons = failures(sample.reason for sample in samples)
    times = _times(samples)
    stats = [numbers.stats for numbers in good]
    drafted = sum(one.num_drafted for one in stats)
    return DrafterCell(
        domain=domain,
        contestant=name,
        num_pieces=len(times),
        num_failures=sum(reasons.values()),
        reason=max(reasons, key=lambda reason: reasons[reason], default=None),
        tokens_per_second=1 / statistics.median(times.values()) if times else None,
        speedup=None if name == OFF else paired_ratio(plain, times),
        tokens_per_round=share(
            sum(one.num_emitted for one in stats), sum(one.num_rounds for one in stats)
        ),
        acceptance=share(sum(one.num_accepted for one in stats), drafted),
        by_position=_by_position(good),
        draft_share=share(
            sum(one.seconds["draft"] for one in stats), sum(one.seconds["total"] for one in stats)
        ),
        num_drafted=drafted,
        most_nodes=max((numbers.most_nodes for numbers in good), default=0),
    )


def _times(samples: Sequence[DrafterSample]) -> dict[tuple[str, int], float]:
    """Seconds a token of each piece."""
    return medians(
        ((sample.domain, sample.piece), numbers.seconds_per_token)
        for sample in samples
        if (numbers := sample.good) is not None
    )


def _by_position(good: Sequence[DrafterNumbers]) -> tuple[float | None, ...]:
    columns = zip_longest(*(numbers.positions for numbers in good), fillvalue=(0, 0))
    sums = [(sum(d for d, _ in column), sum(a for _, a in column)) for column in columns]
    return tuple(share(accepted, drafted) for drafted, accepted in sums)


HEADER = (
    "domain",
    "drafter",
    "tok/s",
    "speed-up",
    "verdict",
    "tok/round",
    "accepted %",
    "by position %",
    "drafting % of time",
    "pieces",
    "status",
)
_NOTE = (
    "Medians over pieces of work, each against plain decoding of the same piece a moment before or "
    "after, with 95 % bootstrap intervals. By position: of the drafts that had an i-th token in a "
    "row, how many kept it; of a tree, its depth is taken to be K."
)


@dataclass(frozen=True, slots=True)
class SameTokens:
    """Runs with a drafter that must write what plain decoding does, and those of them that failed
    in no way, so that they did."""

    runs: int
    same_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftersEvidence:
    """All that tables, sentences and figures draw on, as results.json has it. `skipped` says why
    contestants did not take part."""

    cells: Sequence[DrafterCell]
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    agreement: SameTokens = SameTokens(0, 0)
    foreign_cpu_share: float | None = None


def sections(found: DraftersEvidence) -> Iterator[Section]:
    yield Section(
        title="Drafters by domain",
        text=[_NOTE],
        header=HEADER,
        rows=[_row(cell) for cell in found.cells],
    )
    yield Section(title="What this run shows", points=findings(found))
    if found.skipped:
        yield Section(
            title="Not measured", header=("drafter", "why"), rows=list(found.skipped.items())
        )


def findings(found: DraftersEvidence) -> list[str]:
    """Sentences made from the numbers and from nothing else."""
    return [*_same(found), *_losses(found.cells), *bounds_of_copies(found.cells), *_caveats(found)]


def _row(cell: DrafterCell) -> tuple[str, ...]:
    return (
        cell.domain,
        cell.contestant,
        number(cell.tokens_per_second, 1),
        "-" if cell.speedup is None else spoken(cell.speedup),
        cell.verdict,
        number(cell.tokens_per_round, 2),
        percent(cell.acceptance),
        " ".join("-" if kept is None else f"{100 * kept:.0f}" for kept in cell.by_position),
        percent(cell.draft_share) if cell.contestant != OFF else "",
        str(cell.num_pieces),
        cell.status,
    )


def _same(found: DraftersEvidence) -> Iterator[str]:
    runs = found.agreement.runs
    if runs:
        yield (
            f"Tokens were those of plain decoding in {found.agreement.same_tokens} of the {runs} "
            "runs that must write the same."
        )


def _losses(cells: Sequence[DrafterCell]) -> Iterator[str]:
    """By domain; over all of them where no domain by itself was judged so."""
    found = [cell for cell in cells if cell.verdict == "loss"]
    somewhere = {cell.contestant for cell in found if cell.domain != EVERYTHING}
    for cell in found:
        if cell.speedup and not (cell.domain == EVERYTHING and cell.contestant in somewhere):
            yield (
                f"{cell.domain}: {cell.contestant} loses, at {spoken(cell.speedup)} plain "
                f"decoding: {percent(cell.acceptance)} % of its drafts are accepted and drafting "
                f"takes {percent(cell.draft_share)} % of the time."
            )
    if not found and any(cell.verdict == "gain" for cell in cells):
        yield "No drafter was found to lose time here."


def _caveats(found: DraftersEvidence) -> Iterator[str]:
    for cell in found.cells:
        if cell.contestant != OFF and cell.domain != EVERYTHING and not cell.num_drafted:
            yield f"{cell.domain}: {cell.contestant} drafted nothing."
    judged = [cell for cell in found.cells if cell.speedup is not None]
    if judged and all(cell.verdict == "not judged" for cell in judged):
        yield f"An interval and a verdict need {MIN_PAIRS} pieces (--prompts {MIN_PAIRS})."
    if said := said_of(found.foreign_cpu_share):
        yield said


def evidence_of(
    plan: RacePlan, lineup: Lineup, samples: Sequence[DrafterSample]
) -> DraftersEvidence:
    compared = {piece.domain for piece in plan.pieces if plan.comparable(piece)}
    return DraftersEvidence(
        cells=cells(samples),
        skipped=lineup.skipped,
        agreement=agreement([s for s in samples if s.domain in compared]),
        foreign_cpu_share=mean_foreign_share(samples),
    )


def plan_record(plan: RacePlan) -> dict[str, object]:
    counts: dict[str, int] = {}
    for piece in plan.pieces:
        counts[piece.domain] = counts.get(piece.domain, 0) + len(piece.prompts)
    return {
        "prompts": counts,
        "messages": list(plan.messages),
        "num_pieces": len(plan.pieces),
        "repeats": plan.repeats,
        "params": asdict(plan.params),
        "params_by_domain": {name: asdict(params) for name, params in plan.by_domain.items()},
    }


def runner_record(runner: Runner) -> dict[str, object]:
    return {"name": runner.name, "reason": runner.reason, "exact": runner.exact, **runner.facts}


def evidence_record(found: DraftersEvidence) -> dict[str, object]:
    told = [
        {**asdict(cell), "verdict": cell.verdict, "status": cell.status} for cell in found.cells
    ]
    return {**asdict(found), "cells": told, "findings": findings(found)}


def sample_rows(samples: Sequence[DrafterSample]) -> list[Mapping[str, object]]:
    """A row a sample, of plain values; those of a failed one may be empty."""
    return [_sample_row(sample) for sample in samples]


def _sample_row(sample: DrafterSample) -> Mapping[str, object]:
    numbers = sample.numbers
    stats = numbers.stats if numbers else None
    return {
        "domain": sample.domain,
        "piece": sample.piece,
        "repeat": sample.repeat,
        "drafter": sample.contestant,
        "status": sample.reason or "success",
        "seconds": stats and round(stats.seconds["total"], 6),
        "draft_seconds": stats and round(stats.seconds["draft"], 6),
        "verify_seconds": stats and round(stats.seconds["verify"], 6),
        "tokens": stats and stats.num_emitted,
        "rounds": stats and stats.num_rounds,
        "drafted": stats and stats.num_drafted,
        "accepted": stats and stats.num_accepted,
        "by_position": numbers and " ".join(f"{a}/{d}" for d, a in numbers.positions),
        "most_nodes": numbers and numbers.most_nodes,
        "foreign_cpu_share": sample.foreign_cpu_share,
    }


# Inches of a panel's head and foot, and of each drafter in it.
_FRAME, _LINE = 0.7, 0.24
# Panels side by side, by how many there are; more stand in rows of three.
_COLUMNS = {1: 1, 2: 2, 4: 2}
# Positions that a column has room for.
_MOST_POSITIONS = 8


def charts(found: Sequence[DrafterCell], words: str) -> dict[str, Chart]:
    """By the name of their files; without a drafter there are none."""
    drafted = [cell for cell in found if cell.contestant != OFF]
    domains = [d for d in dict.fromkeys(cell.domain for cell in drafted) if d != EVERYTHING]
    if not domains:
        return {}
    names = list(dict.fromkeys(cell.contestant for cell in drafted))
    own = {d: {cell.contestant: cell for cell in drafted if cell.domain == d} for d in domains}
    columns = _COLUMNS.get(len(domains), 3)
    height = 0.6 + -(-len(domains) // columns) * (_FRAME + _LINE * len(names))

    def chart(title: str, panels: Sequence[Panel]) -> Chart:
        rows = rows_of(panels, columns)
        return Chart(title=title, panels=rows, foot=words, height=height, share="y")

    return {
        "speedup_by_drafter": chart(
            "Speed-up over plain decoding, tokens a round, time spent drafting",
            [_speedups(domain, own[domain], names, drafted) for domain in domains],
        ),
        "acceptance_by_position": chart(
            "Kept at each position of a draft, %",
            [_positions(domain, own[domain], names) for domain in domains],
        ),
    }


def _speedups(
    domain: str, own: dict[str, DrafterCell], names: Sequence[str], drafted: Sequence[DrafterCell]
) -> Panel:
    """A dot a drafter, with its interval; beside it, tokens a round and the share of drafting."""
    cells = [own.get(name) for name in names]
    ratios = [cell.speedup for cell in drafted if cell.speedup]
    low = min([0.9, *(ratio.low or ratio.value for ratio in ratios)])
    high = max([1.1, *(ratio.high or ratio.value for ratio in ratios)])
    return Dots(
        title=domain,
        names=names,
        dots=[
            dot_of(cell.contestant, cell.speedup, _told(cell)) if cell and cell.speedup else None
            for cell in cells
        ],
        x=Axis(
            label="times plain decoding",
            low=low - 0.05 * (high - low),
            high=high + 0.05 * (high - low),
        ),
    )


def _positions(domain: str, own: dict[str, DrafterCell], names: Sequence[str]) -> Panel:
    """A row a drafter, a column a position; the share of drafts that kept it. Columns end at
    `_MOST_POSITIONS`; a table has the rest."""
    longest = max((len(cell.by_position) for cell in own.values()), default=0)
    return Squares(
        title=domain,
        rows=names,
        columns=[str(i + 1) for i in range(min(longest, _MOST_POSITIONS))],
        squares=[
            [
                Square(value=share, text="" if share is None else f"{100 * share:.0f}")
                for share in (own[name].by_position if name in own else ())[:_MOST_POSITIONS]
            ]
            for name in names
        ],
        x=Axis(label="position in the draft"),
    )


def _told(cell: DrafterCell) -> str:
    parts = [f"{cell.speedup.value:.2f}×"] if cell.speedup else []
    if cell.tokens_per_round is not None:
        parts.append(f"{cell.tokens_per_round:.2f} t/r")
    if cell.draft_share is not None:
        parts.append(f"{100 * cell.draft_share:.0f} %")
    return " · ".join(parts)
