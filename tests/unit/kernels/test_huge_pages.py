"""Memory in huge pages: tensors like any others, which share no bytes and are freed in time."""

from __future__ import annotations

import gc
import mmap
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch

from outrider.kernels import huge_pages
from outrider.kernels.huge_pages import PAGE_BYTES

_HAVE = hasattr(mmap, "MADV_HUGEPAGE")
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3,), (7, 5), (1024, 1024), (3 << 21,), (0,)])
def test_has_shape_type_and_alignment(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = huge_pages.empty(*shape, dtype=dtype)
    assert (found.shape, found.dtype) == (shape, dtype)
    assert found.is_contiguous()
    assert found.data_ptr() % 64 == 0
    found.fill_(1)
    assert found.to(torch.float64).sum() == found.numel()


def test_no_two_share_a_byte() -> None:
    sizes = [1, 63, 64, 65, 4 << 20, 100, 5 << 20, (4 << 20) + 1, 7] * 3
    found = [huge_pages.empty(size, dtype=torch.uint8) for size in sizes]
    for place, one in enumerate(found):
        one.fill_(place)
    assert all(bool((one == place).all()) for place, one in enumerate(found))


@pytest.mark.skipif(not _HAVE, reason="no huge pages on this system")
def test_large_tensors_begin_at_a_page_and_are_freed() -> None:
    found = huge_pages.empty(9 << 20, dtype=torch.uint8)
    assert found.data_ptr() % PAGE_BYTES == 0
    dead = weakref.ref(found.untyped_storage())
    before = _mapped()
    del found
    gc.collect()
    assert dead() is None
    assert _mapped() <= before - (9 << 20)


@pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text("utf-8"),
    reason="this system gives no huge pages",
)
def test_pages_are_huge() -> None:
    found = huge_pages.empty(32 << 20, dtype=torch.uint8)
    found.fill_(1)
    assert _huge_bytes() >= 16 << 20


def test_ordinary_memory_where_there_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_ADVICE", None)
    assert huge_pages.empty(4, 2, dtype=torch.float32).shape == (4, 2)


def test_ordinary_memory_where_advice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_ADVICE", -1)
    monkeypatch.setattr(huge_pages, "_regions", huge_pages.Regions())
    assert huge_pages.empty(8 << 20, dtype=torch.uint8).numel() == 8 << 20
    assert huge_pages.empty(8, dtype=torch.uint8).numel() == 8


def _huge_bytes() -> int:
    return 1024 * sum(map(int, re.findall(r"AnonHugePages: +(\d+) kB", _smaps())))


def _mapped() -> int:
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc")
    return 1024 * sum(map(int, re.findall(r"\nSize: +(\d+) kB", _smaps())))


def _smaps() -> str:
    return Path("/proc/self/smaps").read_text("utf-8")
