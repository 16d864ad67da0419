"""What `bench load` puts engines under: cases, each with its own arrivals.

The four scenarios are one request by itself, and Poisson arrivals at 2, 5 and 10 requests a second
with at most 3, 5 and 10 in flight. Other cases are a rate of the user's own, a recorded trace, and
closed loops that last for a time. Repeats have arrivals and prompts of their own, drawn from the
seed and the repeat; all engines get the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from outrider.bench.engines.plan import Visit, WarmUp
from outrider.bench.load.drive import ClosedLoop, OpenLoop
from outrider.bench.load.requests import Request, arriving, poisson_arrivals, requests_from
from outrider.core.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Where requests come from; `seed` is that of arrivals."""

    texts: Sequence[str]
    max_tokens: int
    seed: int


class Case(Protocol):
    """`name` as results have it; `text` says it in words."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def loop(self) -> ClosedLoop | OpenLoop: ...
    def requests(self, prompts: Prompts, repeat: int) -> Iterable[Request]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonCase:
    """`num_requests`, or all that arrive within `duration` seconds, or what ends first."""

    name: str
    rate: float
    max_in_flight: int
    num_requests: int | None = None
    duration: float | None = None

    @property
    def text(self) -> str:
        return f"Poisson, {self.rate:g} requests/s, at most {self.max_in_flight} in flight"

    @property
    def loop(self) -> OpenLoop:
        return OpenLoop(max_in_flight=self.max_in_flight)

    def requests(self, prompts: Prompts, repeat: int) -> list[Request]:
        arrivals = poisson_arrivals(
            self.rate, seed=prompts.seed + repeat, num=self.num_requests, duration=self.duration
        )
        start = repeat * (self.num_requests or len(arrivals))
        return arriving(prompts.texts, arrivals, max_tokens=prompts.max_tokens, start=start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCase:
    """A recorded trace; every repeat is the same."""

    name: str
    recorded: Sequence[Request]
    max_in_flight: int

    @property
    def text(self) -> str:
        return f"{len(self.recorded)} recorded requests, at most {self.max_in_flight} in flight"

    @property
    def loop(self) -> OpenLoop:
        return OpenLoop(max_in_flight=self.max_in_flight)

    def requests(self, prompts: Prompts, repeat: int) -> Sequence[Request]:
        del prompts, repeat
        return self.recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedCase:
    """`num_requests`, or as many as can be handed in within `duration` seconds."""

    name: str
    num_in_flight: int
    num_requests: int | None = None
    duration: float | None = None

    @property
    def text(self) -> str:
        return f"closed loop, {self.num_in_flight} in flight"

    @property
    def loop(self) -> ClosedLoop:
        return ClosedLoop(num_in_flight=self.num_in_flight, duration=self.duration)

    def requests(self, prompts: Prompts, repeat: int) -> Iterator[Request]:
        start = repeat * (self.num_requests or 0)
        source = requests_from(prompts.texts, max_tokens=prompts.max_tokens, start=start)
        return islice(source, self.num_requests)


# Name, requests a second, most in flight.
_RATES: Mapping[str, tuple[float, int]] = {"low": (2, 3), "medium": (5, 5), "high": (10, 10)}
SINGLE = "single"
SCENARIOS = (SINGLE, *_RATES)


def scenario(name: str, num_requests: int) -> Case:
    """One of SCENARIOS; `single` has one request."""
    if name == SINGLE:
        return ClosedCase(name=name, num_in_flight=1, num_requests=1)
    rate, most = _RATES[name]
    return PoissonCase(name=name, rate=rate, max_in_flight=most, num_requests=num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A workload (bench/engines/plan.py) whose levels are the numbers of its cases. `num_warmup`
    requests are served untimed first."""

    cases: Sequence[Case]
    repeats: int
    prompts: Prompts
    params: SamplingParams
    num_warmup: int = 2

    def visits(self) -> list[Visit]:
        """Cases in turns."""
        rows = [(case, repeat) for repeat in range(self.repeats) for case in range(len(self.cases))]
        return [Visit(turn, case, repeat) for turn, (case, repeat) in enumerate(rows)]

    @property
    def most_in_flight(self) -> int:
        return max(most_in_flight(case) for case in self.cases)

    def loop(self, level: int) -> ClosedLoop | OpenLoop:
        return self.cases[level].loop

    def requests(self, level: int, repeat: int) -> Iterable[Request]:
        return self.cases[level].requests(self.prompts, repeat)

    def warm_ups(self) -> list[WarmUp]:
        source = requests_from(self.prompts.texts, max_tokens=self.prompts.max_tokens)
        loop = ClosedLoop(num_in_flight=self.most_in_flight)
        return [(loop, islice(source, self.num_warmup))]


def most_in_flight(case: Case) -> int:
    loop = case.loop
    return loop.num_in_flight if isinstance(loop, ClosedLoop) else loop.max_in_flight
