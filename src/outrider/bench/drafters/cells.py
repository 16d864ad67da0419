"""From samples to cells: what a drafter did for a domain, beside plain decoding.

The speed-up is a ratio of medians of seconds a token, paired by piece, with its bootstrap interval
(bench/frame.py); a piece's repeats are first reduced to their median. Acceptance, tokens a round
and the share of time spent drafting are sums over sums. Nothing here is measured.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from outrider.bench.drafters.samples import Numbers, Sample
from outrider.bench.drafters.table import OFF
from outrider.bench.frame import Ratio, ratio_of_medians

EVERYTHING = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
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


def cells(samples: Sequence[Sample]) -> list[Cell]:
    """By domain, then all of them together if there are several; contestants as they were run."""
    domains = list(dict.fromkeys(sample.domain for sample in samples))
    found = [cell for domain in domains for cell in _domain(domain, samples)]
    if len(domains) > 1:
        found += _domain(EVERYTHING, samples)
    return found


def agreement(samples: Sequence[Sample]) -> tuple[int, int]:
    """How many runs with a drafter there were, and how many of them failed in no way, which is to
    say that what they wrote, if it can be compared, was plain decoding's."""
    drafted = [sample for sample in samples if sample.contestant != OFF]
    return len(drafted), sum(sample.ok for sample in drafted)


def _domain(domain: str, samples: Sequence[Sample]) -> Iterator[Cell]:
    mine = [s for s in samples if domain in (s.domain, EVERYTHING)]
    plain = _times(mine, OFF)
    for name in dict.fromkeys(sample.contestant for sample in mine):
        own = [sample for sample in mine if sample.contestant == name]
        yield _cell(domain, name, own, plain)


def _cell(
    domain: str, name: str, samples: Sequence[Sample], plain: dict[tuple[str, int], float]
) -> Cell:
    good = [s.numbers for s in samples if s.ok and s.numbers is not None]
    reasons = Counter(s.reason for s in samples if s.reason is not None)
    times = _times(samples, name)
    pairs = [(plain[piece], own) for piece, own in times.items() if piece in plain]
    stats = [numbers.stats for numbers in good]
    drafted = sum(one.num_drafted for one in stats)
    total = sum(one.seconds["total"] for one in stats)
    return Cell(
        domain=domain,
        contestant=name,
        num_pieces=len(times),
        num_failures=sum(reasons.values()),
        reason=reasons.most_common(1)[0][0] if reasons else None,
        tokens_per_second=1 / statistics.median(times.values()) if times else None,
        speedup=ratio_of_medians(*zip(*pairs, strict=True)) if pairs and name != OFF else None,
        tokens_per_round=_share(
            sum(one.num_emitted for one in stats), sum(one.num_rounds for one in stats)
        ),
        acceptance=_share(sum(one.num_accepted for one in stats), drafted),
        by_position=_by_position(good),
        draft_share=_share(sum(one.seconds["draft"] for one in stats), total),
        num_drafted=drafted,
        most_nodes=max((numbers.most_nodes for numbers in good), default=0),
    )


def _times(samples: Sequence[Sample], name: str) -> dict[tuple[str, int], float]:
    """Seconds a token of each piece."""
    found: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        if sample.contestant == name and sample.ok and sample.numbers is not None:
            place = (sample.domain, sample.piece)
            found.setdefault(place, []).append(sample.numbers.seconds_per_token)
    return {place: statistics.median(values) for place, values in found.items()}


def _by_position(good: Sequence[Numbers]) -> tuple[float | None, ...]:
    columns = zip_longest(*(numbers.positions for numbers in good), fillvalue=(0, 0))
    sums = [(sum(d for d, _ in column), sum(a for _, a in column)) for column in columns]
    return tuple(_share(accepted, drafted) for drafted, accepted in sums)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
