"""What a run under load came to: one set of numbers, each computed from requests and their rounds.

- ITL is the inter-token latency: every token's share of its round, without the first round
  (metrics/summary.py). Its percentiles are over all tokens of all requests.
- TTFT goes from a request's arrival to its first token, end-to-end to its last one.
- A round latency is the pause between two arrivals of tokens, as a reader sees it.
- Cumulative token time is the time from a request's arrival to each of its tokens. It is no latency
  of a token and grows with the length of the text; it is here because some benchmarks print its
  percentile 95 as "Token P95".
- Throughput is emitted tokens of requests that ended well, over the seconds of the run.
- p_hit is the share of drafts that were ready when they were asked for, among rounds of a drafter
  that drafts ahead.

A pass that several requests took part in is counted once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from outrider.api.result import GenerationResult
from outrider.bench.load.drive import Run, Served
from outrider.core.budget import RoundTrace
from outrider.metrics.summary import inter_token_latencies, percentile, round_latencies

_NANO = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Milliseconds are over requests that ended well; None where nothing tells.

    `draft_ms` is the mean over passes that drafted and `verify_ms` over passes that read no prompt;
    `mean_batch` is the mean number of requests in such a pass. `num_draft_steps` adds up the
    longest draft of every pass. Of the rounds whose drafter drafts ahead, `num_hits` had their
    draft ready, and emitted `hit_tokens`; the others `miss_tokens`.
    """

    num_requests: int
    num_ok: int
    num_rejected: int
    num_tokens: int
    seconds: float
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    total_mean_ms: float | None
    total_p95_ms: float | None
    round_p50_ms: float | None
    round_p95_ms: float | None
    cumulative_p95_ms: float | None
    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_passes: int
    num_draft_steps: int
    draft_ms: float | None
    verify_ms: float | None
    mean_batch: float | None
    num_hits: int
    num_misses: int
    hit_tokens: int
    miss_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.num_tokens / self.num_rounds if self.num_rounds else None

    @property
    def p_hit(self) -> float | None:
        num = self.num_hits + self.num_misses
        return self.num_hits / num if num else None


def tally(run: Run) -> Numbers:
    good = [(served, served.result) for served in run.served if served.result is not None]
    results = [result for _, result in good]
    times = [served.token_seconds for served, _ in good if served.token_seconds]
    rounds = [trace for result in results for trace in result.rounds]
    passes = _passes(rounds)
    ahead = [trace for trace in rounds if trace.hit is not None and trace.num_emitted]
    hits = [trace for trace in ahead if trace.hit]
    decoding = [group for group in passes if not any(trace.num_prompt_tokens for trace in group)]
    drafting = [group[0].draft_seconds for group in passes if any(t.num_drafted for t in group)]
    num_hit_tokens = sum(trace.num_emitted for trace in hits)
    return Numbers(
        num_requests=len(run.served),
        num_ok=len(good),
        num_rejected=sum(served.rejected for served in run.served),
        num_tokens=sum(result.num_tokens for result in results),
        seconds=round(run.seconds, _NANO),
        itl_p50_ms=_percentile_ms(_all(inter_token_latencies(t) for t in times), 50),
        itl_p95_ms=_percentile_ms(_all(inter_token_latencies(t) for t in times), 95),
        ttft_p50_ms=_percentile_ms([t[0] for t in times], 50),
        ttft_p95_ms=_percentile_ms([t[0] for t in times], 95),
        total_mean_ms=_mean_ms([t[-1] for t in times]),
        total_p95_ms=_percentile_ms([t[-1] for t in times], 95),
        round_p50_ms=_percentile_ms(_all(round_latencies(t)[1:] for t in times), 50),
        round_p95_ms=_percentile_ms(_all(round_latencies(t)[1:] for t in times), 95),
        cumulative_p95_ms=_percentile_ms(_all(times), 95),
        num_rounds=sum(result.stats.num_rounds for result in results),
        num_drafted=sum(result.stats.num_drafted for result in results),
        num_accepted=sum(result.stats.num_accepted for result in results),
        num_passes=len(passes),
        num_draft_steps=sum(max(trace.num_drafted for trace in group) for group in passes),
        draft_ms=_mean_ms(drafting),
        verify_ms=_mean_ms([group[0].verify_seconds for group in decoding]),
        mean_batch=statistics.fmean(len(group) for group in decoding) if decoding else None,
        num_hits=len(hits),
        num_misses=len(ahead) - len(hits),
        hit_tokens=num_hit_tokens,
        miss_tokens=sum(trace.num_emitted for trace in ahead) - num_hit_tokens,
    )


def row_of(served: Served) -> dict[str, object]:
    """One request as a row of plain values, for CSV."""
    result, times = served.result, served.token_seconds
    gaps = inter_token_latencies(times) if times else ()
    return {
        "number": served.number,
        "request": served.request.name,
        "arrived_s": round(served.arrived, 6),
        "waited_ms": _ms(served.submitted - served.arrived),
        "status": "rejected" if served.rejected else "failure" if served.reason else "success",
        "reason": served.reason or "",
        "finish_reason": result.finish_reason if result else "",
        "tokens": result.num_tokens if result else 0,
        "ttft_ms": _ms(times[0]) if times else "",
        "itl_p50_ms": _ms(percentile(gaps, 50)) if gaps else "",
        "itl_p95_ms": _ms(percentile(gaps, 95)) if gaps else "",
        "total_ms": _ms(times[-1]) if times else "",
        **_speculation(result),
        "notes": "; ".join(result.notes) if result else "",
    }


def _speculation(result: GenerationResult | None) -> dict[str, object]:
    if result is None:
        return {"rounds": "", "drafted": "", "accepted": ""}
    stats = result.stats
    return {
        "rounds": stats.num_rounds,
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
    }


def _passes(rounds: Sequence[RoundTrace]) -> list[list[RoundTrace]]:
    """The traces of each pass, by its index."""
    found: dict[int, list[RoundTrace]] = {}
    for trace in rounds:
        found.setdefault(trace.pass_index, []).append(trace)
    return list(found.values())


def _all(groups: Iterable[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(groups))


def _percentile_ms(values: Sequence[float], percent: float) -> float | None:
    return _ms(percentile(values, percent)) if values else None


def _mean_ms(values: Sequence[float]) -> float | None:
    return _ms(statistics.fmean(values)) if values else None


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)
