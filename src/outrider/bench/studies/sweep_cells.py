"""From samples to cells: one configuration of a sweep beside plain decoding of the same moments.

Means and standard deviations are over successful samples, the speed-up is a ratio of paired medians
with its interval (bench/frame.py), and acceptance is accepted over drafted, a value a sample.
Nothing here is measured; the same samples give the same cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

from outrider.bench.frame import Ratio, Spread, failures, grouped, medians, paired_ratio, share
from outrider.bench.sample import good_numbers
from outrider.bench.studies.sweep_record import BenchmarkConfig, Numbers, ResultsFolder, Sample

STAGES = ("draft", "target", "accept", "other")
Place = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pair, domain and K. What is None could not be told: nothing was drafted, or no sample
    succeeded. `identical` says whether all greedy ids were those of plain decoding; `num_slower`
    counts the pieces that took longer than it. `stage_ms` is milliseconds a token."""

    pair: str
    domain: str
    k: int
    label: str
    num_samples: int
    num_failures: int
    failures: Mapping[str, int]
    latency_ms: Spread | None
    first_token_ms: Spread | None
    tokens_per_second: Spread | None
    speedup: Ratio | None
    num_slower: int
    acceptance: Spread | None
    num_drafted: Spread | None
    num_accepted: Spread | None
    tokens_per_round: float | None
    drafted_per_round: float | None
    accepted_histogram: Sequence[int]
    stage_ms: Mapping[str, float]
    verify_ms: Spread | None
    identical: bool | None

    @property
    def name(self) -> str:
        return f"{self.pair}, {self.domain}, K={self.k}"

    @property
    def success_rate(self) -> float:
        return 1 - self.num_failures / self.num_samples

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "success_rate": round(self.success_rate, 4)}


def cells(folder: ResultsFolder) -> list[Cell]:
    """Of a sweep over K: by pair and domain in the order in which they were first measured, then by
    K."""
    plain = plain_by_place(folder)
    found = [cell_of(samples, plain) for samples in by_config(folder).values()]
    groups = grouped(found, lambda cell: (cell.pair, cell.domain))
    return [cell for own in groups.values() for cell in sorted(own, key=lambda cell: cell.k)]


def by_config(folder: ResultsFolder) -> dict[BenchmarkConfig, list[Sample]]:
    return grouped(folder.current().values(), lambda sample: sample.config)


def plain_by_place(folder: ResultsFolder) -> dict[Place, Sample]:
    """Plain decoding of every visit."""
    return {_place(s): s for s in folder.samples if s.config.k == 0}


def _place(sample: Sample) -> Place:
    """Where a sample and its plain decoding meet."""
    pair, domain = sample.config.model_pair_name, sample.config.prompt_domain
    return sample.visit, pair, domain, sample.piece, sample.repeat


def cell_of(samples: Sequence[Sample], plain: Mapping[Place, Sample]) -> Cell:
    """What samples of one configuration came to, beside plain decoding of the same visits."""
    config = samples[0].config
    good = good_numbers(samples)
    reasons = failures(sample.reason for sample in samples)
    usual, own = _times(samples if config.k else (), plain)
    identical = [s.numbers.identical for s in samples if s.numbers is not None]
    num_rounds = sum(n.num_rounds for n in good)
    return Cell(
        pair=config.model_pair_name,
        domain=config.prompt_domain,
        k=config.k,
        label=config.label,
        num_samples=len(samples),
        num_failures=sum(reasons.values()),
        failures=reasons,
        latency_ms=Spread.of(1000 * n.seconds for n in good),
        first_token_ms=Spread.of(1000 * n.first_token_seconds for n in good),
        tokens_per_second=Spread.of(n.tokens_per_second for n in good),
        speedup=paired_ratio(usual, own),
        num_slower=sum(seconds > usual[piece] for piece, seconds in own.items()),
        acceptance=Spread.of(n.acceptance_rate for n in good),
        num_drafted=Spread.of(n.num_drafted for n in good),
        num_accepted=Spread.of(n.num_accepted for n in good),
        tokens_per_round=share(sum(n.num_tokens for n in good), num_rounds),
        drafted_per_round=share(sum(n.num_drafted for n in good), num_rounds),
        accepted_histogram=_histogram(good),
        stage_ms=_stage_ms(good),
        verify_ms=Spread.of(n.verify_ms for n in good),
        identical=None if None in identical or not identical else all(identical),
    )


def _times(
    samples: Sequence[Sample], plain: Mapping[Place, Sample]
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds a token of plain decoding and of the cell, by piece, where a visit has both."""
    both: list[tuple[str, float, float]] = []
    for sample in samples:
        beside = plain.get(_place(sample))
        usual, own = beside and beside.good, sample.good
        if usual is not None and own is not None:
            both.append((sample.piece, usual.seconds_per_token, own.seconds_per_token))
    return (
        medians((piece, usual) for piece, usual, _ in both),
        medians((piece, own) for piece, _, own in both),
    )


def _stage_ms(good: Sequence[Numbers]) -> dict[str, float]:
    """Where the time of a token goes; `target` is reading the prompt and verifying."""
    num_tokens = sum(n.num_tokens for n in good)
    if not num_tokens:
        return {}
    seconds = {
        "draft": sum(n.draft_seconds for n in good),
        "target": sum(n.prefill_seconds + n.verify_seconds for n in good),
        "accept": sum(n.accept_seconds for n in good),
        "other": sum(n.other_seconds for n in good),
    }
    return {name: round(1000 * seconds[name] / num_tokens, 6) for name in STAGES}


def _histogram(good: Sequence[Numbers]) -> list[int]:
    """Empty if no round drafted, which is so where a drafter found nothing to propose."""
    histograms = [n.accepted_histogram for n in good]
    counts = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
    return counts if any(counts) else []
