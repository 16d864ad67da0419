"""Signals at every line that a short run passes: told once, and the LLM is as it was before.

Ctrl-C, and an alarm whose handler raises an Exception. Every line of `api`, `engine`, `sched`,
`cache` and of what defers signals is a point. A stride of them is in the gate, all are with
`-m deep`.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any

import pytest

import outrider
from doubles.bell import Bell
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.request import RequestHandle
from outrider.core import process

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

ROOT = Path(outrider.__file__).parent
PLACES = ("api/", "engine/", "sched/", "cache/", "core/process.py")
WATCHED = tuple(str(ROOT / place) for place in PLACES)
PROMPTS = ("def f(x):", "for i in range(", "import os, sys")
PARAMS = SamplingParams(max_tokens=6)
SCHEDULES = ("single", "pd", "pdv", "ssd")
STRIDE = 127


class AlarmError(Exception):
    """Raised by the program's handler of SIGALRM, as the timeouts of tests are."""


@pytest.fixture
def alarmed() -> Iterator[Bell]:
    """SIGALRM raises."""
    bell = Bell(AlarmError, armed=True)
    ring = bell.ring
    before = signal.signal(signal.SIGALRM, ring)
    yield bell
    bell.armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert signal.getsignal(signal.SIGALRM) is ring
    signal.signal(signal.SIGALRM, before)


@dataclass
class Tracer:
    """Counts the lines that the main thread passes for the first time, and raises the signal at
    number `at`, `presses` times."""

    at: int = -1
    presses: int = 1
    number: int = signal.SIGINT
    seen: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    where: tuple[str, int] | None = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        del event, arg
        return self.line if frame.f_code.co_filename.startswith(WATCHED) else None

    def line(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        del arg
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in self.seen:
            self.seen.add(place)
            if len(self.seen) == self.at:
                self.where = place
                for _ in range(self.presses):
                    signal.raise_signal(self.number)
        return self.line


@contextmanager
def traced(tracer: Tracer) -> Generator[None]:
    gc.collect()
    gc.disable()  # or other lines would pass
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


def generating(llm: LLM) -> None:
    llm.generate(PROMPTS, [PARAMS, PARAMS, SamplingParams(max_tokens=4, stop=("zz",))])


def streaming(llm: LLM) -> None:
    first, second = llm.stream(PROMPTS[0], PARAMS), llm.stream(PROMPTS[1], PARAMS)
    for _ in zip(first, second, strict=False):
        pass
    second.close()


def handing_in(llm: LLM) -> None:
    tickets: list[RequestHandle] = []
    try:
        for prompt in PROMPTS:
            tickets.append(llm.submit(prompt, PARAMS))  # noqa: PERF401 - those before are kept
        llm.advance()
        llm.cancel(tickets[1])
        while llm.has_work:
            llm.advance()
        for ticket in tickets:
            ticket.result()
    finally:
        # As a caller would that goes on: what was handed in stays until it is cancelled.
        sys.settrace(None)
        for ticket in tickets:
            llm.cancel(ticket)


RUNS = (generating, streaming, handing_in)


@pytest.fixture(scope="module", params=SCHEDULES)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """One for all points: what one interrupt leaves behind, the next would find."""
    config = EngineConfig(
        schedule=request.param, batch_size=2, k=2, hybrid_threshold=0, prefill_chunk=16
    )
    llm = LLM(config=config)
    for run in RUNS:  # imports and caches
        run(llm)
    gc.collect()
    # What is there stays, so collections take no time. It stays frozen afterwards as well: among it
    # are thousands of collected tests, which each later collection would look at for seconds.
    gc.freeze()
    yield llm
    llm.close()


def settle(llm: LLM) -> None:
    """What was let go ends with the next job, and what was drafted ahead of nothing ends."""
    gc.collect()
    llm.advance()
    while llm._engine.executor.busy:  # pyright: ignore[reportPrivateUsage]
        llm.advance()


def sweep(
    llm: LLM,
    run: Callable[[LLM], None],
    stride: int,
    presses: int = 1,
    number: int = signal.SIGINT,
) -> tuple[int, int]:
    """How many points were tried, and how many interrupts were told."""
    canary = llm.generate(PROMPTS[0], PARAMS)[0].text
    settle(llm)
    free, tried, told, at = llm.free_tokens, 0, 0, 1
    handler = signal.getsignal(number)
    while True:
        tracer = Tracer(at, presses, number)
        try:
            with traced(tracer):
                run(llm)
        except (KeyboardInterrupt, AlarmError):
            told += 1
        if tracer.where is None:
            return tried, told
        tried += 1
        assert signal.getsignal(number) is handler, tracer.where
        settle(llm)
        assert not llm.has_work, tracer.where
        assert llm.free_tokens == free, tracer.where
        assert llm.generate(PROMPTS[0], PARAMS)[0].text == canary, tracer.where
        settle(llm)
        assert llm.free_tokens == free, tracer.where
        at += stride


# Every schedule and every run, so that each line of lanes and of calls is passed by one of them.
# Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_an_interrupt_anywhere_leaves_the_llm_as_it_was(
    llm: LLM, run: Callable[[LLM], None]
) -> None:
    tried, told = sweep(llm, run, STRIDE)
    assert tried > 5
    assert told == tried


@pytest.mark.covering(1)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_second_interrupt_anywhere_leaves_it_so_too(
    llm: LLM, run: Callable[[LLM], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told in the midst of what may hang, and nowhere else."""
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.0)
    tried, told = sweep(llm, run, STRIDE, presses=2)
    assert tried > 5
    assert told == tried


@pytest.mark.sample(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_an_alarm_anywhere_leaves_the_llm_as_it_was(
    llm: LLM,
    run: Callable[[LLM], None],
    presses: int,
    alarmed: Bell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del alarmed
    if presses == 2:
        monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.0)
    tried, told = sweep(llm, run, STRIDE, presses, signal.SIGALRM)
    assert tried > 5
    assert told == tried


@pytest.mark.deep
@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_signal_at_each_line_leaves_the_llm_as_it_was(
    llm: LLM,
    run: Callable[[LLM], None],
    number: signal.Signals,
    presses: int,
    alarmed: Bell,
    record_testsuite_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del alarmed
    if presses == 2:
        monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.0)
    tried, told = sweep(llm, run, 1, presses, number)
    what = f"{llm.config.schedule} {run.__name__} {number.name} {presses}"
    record_testsuite_property(what, f"{tried} points, {told} told")
    assert tried > 100
    assert told == tried


def test_a_handler_of_the_program_is_told_instead() -> None:
    heard: list[int] = []

    def handler(number: int, _: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        llm = LLM()
        wanted = llm.generate(PROMPTS[0], PARAMS)[0].text

        def mask(_: object) -> None:
            signal.raise_signal(signal.SIGINT)

        assert llm.generate(PROMPTS[0], PARAMS, allowed=mask)[0].text == wanted
        assert heard
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_ends_a_callback_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.0)
    llm = LLM()
    free, wanted = llm.free_tokens, llm.generate(PROMPTS[0], PARAMS)[0].text
    began = monotonic()

    def hanging(_: object) -> None:
        while monotonic() < began + 60:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[0], PARAMS, allowed=hanging)
    assert monotonic() < began + 30
    assert llm.generate(PROMPTS[0], PARAMS)[0].text == wanted
    assert llm.free_tokens == free


def test_alarms_at_random_moments_leave_the_llm_as_it_was(alarmed: Bell) -> None:
    """Each ends the call that it rings in, or the next one, and no request of others."""
    alarmed.armed, alarmed.once = False, True
    llm, moments, num_rung = LLM(config=EngineConfig(k=2, batch_size=2)), random.Random(8), 0
    free, wanted = llm.free_tokens, [one.text for one in llm.generate(PROMPTS[:2], PARAMS)]
    for trial in range(24):
        ticket = llm.submit(PROMPTS[1], PARAMS) if trial % 3 == 2 else None
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-4, 1.5e-2), 1e-2)
        for _ in range(3):
            try:
                alarmed.armed = True
                if trial % 3 == 0:
                    llm.generate(PROMPTS[:2], PARAMS)
                elif trial % 3 == 1:
                    list(llm.stream(PROMPTS[0], PARAMS))
                else:
                    llm.advance()
                alarmed.armed = False
            except AlarmError:
                num_rung += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        if ticket is not None:
            while not ticket.done:
                llm.advance()
            assert ticket.result().text == wanted[1]
        assert llm.generate(PROMPTS[0], PARAMS)[0].text == wanted[0]
        settle(llm)
        assert llm.free_tokens == free
    assert num_rung > 5


def test_an_alarm_that_rings_once_ends_a_callback_that_hangs(
    alarmed: Bell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes every Exception for its own, too."""
    del alarmed
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.05)
    llm, began = LLM(), monotonic()
    free, wanted = llm.free_tokens, llm.generate(PROMPTS[0], PARAMS)[0].text

    def hanging(_: object) -> None:
        while monotonic() < began + 60:
            with suppress(Exception):
                sleep(60)

    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(AlarmError):
        llm.generate(PROMPTS[0], PARAMS, allowed=hanging)
    assert monotonic() < began + 30
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL
    assert llm.generate(PROMPTS[0], PARAMS)[0].text == wanted
    assert llm.free_tokens == free


def test_other_threads_are_never_interrupted() -> None:
    llm, texts = LLM(), list[str]()
    wanted = llm.generate(PROMPTS[0], PARAMS)[0].text

    def work() -> None:
        texts.extend(llm.generate(PROMPTS[0], PARAMS)[0].text for _ in range(20))

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        pressed = False

        def pressing(_: object) -> None:
            nonlocal pressed
            if not pressed:
                pressed = True
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], PARAMS, allowed=pressing)
    thread.join()
    assert texts == [wanted] * 20
