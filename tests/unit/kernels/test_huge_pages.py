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

from outrider.kernels.native import huge_pages
from outrider.kernels.native.huge_pages import PAGE_BYTES

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
    found = huge_pages.empty(33 << 20, dtype=torch.uint8)
    assert found.data_ptr() % PAGE_BYTES == 0
    dead = weakref.ref(found.untyped_storage())
    before = _mapped()
    del found
    gc.collect()
    assert dead() is None
    assert _mapped() <= before - (33 << 20)


@pytest.mark.skipif(not (_HAVE and _SETTING.exists()), reason="no huge pages on this system")
def test_huge_pages_are_asked_for() -> None:
    for size in (100, 32 << 20):
        found = huge_pages.empty(size, dtype=torch.uint8)
        assert "hg" in _flags_at(found.data_ptr())


@pytest.mark.skipif(not _HAVE, reason="no huge pages on this system")
def test_matrices_of_a_model_share_their_last_pages() -> None:
    sizes = [(2 * PAGE_BYTES) + 1000] * 12
    before = _resident()
    kept = [huge_pages.empty(size, dtype=torch.uint8).fill_(1) for size in sizes]
    assert _resident() - before < sum(sizes) + 3 * PAGE_BYTES
    assert len(kept) == len(sizes)


@pytest.mark.skipif(not _HAVE, reason="no huge pages on this system")
def test_the_rest_of_a_large_matrix_takes_no_whole_page() -> None:
    size = 9 * PAGE_BYTES + PAGE_BYTES // 4
    before = _resident()
    kept = [huge_pages.empty(size, dtype=torch.uint8).fill_(1) for _ in range(8)]
    assert _resident() - before < len(kept) * size + 3 * PAGE_BYTES


@pytest.mark.skipif(not _HAVE, reason="no huge pages on this system")
def test_a_region_is_not_of_the_mode_that_it_was_opened_in() -> None:
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(huge_pages, "_regions", huge_pages.Regions())
        for size in (8, 8, 8 << 20):
            data = huge_pages._taken(size)  # pyright: ignore[reportPrivateUsage]
            assert data is not None
            assert not data.is_inference()


def test_ordinary_memory_where_there_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_ADVICE", None)
    assert huge_pages.empty(4, 2, dtype=torch.float32).shape == (4, 2)


def test_ordinary_memory_where_advice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_ADVICE", -1)
    monkeypatch.setattr(huge_pages, "_regions", huge_pages.Regions())
    assert huge_pages.empty(8 << 20, dtype=torch.uint8).numel() == 8 << 20
    assert huge_pages.empty(8, dtype=torch.uint8).numel() == 8


def _flags_at(address: int) -> list[str]:
    """Of the mapping that holds it."""
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", _smaps()):
        start, end = (int(bound, 16) for bound in entry.split(maxsplit=1)[0].split("-"))
        flags = re.search(r"^VmFlags: (.*)$", entry, re.MULTILINE)
        if start <= address < end and flags:
            return flags[1].split()
    pytest.skip("this system does not tell what mappings were advised")


def _mapped() -> int:
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc")
    return 1024 * sum(map(int, re.findall(r"\nSize: +(\d+) kB", _smaps())))


def _smaps() -> str:
    return Path("/proc/self/smaps").read_text("utf-8")


def _resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text("ascii").split()[1])
