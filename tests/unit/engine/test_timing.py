"""Timers on the host clock: what adds up, what is refused, what they look like."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import pytest
import torch

from doubles.clocks import FakeClock
from outrider.plugins.measure.timers import DeviceTimer, DeviceTimers, TimerError, synced_seconds


@dataclass(slots=True)
class FakeEvent:
    """What CUDA events do, on a device whose clock is `DEVICE` and that is done up to `DONE`."""

    enable_timing: bool
    at: float = 0.0

    def record(self, stream: str) -> None:
        assert stream == "the current stream"
        assert self.enable_timing
        self.at = DEVICE.seconds

    def query(self) -> bool:
        return self.at <= DONE.seconds

    def synchronize(self) -> None:
        WAITS.append(self.at)
        DONE.seconds = max(DONE.seconds, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query()
        return 1e3 * (end.at - self.at)


DEVICE, DONE = FakeClock(), FakeClock()
WAITS: list[float] = []


def current_stream(device: torch.device) -> str:
    assert device.type == "cuda"
    return "the current stream"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device, as far as timers can see."""
    DEVICE.seconds = DONE.seconds = 0.0
    WAITS.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)


def run(timers: DeviceTimers, name: str, clock: FakeClock, seconds: float) -> None:
    with timers.time(name):
        clock.advance(seconds)


def pair() -> tuple[DeviceTimers, FakeClock]:
    clock = FakeClock()
    return DeviceTimers("cpu", clock=clock), clock


def test_synced_seconds_goes_with_the_host_clock() -> None:
    before = perf_counter()
    assert before <= synced_seconds("cpu") <= perf_counter()


def test_a_timer_measures_its_block() -> None:
    clock = FakeClock()
    with DeviceTimer("cpu", clock=clock) as timer:
        clock.advance(0.25)
    clock.advance(9)
    assert timer.elapsed_ms == 250


def test_a_timer_is_not_read_before_it_started() -> None:
    with pytest.raises(TimerError, match="not started"):
        _ = DeviceTimer("cpu").elapsed_ms


def test_a_timer_is_not_read_while_it_runs() -> None:
    with (
        DeviceTimer("cpu") as timer,
        pytest.raises(TimerError, match="still running") as caught,
    ):
        _ = timer.elapsed_ms
    assert caught.value.hint


def test_a_timer_does_not_start_twice() -> None:
    timer = DeviceTimer("cpu")
    with timer, pytest.raises(TimerError, match="runs already"):
        timer.__enter__()


def test_a_timer_stops_when_its_block_fails() -> None:
    clock = FakeClock()
    timer = DeviceTimer("cpu", clock=clock)
    with suppress(KeyError), timer:
        clock.advance(1)
        raise KeyError
    assert timer.elapsed_ms == 1000


def test_runs_of_one_stage_add_up() -> None:
    timers, clock = pair()
    for seconds in (0.5, 0.25):
        run(timers, "draft", clock, seconds)
    assert timers.elapsed_ms("draft") == 750
    assert timers.count("draft") == 2


def test_stages_may_overlap() -> None:
    timers, clock = pair()
    timers.start("draft")
    clock.advance(1)
    timers.start("verify")
    clock.advance(1)
    timers.stop("draft")
    clock.advance(1)
    timers.stop("verify")
    assert timers.summary() == {"draft": 2000, "verify": 2000}


def test_a_stage_does_not_start_twice() -> None:
    timers, _ = pair()
    timers.start("draft")
    with pytest.raises(TimerError, match="'draft' runs already"):
        timers.start("draft")


def test_a_stage_that_was_not_started_does_not_stop() -> None:
    timers, clock = pair()
    run(timers, "draft", clock, 1)
    with pytest.raises(TimerError, match="'draft' was not started"):
        timers.stop("draft")


def test_reset_forgets_everything() -> None:
    timers, clock = pair()
    run(timers, "draft", clock, 1)
    timers.start("verify")
    timers.reset()
    assert (timers.names, timers.count("draft"), timers.summary()) == ((), 0, {})
    run(timers, "verify", clock, 2)
    assert timers.summary() == {"verify": 2000}


@pytest.mark.usefixtures("events")
def test_events_are_read_when_asked_and_not_before() -> None:
    with DeviceTimer() as timer:
        DEVICE.advance(0.25)
    DEVICE.advance(5)
    assert WAITS == []
    assert timer.elapsed_ms == 250
    assert WAITS == [0.25]


@pytest.mark.usefixtures("events")
def test_stages_of_events_add_up_without_waiting() -> None:
    timers = DeviceTimers()
    for seconds in (0.5, 1.0, 2.0):
        run(timers, "draft", DEVICE, seconds)
    assert WAITS == []
    assert timers.summary() == {"draft": 3500}
    assert timers.elapsed_ms("draft") == 3500
    assert WAITS == [0.5, 1.5, 3.5]


@pytest.mark.usefixtures("events")
def test_events_that_are_over_are_read_by_the_next_stop() -> None:
    timers = DeviceTimers()
    run(timers, "draft", DEVICE, 1)
    DONE.seconds = 1
    run(timers, "draft", DEVICE, 2)
    assert WAITS == [1.0]  # the event of the first run, which was over
    assert timers.elapsed_ms("draft") == 3000
