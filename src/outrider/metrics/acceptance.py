"""How much of what was drafted was kept: by round, by position, and for other programs to read.

Only rounds that drafted count here. A round without a draft (no room left, nothing found) could
accept nothing and would look like a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NotRequired, TypedDict

from outrider.core.budget import RoundTrace


class SpecMetrics(TypedDict):
    """The per-request figures under vLLM's names, which load generators read.

    Invariants: the histogram adds up to `num_spec_steps`; weighted by its index, to
    `num_accepted_draft_tokens`; `mean_acceptance_length` is 1 + accepted / steps.
    `num_spec_tokens` is left out when the draft length adapts.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: NotRequired[int]


def acceptance_histogram(traces: Iterable[RoundTrace], k: int) -> tuple[int, ...]:
    """Entry j counts the rounds that kept j draft tokens: k + 1 entries, or none if k is 0."""
    kept = [trace.num_accepted for trace in traces if trace.num_drafted]
    return tuple(kept.count(j) for j in range(max([k, *kept]) + 1)) if k else ()


def position_counts(traces: Iterable[RoundTrace], k: int) -> list[tuple[int, int]]:
    """How often the i-th token of a draft was proposed, and how often it was kept.

    A trace has no shape of the draft, so the depth of a tree is taken to be the lesser of its
    nodes and k.
    """
    rounds = [(min(trace.num_drafted, k), trace.num_accepted) for trace in traces]
    return [
        (sum(drafted > i for drafted, _ in rounds), sum(kept > i for _, kept in rounds))
        for i in range(k)
    ]


def spec_metrics(histogram: Iterable[int], *, num_drafted: int, k: int | None) -> SpecMetrics:
    """From an acceptance histogram; `k` is None when the draft length adapts."""
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
