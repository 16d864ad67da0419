"""Profile of one request: traces in, plain values out, ready for JSON.

`counts` depends only on models, prompt, settings and seed, so two runs with one seed give the same
bytes. The other parts have times and memory, which vary. Seconds in a trace are those of the whole
pass, which other requests may have shared.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.core.budget import RoundTrace
from outrider.metrics.summary import acceptance_histogram, position_counts

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
