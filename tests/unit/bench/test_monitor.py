"""A monitor reads what there is, and says None for what there is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from doubles.clocks import FakeClock
from outrider_lab.measure.machine import (
    Gauges,
    Monitor,
    Reading,
    Usage,
    machine_gauges,
    resident_bytes,
)


def spin(seconds: float) -> None:
    """Use CPU time, not the clock's, so that a busy machine changes nothing."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_short_run_has_two_readings_and_its_own_cpu_time() -> None:
    gauges = Gauges()
    with Monitor(gauges=gauges, interval_seconds=60) as monitor:
        spin(0.05)
    first, last = monitor.usage.readings
    assert first.cpu_percent is None
    assert last.cpu_percent is not None
    assert last.cpu_percent * last.seconds / 100 >= 0.05
    assert first.rss_bytes


def test_readings_go_on_while_the_body_works() -> None:
    enough = threading.Event()
    numbers = count()

    def free_tokens() -> int:
        number = next(numbers)
        if number == 3:
            enough.set()
        return 100 - number

    with Monitor(gauges=Gauges(), free_tokens=free_tokens, interval_seconds=0.001) as monitor:
        assert enough.wait(30)
    tokens = monitor.usage.series("free_tokens")
    assert tokens[:4] == [100, 99, 98, 97]
    moments = [reading.seconds for reading in monitor.usage.readings]
    assert moments == sorted(moments)
    assert monitor.usage.summary()["least_free_tokens"] == tokens[-1]


def test_the_thread_ends_with_the_body_even_when_it_fails() -> None:
    def broken() -> Iterator[None]:
        with Monitor(gauges=Gauges(), interval_seconds=0.001):
            yield
            raise RuntimeError("the run failed")

    body = broken()
    next(body)
    assert any(thread.name == "outrider-monitor" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="the run failed"):
        next(body)
    assert not any(thread.name == "outrider-monitor" for thread in threading.enumerate())


def test_cpu_percent_is_cpu_time_over_the_clock() -> None:
    clock, cpu = FakeClock(), iter([1.0, 1.5])
    gauges = Gauges(cpu_seconds=lambda: next(cpu), rss_bytes=lambda: None)
    with Monitor(gauges=gauges, clock=clock, interval_seconds=60) as monitor:
        clock.advance(0.25)
    assert [reading.cpu_percent for reading in monitor.usage.readings] == [None, 200.0]
    assert monitor.usage.summary()["cpu_percent"] == 200.0


def test_a_mean_is_over_time_and_not_over_readings() -> None:
    usage = Usage(
        (Reading(0.0), Reading(1.0, cpu_percent=100.0), Reading(4.0, cpu_percent=20.0)), None
    )
    assert usage.summary()["cpu_percent"] == 40.0


def test_what_nobody_measured_is_none_and_never_0() -> None:
    gauges = Gauges(cpu_seconds=lambda: None, rss_bytes=lambda: None, gpu_why_not="no GPU here")
    with Monitor(gauges=gauges, interval_seconds=60) as monitor:
        pass
    summary = monitor.usage.summary()
    assert summary.pop("seconds") is not None
    assert set(summary.values()) == {None}
    assert monitor.usage.gpu_why_not == "no GPU here"
    assert Usage((), None).summary()["cpu_percent"] is None


def test_figures_of_a_gpu_are_summed_up() -> None:
    values = iter([(10.0, 5), (90.0, 7)])
    gauges = Gauges(gpu=lambda: next(values))
    with Monitor(gauges=gauges, interval_seconds=60) as monitor:
        pass
    summary = monitor.usage.summary()
    assert (summary["gpu_percent"], summary["peak_gpu_percent"]) == (50.0, 90.0)
    assert summary["peak_gpu_memory_bytes"] == 7


def test_a_machine_without_a_gpu_says_so() -> None:
    import torch

    gauges = machine_gauges()
    if torch.cuda.is_available():
        percent, num_bytes = gauges.gpu()
        assert num_bytes
        assert (percent is None) == (gauges.gpu_why_not is not None)
    else:
        assert gauges.gpu() == (None, None)
        assert gauges.gpu_why_not == "there is no CUDA device"


def test_resident_memory_is_none_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert resident_bytes(tmp_path / "statm") is None
    (tmp_path / "statm").write_text("100 3 2 1 0 50 0")
    found = resident_bytes(tmp_path / "statm")
    assert found is not None
    assert found % 3 == 0
