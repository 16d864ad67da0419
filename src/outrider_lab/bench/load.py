"""The load generator: hands requests in, keeps the engine going, notes when tokens arrive.

A closed loop keeps at most `num_in_flight` requests in flight; a new one is handed in when one has
ended. With a gap it waits that long, with nothing in flight, before it hands in the next: that is
level 0 of the benchmarks, where an engine is woken for every request. An open loop hands requests
in at their arrivals, whatever the engine does; at most `max_in_flight` are let in, and the others
wait at the door. Latencies are from the arrival on, else a slow engine would seem fast because it
was asked less often (coordinated omission). Time is an argument, so tests decide what time it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outrider.api.result import GenerationResult
from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.errors import ContractError, QueueFullError
from outrider.core.params import SamplingParams
from outrider.metrics import inter_token_latencies, percentile, round_latencies
from outrider_lab.bench.requests import Request
from outrider_lab.measure.frame import grouped
from outrider_lab.measure.machine import digest_of


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


Loop = ClosedLoop | OpenLoop


def most_in_flight(loop: Loop) -> int:
    return loop.num_in_flight if isinstance(loop, ClosedLoop) else loop.max_in_flight


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

    @property
    def failure(self) -> str | None:
        """How many requests ended badly, and what the first one did of."""
        reasons = [one.reason for one in self.served if one.reason is not None]
        if not reasons:
            return None
        return f"{len(reasons)} of {len(self.served)} requests failed: {reasons[0]}"

    @property
    def digest(self) -> str | None:
        """Of the token ids; None if a request has none."""
        results = [one.result for one in self.served if one.result is not None]
        whole = results and len(results) == len(self.served)
        return digest_of([result.token_ids for result in results]) if whole else None


def drive(
    server: Server,
    requests: Iterable[Request],
    loop: Loop,
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
            self.params.numbered(self._number),
            max_tokens=request.max_tokens,
            min_tokens=min(self.params.min_tokens, request.max_tokens),
        )
        served = Served(number=self._number, request=request, arrived=arrived, submitted=self.now())
        self._number += 1
        try:
            handle = self.server.submit(request.prompt, params)
        except Exception as error:  # noqa: BLE001 - one request must not end the others
            self.served.append(_failed(served, error))
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
        return _failed(served, error)


def _failed(served: Served, error: Exception) -> Served:
    rejected = isinstance(error, QueueFullError)
    return replace(served, reason=f"{type(error).__name__}: {error}", rejected=rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadNumbers:
    """What a run under load came to, computed from requests and their rounds.

    - ITL is the inter-token latency: every token's share of its round, without the first round
      (outrider/metrics.py). Its percentiles are over all tokens of all requests.
    - TTFT goes from a request's arrival to its first token, end-to-end to its last one.
    - A round latency is the pause between two arrivals of tokens, as a reader sees it.
    - Cumulative token time runs from a request's arrival to each of its tokens. It is no latency of
      a token and grows with the length of the text; some benchmarks print its percentile 95 as
      "Token P95".
    - Throughput is emitted tokens of requests that ended well, over the seconds of the run.
    - Of the rounds whose drafter drafts ahead, `num_hits` had their draft ready when it was asked
      for, and emitted `hit_tokens`; the others `miss_tokens`.

    Milliseconds are over requests that ended well; None where nothing tells. A pass that several
    requests took part in is counted once. `draft_ms` is the mean over passes that drafted and
    `verify_ms` over passes that read no prompt; `mean_batch` is the mean number of requests in such
    a pass. `num_draft_steps` adds up the longest draft of every pass.
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
    def p_hit(self) -> float | None:
        num = self.num_hits + self.num_misses
        return self.num_hits / num if num else None


def tally(run: Run) -> LoadNumbers:
    good = [(served, served.result) for served in run.served if served.result is not None]
    results = [result for _, result in good]
    times = [served.token_seconds for served, _ in good if served.token_seconds]
    first, last = [t[0] for t in times], [t[-1] for t in times]
    gaps = [gap for t in times for gap in inter_token_latencies(t)]
    pauses = [pause for t in times for pause in round_latencies(t)[1:]]
    rounds = [trace for result in results for trace in result.rounds]
    passes = list(grouped(rounds, key=lambda trace: trace.pass_index).values())
    decoding = [group for group in passes if not any(trace.num_prompt_tokens for trace in group)]
    drafting = [group[0].draft_seconds for group in passes if any(t.num_drafted for t in group)]
    ahead = [trace for trace in rounds if trace.hit is not None and trace.num_emitted]
    hits = [trace for trace in ahead if trace.hit]
    hit_tokens = sum(trace.num_emitted for trace in hits)
    return LoadNumbers(
        num_requests=len(run.served),
        num_ok=len(good),
        num_rejected=sum(served.rejected for served in run.served),
        num_tokens=sum(result.num_tokens for result in results),
        seconds=round(run.seconds, 9),
        itl_p50_ms=_percentile_ms(gaps, 50),
        itl_p95_ms=_percentile_ms(gaps, 95),
        ttft_p50_ms=_percentile_ms(first, 50),
        ttft_p95_ms=_percentile_ms(first, 95),
        total_mean_ms=_mean_ms(last),
        total_p95_ms=_percentile_ms(last, 95),
        round_p50_ms=_percentile_ms(pauses, 50),
        round_p95_ms=_percentile_ms(pauses, 95),
        cumulative_p95_ms=_percentile_ms([moment for t in times for moment in t], 95),
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
        hit_tokens=hit_tokens,
        miss_tokens=sum(trace.num_emitted for trace in ahead) - hit_tokens,
    )


def _percentile_ms(values: Sequence[float], percent: float) -> float | None:
    return _ms(percentile(values, percent)) if values else None


def _mean_ms(values: Sequence[float]) -> float | None:
    return _ms(statistics.fmean(values)) if values else None


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)
