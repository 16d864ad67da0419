"""Pages for weights: zeros that parts take in turn, and that count as free until then."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.cache import pages as memory
from outrider.core import early
from outrider.core.process import own_bytes
from outrider.kernels.native import huge_pages

MIB = 1 << 20
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    early._ADVICE is None,  # pyright: ignore[reportPrivateUsage]
    reason="no such memory on this system",
)


@pytest.fixture
def pages() -> Iterator[early.Pages]:
    early.pages = early.Pages(8 * MIB, 6 * MIB)
    yield early.pages
    early.end()


def test_matrices_lie_in_pages_that_were_zeroed_early(pages: early.Pages) -> None:
    first, second = (huge_pages.empty(size, dtype=torch.uint8) for size in (1000, 4 * MIB))
    assert first.data_ptr() % 64 == 0
    assert second.data_ptr() == first.data_ptr() + 1024
    assert not first.any()
    first.fill_(1)
    assert not second.any()
    # More than is left lies elsewhere, and takes nothing.
    huge_pages.empty(5 * MIB, dtype=torch.uint8)
    third = huge_pages.empty(64, dtype=torch.uint8)
    assert third.data_ptr() == second.data_ptr() + 4 * MIB
    early.end()
    assert first.all()
    assert pages.take(1) is None


def test_unused_pages_are_free_for_the_plan_and_are_returned(pages: early.Pages) -> None:
    pages._thread.join()  # pyright: ignore[reportPrivateUsage]
    assert pages.unused == (6 * MIB, 8 * MIB)
    with_pages = memory.limits(CPU)
    assert all(one.free >= 6 * MIB for one in with_pages)
    taken = pages.take(3 * MIB)
    assert taken is not None
    assert pages.unused == (3 * MIB, 5 * MIB)
    before = own_bytes(b"VmRSS")
    early.end()
    after = own_bytes(b"VmRSS")
    assert before is not None
    assert after is not None
    assert before - after >= 2 * MIB
    assert pages.unused == (0, 0)


def test_only_files_of_weights_have_pages(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"x" * 100)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 7)
    assert early.weights_in(file) == 100
    assert early.weights_in(tmp_path) == 7
    assert early.weights_in(Path("org/name")) == 0
    with early.pages_for(str(file)):
        assert early.pages is None, "a small model gains nothing"


@pytest.mark.wide
def test_pytorchs_library_is_loaded_without_pytorch() -> None:
    child = """
import sys, threading
from pathlib import Path
from outrider.core.early import load_library
load_library()
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
print("torch" in sys.modules, "libtorch_cpu.so" in Path("/proc/self/maps").read_text())
load_library.__globals__["sys"].modules["torch"] = sys
load_library()
print(threading.active_count())
"""
    found = subprocess.run([sys.executable, "-c", child], capture_output=True, check=True)
    lib = Path(torch.__file__).with_name("lib")
    loads = (
        (lib / "libtorch_cpu.so").exists()
        and not (lib / "libtorch_cuda.so").exists()
        and len(os.sched_getaffinity(0)) > 1
    )
    assert found.stdout.split() == [b"False", str(loads).encode(), b"1"]
