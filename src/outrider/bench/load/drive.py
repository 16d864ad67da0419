"""The load generator: hands requests in, keeps the engine going, notes when tokens arrive.

A closed loop keeps at most `num_in_flight` requests in flight; a new one is handed in when one has
ended. With a gap it waits that long, with nothing in flight, before it hands in the next: that is
level 0 of the benchmarks, where an engine is woken for every request. An open loop hands requests
in at their arrivals, whatever the engine does; at most `max_in_flight` are let in, and the others
wait at the door. What they wait there counts: latencies are from the arrival on, else a slow engine
would seem fast because it was asked less often (coordinated omission).

Time is an argument (`Time`), so tests decide what time it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outrider.api.result import GenerationResult
from outrider.bench.load.requests import Request
from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.errors import ContractError, QueueFullError
from outrider.core.params import SamplingParams


class Handle(Protocol):
    """A request that was handed in."""

    @property
    def done(self) -> bool: ...
    def result(self) -> GenerationResult:
        """Raises what the request failed for."""
        ...


class Server(Protocol):
    """What is under load: `LLM`."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, prompt: str, params: SamplingParams, /) -> Handle: ...
    def advance(self) -> object:
        """Returns when some job has ended."""
        ...

    def cancel(self, handle: Any, /) -> object: ...
    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Time:
    """What time it is, and how to wait; both in seconds."""

    clock: Clock = HOST_CLOCK
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """`duration`: hand in nothing after so many seconds, and wait for what runs."""

    num_in_flight: int
    gap_seconds: float = 0.0
    duration: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Requests come at their own `arrival_seconds`."""

    max_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request as it went. Seconds are since the run began; `arrived` is when it wanted to be
    served, `submitted` when the engine got it. `reason` says why there is no result; `rejected`
    that a full queue was it."""

    number: int
    request: Request
    arrived: float
    submitted: float
    result: GenerationResult | None = None
    reason: str | None = None
    rejected: bool = False

    @property
    def token_seconds(self) -> tuple[float, ...]:
        """When each token came, in seconds since the request arrived."""
        if self.result is None:
            return ()
        waited = self.submitted - self.arrived
        return tuple(waited + moment for moment in self.result.token_seconds)


@dataclass(frozen=True, slots=True)
class Run:
    """All requests in the order in which they were handed in. `seconds` go from the beginning to
    the end of the last one; the gaps of a closed loop, in which nothing runs, are left out."""

    served: tuple[Served, ...]
    seconds: float


def drive(
    server: Server,
    requests: Iterable[Request],
    loop: ClosedLoop | OpenLoop,
    params: SamplingParams,
    *,
    time: Time | None = None,
) -> Run:
    """Serve `requests` to their end. Each has the seed of `params` plus its number. What a drafter
    learnt from earlier runs, of the same requests perhaps, is forgotten first.

    A request that fails or is rejected is recorded, and the rest goes on.
    """
    server.forget()
    driver = _Driver(server, _Source(iter(requests)), params, time or Time())
    try:
        if isinstance(loop, ClosedLoop):
            driver.closed(loop)
        else:
            driver.open(loop)
    finally:
        driver.give_up()
    served = tuple(sorted(driver.served, key=lambda one: one.number))
    return Run(served, driver.now() - driver.gaps)


class _Source:
    """Requests one by one, with a look at the next."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self.next: Request | None = next(requests, None)

    def take(self) -> Request:
        if self.next is None:
            raise ContractError("no request is left")
        taken, self.next = self.next, next(self._requests, None)
        return taken


@dataclass(slots=True)
class _Driver:
    server: Server
    source: _Source
    params: SamplingParams
    time: Time
    served: list[Served] = field(default_factory=list[Served])
    gaps: float = 0.0
    _running: list[tuple[Served, Handle]] = field(default_factory=list[tuple[Served, Handle]])
    _number: int = 0
    _began: float = 0.0

    def __post_init__(self) -> None:
        self._began = self.time.clock()

    def now(self) -> float:
        return self.time.clock() - self._began

    def closed(self, loop: ClosedLoop) -> None:
        while True:
            while len(self._running) < loop.num_in_flight and self._may_begin(loop):
                if loop.gap_seconds and self._number:
                    self._idle(loop.gap_seconds)
                taken = self._submit(self.source.take(), arrived=self.now())
                if not taken and self._running:
                    # A full queue has room again when something has ended.
                    break
            if not self._running:
                return
            self._advance()

    def open(self, loop: OpenLoop) -> None:
        while self.source.next is not None or self._running:
            while (
                len(self._running) < loop.max_in_flight
                and self.source.next is not None
                and self.source.next.arrival_seconds <= self.now()
            ):
                request = self.source.take()
                self._submit(request, arrived=request.arrival_seconds)
            if self._running:
                self._advance()
            elif self.source.next is not None:
                self.time.sleep(max(self.source.next.arrival_seconds - self.now(), 0.0))

    def give_up(self) -> None:
        """After an interrupt or a defect: leave nothing running."""
        for _, handle in self._running:
            self.server.cancel(handle)
        self._running.clear()

    def _may_begin(self, loop: ClosedLoop) -> bool:
        if self.source.next is None:
            return False
        return loop.duration is None or self.now() < loop.duration

    def _idle(self, seconds: float) -> None:
        before = self.now()
        self.time.sleep(seconds)
        self.gaps += self.now() - before

    def _submit(self, request: Request, *, arrived: float) -> bool:
        """Whether the server took it."""
        params = replace(
            self.params,
            max_tokens=request.max_tokens,
            min_tokens=min(self.params.min_tokens, request.max_tokens),
            seed=(self.params.seed + self._number) % 2**63,
        )
        served = Served(number=self._number, request=request, arrived=arrived, submitted=self.now())
        self._number += 1
        try:
            handle = self.server.submit(request.prompt, params)
        except Exception as error:  # noqa: BLE001 - one request must not end the others
            rejected = isinstance(error, QueueFullError)
            self.served.append(replace(served, reason=_words(error), rejected=rejected))
            return False
        self._running.append((served, handle))
        return True

    def _advance(self) -> None:
        self.server.advance()
        stuck = not self.server.has_work
        still: list[tuple[Served, Handle]] = []
        for served, handle in self._running:
            if handle.done:
                self.served.append(_ended(served, handle))
            elif stuck:
                reason = "the engine has nothing to do, and the request has not ended"
                self.served.append(replace(served, reason=reason))
            else:
                still.append((served, handle))
        self._running = still


def _ended(served: Served, handle: Handle) -> Served:
    try:
        return replace(served, result=handle.result())
    except Exception as error:  # noqa: BLE001 - it is the request's failure, told in the results
        return replace(served, reason=_words(error))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
