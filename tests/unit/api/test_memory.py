"""Gauges and the watch: what grew is noticed, and nothing is asked when nobody profiles."""

from __future__ import annotations

import mmap

import pytest
import torch

from outrider.api.output import CudaGauge, MemoryWatch, ProcessGauge, gauge
from outrider.core import process

MEGABYTE = 1 << 20


class Scripted:
    """A gauge that reads out a list."""

    def __init__(self, *readings: int) -> None:
        self.readings = list(readings)

    def take(self) -> int:
        return self.readings.pop(0)

    def peak(self) -> int | None:
        return 99


def test_a_watch_knows_loading_and_each_pass() -> None:
    watch = MemoryWatch(Scripted(1, 50, 30, 40), active=True)
    watch.end_load()
    assert watch.load_bytes == 50
    assert [watch.during(index) for index in (0, 0, 1, 1)] == [30, 30, 40, 40]


def test_an_idle_watch_asks_for_the_peak_only() -> None:
    watch = MemoryWatch(Scripted(), active=False)
    watch.end_load()
    assert (watch.load_bytes, watch.during(0), watch.peak_bytes) == (0, 0, 99)


def test_the_process_holds_what_was_just_written() -> None:
    """Fresh pages: an allocator may hand out what the process holds already."""
    found = ProcessGauge()
    before = found.take()
    with mmap.mmap(-1, 64 * MEGABYTE) as kept:
        kept.write(bytes(len(kept)))
        assert found.take() > before + 32 * MEGABYTE


def test_a_stretch_that_raised_the_peak_held_it() -> None:
    found = ProcessGauge()
    base = found.peak()
    held = bytearray(128 * MEGABYTE)
    del held
    if found.peak() < base + MEGABYTE:
        pytest.skip("an earlier test held more")
    assert found.take() >= base
    assert found.take() < found.peak()


def test_the_peak_never_falls() -> None:
    found = ProcessGauge()
    peaks = [found.peak()]
    for size in (8, 1, 16):
        held = bytearray(size * MEGABYTE)
        peaks.append(found.peak())
        del held
    assert peaks == sorted(peaks)


def test_without_proc_the_peak_stands_for_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(process, "_STATUS", tmp_path_factory.mktemp("proc") / "none")
    found = ProcessGauge()
    assert found.take() == found.peak() > MEGABYTE


def test_the_cpu_is_gauged_by_its_process() -> None:
    assert isinstance(gauge(torch.device("cpu")), ProcessGauge)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_each_stretch_on_cuda_has_its_own_peak() -> None:
    found = CudaGauge(torch.device("cuda"))
    found.take()
    base = torch.cuda.memory_allocated()
    held = torch.empty(64 * MEGABYTE, dtype=torch.uint8, device="cuda")
    del held
    assert found.take() >= base + 64 * MEGABYTE
    assert found.take() < base + 64 * MEGABYTE
    assert found.peak() >= base + 64 * MEGABYTE
