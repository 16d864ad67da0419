from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from doubles.posing_compiler import SOURCES
from outrider.kernels.native import build


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from torch's pool, and on busy cores they wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all native sources in one file."""
    folder = tmp_path_factory.mktemp("source")
    texts = [path.read_text() for path in sorted(SOURCES.glob("*.cpp"))]
    (folder / "all.cpp").write_text("\n".join(texts))
    return folder


@pytest.fixture
def one_source(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build runs its compiler, a command that only poses as one, twice and not forty times."""
    monkeypatch.setattr(build, "SOURCES", source)
