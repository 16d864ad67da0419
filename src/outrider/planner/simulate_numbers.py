"""What a simulated run says of itself, in the figures that a measured one is told in.

Everything derives from its records, by the code that real runs are counted with (metrics/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from outrider.metrics.summary import Stats, inter_token_latencies, percentile, summarise
from outrider.metrics.timeline import Timeline, hit_rate, timeline
from outrider.planner.simulate_records import DRAFTER, Simulated


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Numbers:
    """`first_token`, `between_tokens` and `latency` are seconds of a request: to its first token,
    of each later one (its share of its round's), and to its last. `p_hit` is None where nothing
    was drafted ahead, `rounds_per_pass` how many sequences a verifying pass judged."""

    engine: str
    k: int
    stats: Stats
    p_hit: float | None
    rounds_per_pass: float
    first_token: Percentiles
    between_tokens: Percentiles
    latency: Percentiles
    timeline: Timeline

    @property
    def seconds(self) -> float:
        return self.stats.seconds["total"]

    @property
    def tokens_per_second(self) -> float:
        return self.stats.tokens_per_second

    @property
    def busy(self) -> Mapping[str, float]:
        """Share of the time in which each lane ran a job."""
        return {lane: use.busy_fraction for lane, use in self.timeline.lanes.items()}

    def to_dict(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "k": self.k,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_round": self.stats.tokens_per_round,
            "acceptance_rate": self.stats.acceptance_rate if self.stats.num_drafted else None,
            "p_hit": self.p_hit,
            "rounds_per_pass": self.rounds_per_pass,
            "first_token": asdict(self.first_token),
            "between_tokens": asdict(self.between_tokens),
            "latency": asdict(self.latency),
            "stats": self.stats.to_dict(),
            "timeline": self.timeline.to_dict(),
        }


def numbers(engine: str, k: int, run: Simulated) -> Numbers:
    """`engine` is what the run is called. There is at least one request."""
    drafter = DRAFTER if k else "none"
    judged = [trace.pass_index for trace in run.rounds if trace.num_emitted]
    return Numbers(
        engine=engine,
        k=k,
        stats=summarise(run.rounds, drafter=drafter, k=k, total_seconds=run.seconds),
        p_hit=hit_rate(run.rounds),
        rounds_per_pass=len(judged) / len(set(judged)),
        first_token=_percentiles([one.arrivals[0] for one in run.served]),
        between_tokens=_percentiles(
            list(chain.from_iterable(inter_token_latencies(one.arrivals) for one in run.served))
        ),
        latency=_percentiles([one.arrivals[-1] for one in run.served]),
        timeline=timeline(run.jobs),
    )


def _percentiles(values: Sequence[float]) -> Percentiles:
    return Percentiles(*(percentile(values, percent) for percent in (50, 95, 99)))
