"""Metrics from round traces: acceptance, tokens per round, passes, seconds and latencies.

No other code of the project adds up tokens, passes or seconds. Only rounds that drafted count for
acceptance: a round without a draft can accept nothing and would look like a rejection.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, zip_longest
from typing import Any, NotRequired, TypedDict, cast

import numpy as np

from outrider.core.draft import MemberTrace, RoundTrace
from outrider.core.plugins import OFF


class SpecMetrics(TypedDict):
    """The per-request figures under vLLM's names, which load generators read.

    Invariants: the histogram adds up to `num_spec_steps`; weighted by its index, to
    `num_accepted_draft_tokens`; `mean_acceptance_length` is 1 + accepted / steps.
    `num_spec_tokens` is left out when the draft length adapts. `members` are ours: `MemberStats`
    by name.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: NotRequired[int]
    members: NotRequired[Mapping[str, Any]]


def acceptance_histogram(traces: Iterable[RoundTrace], k: int) -> tuple[int, ...]:
    """Entry j counts the rounds that accepted j draft tokens: k + 1 entries, or none if k is 0."""
    accepted = [trace.num_accepted for trace in traces if trace.num_drafted]
    return tuple(accepted.count(j) for j in range(max([k, *accepted]) + 1)) if k else ()


def position_counts(traces: Iterable[RoundTrace], k: int) -> list[tuple[int, int]]:
    """Entry i: how often the i-th token of a draft was proposed, and how often it was accepted.

    A trace does not have the shape of its draft, so the depth of a tree is assumed to be the lesser
    of its number of nodes and k.
    """
    rounds = [(min(trace.num_drafted, k), trace.num_accepted) for trace in traces]
    return [
        (sum(drafted > i for drafted, _ in rounds), sum(accepted > i for _, accepted in rounds))
        for i in range(k)
    ]


def spec_metrics(histogram: Iterable[int], *, num_drafted: int, k: int | None) -> SpecMetrics:
    """Return the metrics of an acceptance histogram; `k` is None when the draft length adapts."""
    counts = list(histogram)
    num_rounds = sum(counts)
    num_accepted = sum(j * count for j, count in enumerate(counts))
    found = SpecMetrics(
        mean_acceptance_length=1 + (num_accepted / num_rounds if num_rounds else 0.0),
        draft_acceptance_rate=num_accepted / num_drafted if num_drafted else 0.0,
        acceptance_histogram=counts,
        num_spec_steps=num_rounds,
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=num_drafted,
    )
    if k is not None:
        found["num_spec_tokens"] = k
    return found


class MemberStats(TypedDict):
    """The part of one drafter: rounds in which it proposed, tokens that it drafted and those
    accepted, and seconds of its own passes, where it is a member of several. Trials are drafts that
    were made to learn, not because they seemed to pay; they are in the other figures too."""

    num_rounds: int
    num_drafted: int
    num_accepted: int
    seconds: float
    num_trials: int
    trial_tokens: int
    trial_seconds: float


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of a request, or of a whole run.

    `seconds` has the keys prefill (passes that read prompt tokens), draft, verify, accept and
    total (wall clock), to the nanosecond. Entry j of `acceptance_histogram` counts the rounds that
    drafted and accepted j tokens. When drafting ahead, `num_hits` counts the drafts that were ready
    when requested and `num_misses` those that were not. `rounds_by` counts rounds by their drafter,
    those without a draft as "none", and those of several members by their names with + between
    them; `members` has figures of each member. Invariants: emitted = accepted + rounds; accepted <=
    drafted.
    """

    drafter: str
    k: int
    num_rounds: int
    num_target_passes: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    seconds: Mapping[str, float]
    acceptance_histogram: tuple[int, ...] = ()
    num_hits: int = 0
    num_misses: int = 0
    rounds_by: Mapping[str, int] = field(default_factory=dict[str, int])
    members: Mapping[str, MemberStats] = field(default_factory=dict[str, MemberStats])

    @property
    def p_hit(self) -> float | None:
        """Hit rate of drafting ahead: verdicts with a ready draft; None if nothing drafted
        ahead."""
        num = self.num_hits + self.num_misses
        return self.num_hits / num if num else None

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted; 0 when nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Mean emitted per round, the target's own token included; plain decoding is 1."""
        return self.num_emitted / self.num_rounds if self.num_rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        total = self.seconds["total"]
        return self.num_emitted / total if total > 0 else 0.0

    @property
    def draft_share(self) -> float:
        """Share of the wall clock spent drafting."""
        total = self.seconds["total"]
        return self.seconds["draft"] / total if total > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        found: dict[str, object] = {item.name: getattr(self, item.name) for item in fields(self)}
        copies: dict[str, object] = {
            "seconds": dict(self.seconds),
            "rounds_by": dict(self.rounds_by),
            "members": {name: {**one} for name, one in self.members.items()},
        }
        return found | copies | {"acceptance_histogram": list(self.acceptance_histogram)}


def summarise(traces: Iterable[RoundTrace], *, drafter: str, k: int, total_seconds: float) -> Stats:
    """Add up `traces`; a pass that several traces share counts once."""
    records = list(traces)
    passes = {trace.pass_index: trace for trace in records}.values()
    reading = {trace.pass_index for trace in records if trace.num_prompt_tokens}
    verify = {trace.pass_index: trace.verify_seconds for trace in passes}
    rounds = [trace for trace in records if trace.num_emitted]
    seconds = {
        "prefill": sum(seconds for index, seconds in verify.items() if index in reading),
        "draft": sum(trace.draft_seconds for trace in passes),
        "verify": sum(seconds for index, seconds in verify.items() if index not in reading),
        "accept": sum(trace.accept_seconds for trace in passes),
        "total": total_seconds,
    }
    return Stats(
        drafter=drafter,
        k=k,
        num_rounds=len(rounds),
        num_target_passes=sum(trace.num_target_passes for trace in passes),
        num_drafted=sum(trace.num_drafted for trace in records),
        num_accepted=sum(trace.num_accepted for trace in records),
        num_emitted=sum(trace.num_emitted for trace in records),
        seconds={name: round(value, 9) for name, value in seconds.items()},
        acceptance_histogram=acceptance_histogram(records, k),
        num_hits=sum(trace.hit is True for trace in rounds),
        num_misses=sum(trace.hit is False for trace in rounds),
        rounds_by=Counter(one.drafter if one.num_drafted else OFF for one in rounds),
        members=by_member(rounds),
    )


def by_member(rounds: Iterable[RoundTrace]) -> dict[str, MemberStats]:
    """Return the figures of each drafter or member that proposed, by name."""
    found: dict[str, MemberStats] = {}
    for trace in rounds:
        alone = MemberTrace(trace.drafter, trace.num_drafted, trace.num_accepted)
        parts = trace.members or ((alone,) if trace.num_drafted else ())
        for one in parts:
            part = MemberStats(
                num_rounds=1,
                num_drafted=one.num_drafted,
                num_accepted=one.num_accepted,
                seconds=one.seconds,
                num_trials=int(one.trial),
                trial_tokens=one.num_drafted * one.trial,
                trial_seconds=one.seconds * one.trial,
            )
            name = one.name or trace.drafter
            found[name] = _sum(found[name], part) if name in found else part
    return {name: _rounded(one) for name, one in sorted(found.items())}


def members_together(parts: Iterable[Mapping[str, MemberStats]]) -> dict[str, MemberStats]:
    """Add up the figures of several requests."""
    found: dict[str, MemberStats] = {}
    for part in parts:
        for name, one in part.items():
            found[name] = _sum(found[name], one) if name in found else one
    return {name: _rounded(one) for name, one in sorted(found.items())}


def _sum(one: MemberStats, other: MemberStats) -> MemberStats:
    return cast("MemberStats", {key: one[key] + other[key] for key in MemberStats.__annotations__})


def _rounded(one: MemberStats) -> MemberStats:
    seconds = {key: round(one[key], 9) for key in ("seconds", "trial_seconds")}
    return cast("MemberStats", {**one, **seconds})


def together(parts: Sequence[Stats], *, total_seconds: float) -> Stats:
    """Merge the parts of one request whose rounds ran in several engines, one after another."""
    last = parts[-1]
    counts = [item.name for item in fields(Stats) if item.name.startswith("num_")]
    rows = zip_longest(*(part.acceptance_histogram for part in parts), fillvalue=0)
    seconds = {name: sum(part.seconds[name] for part in parts) for name in last.seconds}
    seconds["total"] = total_seconds
    return replace(
        last,
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
        seconds={name: round(value, 9) for name, value in seconds.items()},
        acceptance_histogram=tuple(map(sum, rows)),
        rounds_by=sum((Counter(part.rounds_by) for part in parts), Counter[str]()),
        members=members_together(part.members for part in parts),
    )


def round_latencies(arrivals: Sequence[float]) -> tuple[float, ...]:
    """Seconds from each arrival to the next, the first one counted from 0.

    An arrival is the time at which a token's id was on the host, in seconds since the request was
    submitted. All tokens of a round arrive together; the gaps between arrivals are the pauses that
    a reader sees. The first gap is the time to the first token: waiting, prefill and a whole round.
    """
    moments = [moment for moment, _ in groupby(arrivals)]
    return tuple(now - before for before, now in zip([0.0, *moments], moments, strict=False))


def token_latencies(arrivals: Sequence[float]) -> tuple[float, ...]:
    """One entry per token: its share of the time between its arrival and the previous one.

    The tokens of a round share the round's time evenly. Percentiles can thus be compared with and
    without speculation. The latencies add up to the last arrival.
    """
    sizes = [len(list(tokens)) for _, tokens in groupby(arrivals)]
    gaps = zip(round_latencies(arrivals), sizes, strict=True)
    return tuple(gap / size for gap, size in gaps for _ in range(size))


def inter_token_latencies(arrivals: Sequence[float]) -> tuple[float, ...]:
    """Token latencies without those of the first round, which include waiting and prefill."""
    num_first = sum(moment == arrivals[0] for moment in arrivals)
    return token_latencies(arrivals)[num_first:]


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation, as np.percentile computes it; 0 without values."""
    return float(np.percentile(values, percent)) if values else 0.0


# Profile of one request: traces in, plain values out, ready for JSON.
#
# `counts` depends only on models, prompt, settings and seed, so two runs with one seed give the
# same bytes. The other parts have times and memory, which vary. Seconds in a trace are those of the
# whole pass, which other requests may have shared.
STAGES = ("load", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """Peak memory in bytes, while loading and in the pass of each trace of a request."""

    load_bytes: int
    pass_bytes: tuple[int, ...]


def profile(
    traces: Sequence[RoundTrace],
    *,
    k: int,
    memory: MemoryTrace | None = None,
    metadata: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the profile of one request. `traces` are in order; `memory` has an entry for each."""
    return {
        "metadata": dict(metadata or {}),
        "counts": counts(traces, k=k),
        "aggregate": aggregate(traces),
        "memory": None if memory is None else stage_peaks(traces, memory),
        "rounds": [
            _round(trace, traces[0].pass_index, memory and memory.pass_bytes[index])
            for index, trace in enumerate(traces)
        ],
    }


def counts(traces: Sequence[RoundTrace], *, k: int) -> dict[str, object]:
    """Return what a seed determines. `by_num_drafted` groups rounds by drafted tokens."""
    rounds = [trace for trace in traces if trace.num_emitted]
    sizes = Counter(trace.num_drafted for trace in rounds)
    accepted: Counter[int] = Counter()
    for trace in rounds:
        accepted[trace.num_drafted] += trace.num_accepted
    return {
        "num_passes": len({trace.pass_index for trace in traces}),
        "num_rounds": len(rounds),
        "num_prompt_tokens": sum(trace.num_prompt_tokens for trace in traces),
        "num_emitted": sum(trace.num_emitted for trace in rounds),
        "num_rows_copied": sum(trace.num_rows_copied for trace in rounds),
        "drafted": [trace.num_drafted for trace in rounds],
        "accepted": [trace.num_accepted for trace in rounds],
        "acceptance_histogram": list(acceptance_histogram(rounds, k)),
        "positions": [
            {"num_drafted": drafted, "num_accepted": num, "rate": _rate(num, drafted)}
            for drafted, num in position_counts(rounds, k)
        ],
        "by_num_drafted": [
            {"num_drafted": size, "num_rounds": sizes[size], "num_accepted": accepted[size]}
            for size in sorted(sizes)
        ],
    }


def aggregate(traces: Sequence[RoundTrace]) -> dict[str, dict[str, float]]:
    """Return total, mean and population standard deviation: of times over passes, of counts over
    rounds. `verify_ms` is of every target pass, those that read a prompt included."""
    passes = list({trace.pass_index: trace for trace in traces}.values())
    rounds = [trace for trace in traces if trace.num_emitted]
    return {
        "draft_ms": _spread([1e3 * trace.draft_seconds for trace in passes]),
        "verify_ms": _spread([1e3 * trace.verify_seconds for trace in passes]),
        "accept_ms": _spread([1e3 * trace.accept_seconds for trace in passes]),
        "num_drafted": _spread([trace.num_drafted for trace in rounds]),
        "num_accepted": _spread([trace.num_accepted for trace in rounds]),
    }


def stage_peaks(traces: Sequence[RoundTrace], memory: MemoryTrace) -> dict[str, int | None]:
    """Return the peak memory in bytes of each of `STAGES`; None for a stage that did not occur.

    A pass that read prompt tokens of this request is prefill, any other pass is decode.
    """
    held: dict[str, list[int]] = {stage: [] for stage in STAGES}
    held["load"].append(memory.load_bytes)
    for trace, num_bytes in zip(traces, memory.pass_bytes, strict=True):
        held["prefill" if trace.num_prompt_tokens else "decode"].append(num_bytes)
    return {stage: max(found, default=None) for stage, found in held.items()}


def _round(trace: RoundTrace, first_pass: int, num_bytes: int | None) -> dict[str, object]:
    return {
        "pass": trace.pass_index - first_pass,
        "drafter": trace.drafter,
        "batch_size": trace.batch_size,
        "num_prompt_tokens": trace.num_prompt_tokens,
        "num_drafted": trace.num_drafted,
        "num_accepted": trace.num_accepted,
        "num_emitted": trace.num_emitted,
        "draft_ms": round(1e3 * trace.draft_seconds, 6),
        "verify_ms": round(1e3 * trace.verify_seconds, 6),
        "accept_ms": round(1e3 * trace.accept_seconds, 6),
        "mask_ms": round(1e3 * trace.mask_seconds, 6),
        "memory_bytes": num_bytes,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"total": 0.0, "mean": 0.0, "std": 0.0}
    return {
        "total": round(sum(values), 6),
        "mean": round(statistics.fmean(values), 6),
        "std": round(statistics.pstdev(values), 6),
    }


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
