"""Timers on a CUDA device: they measure the device's work, and only reading waits for it.

Shapes:  D = rows and columns of the matrix that keeps the device busy.
"""

from __future__ import annotations

from time import perf_counter

import pytest
import torch
from torch import Tensor

from outrider.plugins.measure.timers import DeviceTimer, DeviceTimers, synced_seconds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module", name="matrix_DD")
def square() -> Tensor:
    """Warmed up: the first product of a process loads libraries."""
    matrix_DD = torch.eye(4096, device="cuda")
    work(matrix_DD, 1)
    torch.cuda.synchronize()
    return matrix_DD


def work(matrix_DD: Tensor, num_products: int) -> None:
    """Ask for some milliseconds of work a product; returns at once."""
    for _ in range(num_products):
        torch.mm(matrix_DD, matrix_DD)


def is_busy() -> bool:
    return not torch.cuda.current_stream().query()


def test_cuda_synced_seconds_waits_for_the_device(matrix_DD: Tensor) -> None:
    started = synced_seconds("cuda")
    work(matrix_DD, 20)
    assert is_busy()
    ended = synced_seconds("cuda")
    assert not is_busy()
    assert ended - started > 1e-3


def test_cuda_is_what_is_timed_where_nothing_is_named(matrix_DD: Tensor) -> None:
    work(matrix_DD, 20)
    synced_seconds()
    assert not is_busy()
    assert repr(DeviceTimer()) == "DeviceTimer(cuda: not started)"


def test_cuda_timer_measures_the_work_and_not_the_asking(matrix_DD: Tensor) -> None:
    started = perf_counter()
    with DeviceTimer("cuda") as timer:
        work(matrix_DD, 20)
    asked_ms = 1e3 * (perf_counter() - started)
    assert is_busy()
    assert timer.elapsed_ms > asked_ms


def test_cuda_timer_agrees_with_a_synchronised_host_clock(matrix_DD: Tensor) -> None:
    started = synced_seconds("cuda")
    with DeviceTimer("cuda") as timer:
        work(matrix_DD, 20)
    host_ms = 1e3 * (synced_seconds("cuda") - started)
    assert 0.5 * host_ms < timer.elapsed_ms <= 1.01 * host_ms


def test_cuda_reading_waits_for_its_own_work_only(matrix_DD: Tensor) -> None:
    with DeviceTimer("cuda") as timer:
        work(matrix_DD, 1)
    work(matrix_DD, 50)
    assert timer.elapsed_ms > 0
    assert is_busy()


def test_cuda_timer_takes_a_device_index(matrix_DD: Tensor) -> None:
    with DeviceTimer("cuda:0") as timer:
        work(matrix_DD, 1)
    assert timer.elapsed_ms > 0
    assert repr(timer).startswith("DeviceTimer(cuda:0: ")


def test_cuda_stages_start_and_stop_without_waiting(matrix_DD: Tensor) -> None:
    timers = DeviceTimers("cuda")
    for _ in range(3):
        with timers.time("draft"):
            work(matrix_DD, 5)
        with timers.time("verify"):
            work(matrix_DD, 10)
    assert is_busy()
    found = timers.summary()
    assert not is_busy()
    assert found["verify"] > found["draft"] > 0


def test_cuda_runs_of_one_stage_add_up(matrix_DD: Tensor) -> None:
    timers = DeviceTimers("cuda")
    with timers.time("all"):
        for _ in range(10):
            with timers.time("part"):
                work(matrix_DD, 2)
    assert timers.count("part") == 10
    assert 0.5 * timers.elapsed_ms("all") < timers.elapsed_ms("part")
    assert timers.elapsed_ms("part") <= 1.01 * timers.elapsed_ms("all")


def test_cuda_runs_that_are_over_become_numbers_before_they_are_read(matrix_DD: Tensor) -> None:
    timers = DeviceTimers("cuda")
    for _ in range(200):
        with timers.time("part"):
            work(matrix_DD[:8, :8], 1)
        torch.cuda.synchronize()
    before = timers.elapsed_ms("part")
    assert timers.elapsed_ms("part") == before > 0
    assert repr(timers).endswith("in 200)")


def test_cuda_reset_forgets_events_that_are_not_over(matrix_DD: Tensor) -> None:
    timers = DeviceTimers("cuda")
    with timers.time("part"):
        work(matrix_DD, 20)
    timers.reset()
    assert timers.summary() == {}
    assert timers.names == ()
