"""The communication benchmark: its fit, what it foresees, and the exercises in step."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from comm import Exercise, Fit, Point, do, fit, measure, pass_seconds
from hypothesis import given
from hypothesis import strategies as st

from doubles.thread_ranks import barrier_comms
from outrider.core.errors import ConfigError, MachineError
from outrider.core.spec import ModelSpec
from outrider.kernels.registry import is_native

pytestmark = pytest.mark.wide

SIZES = [1024 * 4**power for power in range(8)]
SPEC = ModelSpec(
    name="m",
    family="llama",
    vocab_size=96,
    hidden_size=64,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    max_tokens=256,
    num_parameters=1,
    bytes_per_weight=2,
    bytes_per_kv=2,
)


def points(seconds: list[float]) -> list[Point]:
    return [
        Point("all_reduce", num_bytes, 9, time, time / 2, num_bytes)
        for num_bytes, time in zip(SIZES, seconds, strict=True)
    ]


@given(alpha=st.floats(1e-7, 1e-2), beta=st.floats(1e6, 1e12))
def test_the_fit_finds_the_distribution_that_made_the_times(alpha: float, beta: float) -> None:
    found = fit(points([alpha + num_bytes / beta for num_bytes in SIZES]))
    assert found.worst_error < 1e-3
    for num_bytes in SIZES:
        assert math.isclose(found.seconds(num_bytes), alpha + num_bytes / beta, rel_tol=1e-3)


@given(st.lists(st.floats(1e-7, 1.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_a_fit_of_anything_foresees_no_time_below_zero(seconds: list[float]) -> None:
    found = fit(points(seconds))
    assert found.alpha_seconds >= 0
    assert found.seconds(0) <= found.seconds(1e9)
    # Relative squares: the distribution "no time at all" is off by 1 everywhere, so none fits
    # worse.
    errors = [(found.seconds(p.num_bytes) / p.median_seconds - 1) ** 2 for p in points(seconds)]
    assert sum(errors) <= len(SIZES) + 1e-6


def test_times_that_size_does_not_change_have_no_bandwidth() -> None:
    found = fit(points([1e-4] * len(SIZES)))
    assert found.beta_bytes_per_second is None or found.beta_bytes_per_second > 1e15
    assert math.isclose(found.alpha_seconds, 1e-4)


def test_a_pass_sums_twice_a_layer() -> None:
    found = Fit("all_reduce", 1e-5, 1e9, 0.0)
    one_sum = 1e-5 + 3 * 64 * 4 / 1e9
    assert math.isclose(pass_seconds(found, SPEC, 3), 10 * one_sum)
    assert math.isclose(pass_seconds(replace(found, beta_bytes_per_second=None), SPEC, 3), 1e-4)


@pytest.mark.parametrize("exercise", list(Exercise))
def test_all_ranks_do_an_exercise_in_step(exercise: Exercise) -> None:
    size, repeats = 3, 4
    comms = barrier_comms(size)
    given_3 = [torch.full((3,), float(rank + 1)) for rank in range(size)]

    def take_part(rank: int) -> int:
        return len(do(exercise, comms[rank], given_3[rank], repeats))

    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(take_part, range(size))) == [repeats] * size
    # Four sums over three ranks: 6, then three times as much each time.
    summed = [6.0 * 3.0**3] * size
    sent = [1.0, 1.0, 3.0]
    wanted = {Exercise.ALL_REDUCE: summed, Exercise.SEND_RECV: sent}[exercise]
    assert [float(tensor[0]) for tensor in given_3] == wanted


def test_ranks_on_cuda_need_devices() -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has them")
    with pytest.raises((ConfigError, MachineError)):
        measure(size=2, device="cuda")


@pytest.mark.slow
def test_two_processes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # It changes what its processes inherit; others must not.
    monkeypatch.setenv("PYTHONPATH", "")
    report = measure(size=2, device="cpu", largest_bytes=1 << 14)
    assert [(p.exercise, p.num_bytes) for p in report.points] == [
        (exercise, num_bytes)
        for num_bytes in (1 << 10, 1 << 12, 1 << 14)
        for exercise in ("all_reduce", "send_recv")
    ]
    assert all(0 < p.min_seconds <= p.median_seconds and p.repeats >= 5 for p in report.points)
    assert [found.exercise for found in report.fits] == ["all_reduce", "send_recv"]
    native = is_native(torch.device("cpu"), torch.float32)
    assert report.topology.backend == ("shared memory" if native else "sockets")
    assert report.topology.devices == ["cpu", "cpu"]
