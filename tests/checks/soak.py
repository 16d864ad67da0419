"""Many requests on one LLM, as careless callers send them, and what they leave behind.

Requests come alone, in batches and as streams; some are cancelled or let go, some have a callback
that raises, and some calls are interrupted by a signal of another thread, at any moment. Every text
that comes to its end is compared with that of an undisturbed run.

    scripts/soak --requests 100000 --json results.json
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from types import FrameType
from typing import Annotated

from cyclopts import App, Parameter

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.request import RequestHandle
from outrider.core.errors import OutriderError
from outrider.plugins.measure.turns import provenance
from outrider_lab.measure.store import write_json

SCHEDULES = ("single", "pd", "pdv", "ssd")
PROMPTS = (
    "def f(x):",
    "for i in range(10):\n    print(i)\nfor i",
    "import os, sys",
    "x = [1, 2, 3]\n" * 6,
    "while True:",
    "class A:\n    def __init__(self",
)
PARAMS = (
    SamplingParams(max_tokens=4),
    SamplingParams(max_tokens=8, stop=("\n\n", "zz")),
    SamplingParams(max_tokens=6, temperature=0.8, seed=7),
    SamplingParams(max_tokens=3, repetition_penalty=1.2),
)
# Shares of all requests.
CANCELLED, LET_GO, RAISING, INTERRUPTED = 0.1, 0.05, 0.05, 0.05
# Until caches, pools and the interpreter's own memory have their size.
WARM_UP = 0.2
FEWEST = 400
_MIB = 2**20


class PanicError(BaseException):
    """No Exception, as a panic of a library is none."""


@dataclass(slots=True)
class Soak:
    """Counts; `resident_mib` is read ten times after the warm-up, at equal distances."""

    schedule: str
    requests: int = 0
    completed: int = 0
    wrong: int = 0
    cancelled: int = 0
    let_go: int = 0
    raised: int = 0
    interrupted: int = 0
    lost_pages: int = 0
    seconds: float = 0.0
    first_threads: int = 0
    last_threads: int = 0
    resident_mib: list[float] = field(default_factory=list[float])

    @property
    def growth_mib(self) -> float:
        """Of the resident memory for ten thousand requests, by least squares over what was read."""
        sizes = self.resident_mib
        if len(sizes) < 2:
            return 0.0
        steps = [i - (len(sizes) - 1) / 2 for i in range(len(sizes))]
        slope = sum(s * m for s, m in zip(steps, sizes, strict=True)) / sum(s * s for s in steps)
        return slope * 10_000 / (self.requests * (1 - WARM_UP) / len(sizes))


class Interrupter:
    """Sends SIGINT to this process now and then, told only while `armed`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._armed = rng, False
        self._wanted = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @contextmanager
    def running(self) -> Generator[None]:
        before = signal.signal(signal.SIGINT, self._handle)
        self._thread.start()
        try:
            yield
        finally:
            self._over = True
            self._wanted.set()
            self._thread.join()
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def armed(self) -> Generator[None]:
        """One signal soon; it may come too late, and then means nothing."""
        self._armed = True
        self._wanted.set()
        try:
            yield
        finally:
            self._armed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def _serve(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._over:
                return
            sleep(self._rng.random() * 0.008)
            os.kill(os.getpid(), signal.SIGINT)


@dataclass(slots=True)
class Caller:
    """Sends requests to `llm` until `soak` has counted `most`."""

    llm: LLM
    soak: Soak
    interrupter: Interrupter
    rng: random.Random
    most: int
    wanted: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])

    def learn(self) -> None:
        """The texts of undisturbed runs."""
        for p, prompt in enumerate(PROMPTS):
            for q, params in enumerate(PARAMS):
                self.wanted[p, q] = self.llm.generate(prompt, params)[0].text

    def step(self) -> None:
        """One call, or a few that belong together."""
        call = self.rng.choice((self._batch, self._batch, self._stream, self._tickets))
        if self.rng.random() >= INTERRUPTED * 2:  # a call has two requests on average
            call()
            return
        with suppress(KeyboardInterrupt), self.interrupter.armed():
            before = self.soak.interrupted
            self.soak.interrupted += 1
            call()
            self.soak.interrupted = before

    def _some(self, count: int) -> list[tuple[int, int]]:
        self.soak.requests += count
        size = len(PROMPTS), len(PARAMS)
        return [(self.rng.randrange(size[0]), self.rng.randrange(size[1])) for _ in range(count)]

    def _check(self, kind: tuple[int, int], text: str) -> None:
        self.soak.completed += 1
        self.soak.wrong += text != self.wanted[kind]

    def _batch(self) -> None:
        kinds = self._some(self.rng.randint(1, 4))
        results = self.llm.generate([PROMPTS[p] for p, _ in kinds], [PARAMS[q] for _, q in kinds])
        for kind, result in zip(kinds, results, strict=True):
            self._check(kind, result.text)

    def _stream(self) -> None:
        ((p, q),) = self._some(1)
        stream = self.llm.stream(PROMPTS[p], PARAMS[q])
        if self.rng.random() < LET_GO * 4:  # a quarter of the calls are streams
            next(stream)
            self.soak.let_go += 1
            return
        self._check((p, q), "".join(event.text for event in stream))

    def _tickets(self) -> None:
        kinds = self._some(self.rng.randint(1, 4))
        tickets: list[RequestHandle] = []
        try:
            for p, q in kinds:
                tickets.append(self.llm.submit(PROMPTS[p], PARAMS[q], allowed=self._mask()))
            while not all(ticket.done for ticket in tickets):
                self.llm.advance()
                if self.rng.random() < CANCELLED:
                    self.llm.cancel(self.rng.choice(tickets))
        except BaseException:
            for ticket in tickets:
                self.llm.cancel(ticket)
            raise
        for kind, ticket in zip(kinds, tickets, strict=True):
            self._told(kind, ticket)

    def _told(self, kind: tuple[int, int], ticket: RequestHandle) -> None:
        if ticket.reader.was_cancelled:
            self.soak.cancelled += 1
            return
        try:
            self._check(kind, ticket.result().text)
        except (OutriderError, ZeroDivisionError):
            self.soak.raised += 1

    def _mask(self) -> Callable[[Sequence[int]], None] | None:
        if self.rng.random() >= RAISING * 2:
            return None
        left = self.rng.randrange(4)
        kind = self.rng.choice((PanicError, SystemExit, ZeroDivisionError, KeyboardInterrupt))

        def mask(_: Sequence[int]) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise kind("planted")

        return mask


def soak(schedule: str, num_requests: int, seed: int = 1) -> Soak:
    """`num_requests` on one LLM with this schedule."""
    config = EngineConfig(
        schedule=schedule, batch_size=4, k=3, hybrid_threshold=0, prefill_chunk=32, device="cpu"
    )
    llm, found, rng = LLM(config=config), Soak(schedule), random.Random(seed)
    interrupter = Interrupter(random.Random(seed))
    caller = Caller(llm, found, interrupter, rng, num_requests)
    caller.learn()
    _settle(llm)
    free, began = llm.free_tokens, perf_counter()
    with interrupter.running():
        read_at = WARM_UP * num_requests
        while found.requests < num_requests:
            caller.step()
            if found.requests >= read_at:
                _settle(llm)
                found.lost_pages = max(found.lost_pages, free - llm.free_tokens)
                found.resident_mib.append(_resident_mib())
                found.first_threads = found.first_threads or threading.active_count()
                read_at += (1 - WARM_UP) * num_requests / 10
    found.seconds = perf_counter() - began
    _settle(llm)
    found.lost_pages = max(found.lost_pages, free - llm.free_tokens)
    found.last_threads = threading.active_count() + 1  # the one that sent signals
    for (p, q), text in caller.wanted.items():
        found.wrong += llm.generate(PROMPTS[p], PARAMS[q])[0].text != text
    llm.close()
    return found


def _settle(llm: LLM) -> None:
    """What was let go ends with the next job."""
    gc.collect()
    llm.advance()
    while llm.has_work or llm._engine.executor.busy:  # pyright: ignore[reportPrivateUsage]
        llm.advance()


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / _MIB, 2)


def main(
    *,
    requests: Annotated[int, Parameter(help="over all schedules")] = 100_000,
    seed: int = 1,
    output: Annotated[Path | None, Parameter("--json", help="write the figures here")] = None,
) -> int:
    """Careless requests on one LLM."""
    if requests < FEWEST:
        sys.exit(f"--requests {requests}: fewer than {FEWEST} show nothing")
    logging.getLogger("outrider").setLevel(logging.ERROR)
    runs: list[Soak] = []
    told: list[dict[str, object]] = []
    for name in SCHEDULES:
        run = soak(name, requests // len(SCHEDULES), seed)
        runs.append(run)
        told.append({**asdict(run), "growth_mib_per_10k": round(run.growth_mib, 3)})
        sys.stdout.write(json.dumps(told[-1]) + "\n")
        sys.stdout.flush()
        if output is not None:
            write_json(
                output,
                {"benchmark": "careless", "provenance": provenance(), "cells": told},
            )
    return int(any(run.wrong or run.lost_pages or run.growth_mib > 1 for run in runs))


if __name__ == "__main__":
    app = App(name="scripts/soak", version_flags=(), result_action="return_value")
    app.default(main)
    sys.exit(app() or 0)
