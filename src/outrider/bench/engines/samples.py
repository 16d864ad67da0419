"""Visits made: every engine in its turn, timed, counted and compared with the others' tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from outrider.bench.engines.plan import Contestant, Visit, Workload
from outrider.bench.load.drive import Served, Time, drive
from outrider.bench.load.tally import Numbers, tally
from outrider.bench.machine import Monitor, Neighbours
from outrider.core.budget import JobTrace
from outrider.metrics.timeline import Timeline, timeline

# So that what the engine before has left running, for verdicts that will not come, ends first.
_REST_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One engine at one level and repeat. `reason` says why it failed, None if it did not; a failed
    one may have numbers all the same. `usage` sums up what the process used (bench/machine.py).
    `digest` is of the token ids, None if a request has none."""

    level: int
    engine: str
    repeat: int
    reason: str | None
    numbers: Numbers | None
    lanes: Timeline | None
    usage: Mapping[str, float | None] | None
    digest: str | None
    foreign_cpu_share: float | None

    @property
    def ok(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Taken:
    """A sample, its requests, and what lanes did meanwhile."""

    sample: Sample
    served: tuple[Served, ...] = ()
    jobs: tuple[JobTrace, ...] = ()

    @property
    def tokens(self) -> dict[int, tuple[int, ...]]:
        """Those of each request that ended well, by its number."""
        return {one.number: one.result.token_ids for one in self.served if one.result is not None}


def run(
    plan: Workload, contestants: Sequence[Contestant], *, time: Time | None = None
) -> Iterator[list[Taken]]:
    """Warm up, then yield what every visit found, in the order of `contestants`."""
    for contestant in contestants:
        if contestant.server is not None:
            # A failure is the timed run's to report.
            with suppress(Exception):
                for loop, requests in plan.warm_ups():
                    drive(contestant.server, requests, loop, plan.params, time=time)
    for visit in plan.visits():
        yield measure(plan, contestants, visit, time=time)


def measure(
    plan: Workload, contestants: Sequence[Contestant], visit: Visit, *, time: Time | None = None
) -> list[Taken]:
    """One visit. Greedy tokens of exact engines are compared with those of the first that has all
    of them; what differs has failed."""
    found: dict[str, Taken] = {}
    with Neighbours() as neighbours:
        for place in range(len(contestants)):
            contestant = contestants[(visit.turn + place) % len(contestants)]
            found[contestant.name] = _serve(plan, contestant, visit, time)
    taken = [found[contestant.name] for contestant in contestants]
    exact = {c.name for c in contestants if c.exact and plan.params.greedy}
    first = next((t for t in taken if t.tokens and t.sample.engine in exact), None)
    return [
        replace(t, sample=_judged(t, first, exact, foreign_cpu_share=neighbours.share))
        for t in taken
    ]


def _serve(plan: Workload, contestant: Contestant, visit: Visit, time: Time | None) -> Taken:
    sample = Sample(
        level=visit.level,
        engine=contestant.name,
        repeat=visit.repeat,
        reason=contestant.reason,
        numbers=None,
        lanes=None,
        usage=None,
        digest=None,
        foreign_cpu_share=None,
    )
    if contestant.server is None:
        return Taken(sample)
    time = time or Time()
    time.sleep(_REST_SECONDS)
    contestant.jobs.clear()
    began = time.clock()
    loop, requests = plan.loop(visit.level), plan.requests(visit.level, visit.repeat)
    try:
        with Monitor() as monitor:
            done = drive(contestant.server, requests, loop, plan.params, time=time)
    except Exception as error:  # noqa: BLE001 - one engine must not end hours of others
        return Taken(replace(sample, reason=f"{type(error).__name__}: {error}"))
    # A lane may report a job of the visit before, which nobody waited for.
    jobs = tuple(job for job in contestant.jobs if job.began >= began)
    sample = replace(
        sample,
        reason=failure_of(done.served),
        numbers=tally(done),
        lanes=timeline(jobs) if jobs else None,
        usage=monitor.usage.summary(),
        digest=_digest(done.served),
    )
    return Taken(sample, done.served, jobs)


def failure_of(served: Iterable[Served]) -> str | None:
    """How many requests ended badly, and what the first one did of."""
    everything = list(served)
    reasons = [one.reason for one in everything if one.reason is not None]
    if not reasons:
        return None
    return f"{len(reasons)} of {len(everything)} requests failed: {reasons[0]}"


def _digest(served: Sequence[Served]) -> str | None:
    if not served or any(one.result is None for one in served):
        return None
    ids = [one.result.token_ids for one in served if one.result is not None]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]


def _judged(
    taken: Taken, first: Taken | None, exact: set[str], *, foreign_cpu_share: float | None
) -> Sample:
    """With the reason that an exact engine's tokens are not those of `first`, for requests that
    both served: within a time, some serve more."""
    sample = replace(taken.sample, foreign_cpu_share=foreign_cpu_share)
    if sample.reason is not None or first is None or sample.engine not in exact:
        return sample
    ours, theirs = taken.tokens, first.tokens
    if all(ours[number] == theirs[number] for number in ours.keys() & theirs.keys()):
        return sample
    return replace(sample, reason=f"DifferentTokens: not those of {first.sample.engine}")


def agreement(samples: Sequence[Sample]) -> tuple[int, int]:
    """How many visits there were in which several engines wrote tokens, and in how many of them all
    wrote the same. Lossy engines and sampled text have other tokens by right."""
    digests: dict[tuple[int, int], list[str]] = {}
    for sample in samples:
        if sample.digest is not None:
            digests.setdefault((sample.level, sample.repeat), []).append(sample.digest)
    several = [found for found in digests.values() if len(found) > 1]
    return len(several), sum(len(set(found)) == 1 for found in several)
