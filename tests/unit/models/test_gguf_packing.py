"""Matrices that are packed while modules are imported are those that the loader would pack."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.gguf_writer import TOKENS, wide_llama
from outrider.core import early
from outrider.core.config import EngineConfig
from outrider.core.errors import CheckpointError
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.gguf.packing import pack_early, packer_for
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from unit.models.test_forward import texts

MIB = 1 << 20
pytestmark = pytest.mark.skipif(
    early._ADVICE is None,  # pyright: ignore[reportPrivateUsage]
    reason="no such memory on this system",
)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Rows of queries and keys move, and matrices of one product are of several types."""
    yield wide_llama(("Q4_K", "Q6_K", "IQ2_XS", "Q5_0", "Q8_0")).write(tmp_path / "a.gguf")
    early.end()


def loaded(path: Path, dtype: str = "auto") -> LlamaModel:
    options = LoadOptions(
        capacity=ModelCapacity(num_slots=1024, page_size=8, max_rows=512), dtype=dtype, device="cpu"
    )
    model = load_model(path, options)
    assert isinstance(model, LlamaModel)
    if model.forward() is None:
        pytest.skip("no compiler, no native kernels")
    return model


def packed(path: Path, num_bytes: int = 16 * MIB) -> early.Pages:
    """Pages into which the matrices of a file were packed."""
    early.pages = early.Pages(num_bytes, 0, partial(pack_early, path))
    early.pages._thread.join()  # pyright: ignore[reportPrivateUsage]
    return early.pages


def untaken(pages: early.Pages) -> int:
    return len(pages._packed)  # pyright: ignore[reportPrivateUsage]


def test_the_loader_takes_all_matrices_and_computes_the_same_logits(file: Path) -> None:
    wanted, before = texts(loaded(file)), sys.getswitchinterval()
    pages = packed(file)
    # The table of tokens; q, k and v as one, out, gate and up as one, and down of two layers.
    assert untaken(pages) == 9
    assert sys.getswitchinterval() == before
    model = loaded(file)
    assert untaken(pages) == 0
    early.end()
    assert all(map(torch.equal, texts(model), wanted))


def test_a_file_that_is_loaded_in_another_format_is_packed_by_the_loader(file: Path) -> None:
    wanted = texts(loaded(file, "float32"))
    pages = packed(file)
    written, reserved = pages.unused
    assert 0 < written < reserved
    # In another format no matrix is taken, and none is in the way.
    model = loaded(file, "float32")
    assert untaken(pages) == 9
    early.end()
    assert pages.unused == (0, 0)
    assert all(map(torch.equal, texts(model), wanted))


def test_a_file_that_is_replaced_meanwhile_is_packed_by_the_loader(file: Path) -> None:
    other = wide_llama(("Q4_K", "Q6_K", "IQ2_XS", "Q5_0", "Q8_0"))
    other.add_blocks("token_embd.weight", (len(TOKENS), 256), "Q8_0", 7)
    pages = packed(file)
    file.unlink()
    wanted = texts(loaded(other.write(file)))
    assert untaken(pages) == 9
    early.end()
    assert all(map(torch.equal, texts(loaded(file)), wanted))


def test_a_damaged_file_is_left_to_the_loader(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: -MIB // 4])
    assert untaken(packed(cut)) == 0
    with pytest.raises(CheckpointError, match="cut off"):
        loaded(cut)


@pytest.mark.parametrize(
    ("settings", "packs"),
    [({}, True), ({"quantise": "int8"}, False), ({"dtype": "float32"}, False)],
)
def test_only_matrices_that_keep_their_format_are_packed(
    settings: dict[str, Any], *, packs: bool
) -> None:
    assert (packer_for(EngineConfig(**settings)) is not None) == packs


def test_a_matrix_is_found_by_all_of_its_parts_and_their_order() -> None:
    one, two = ("a", 0, b""), ("a", 64, b"\1")

    def write(value: int, at: int) -> None:
        ctypes.memset(at, value, 64)

    def packs(pages: early.Pages) -> None:
        assert pages.pack([one, two], 64, partial(write, 1))
        assert pages.pack([("b", 0, b"")], 64, partial(write, 2))
        assert not pages.pack([two], 64 * MIB, partial(write, 3))
        raise ValueError("what is wrong with a file is reported later")

    early.pages = pages = early.Pages(2 * MIB, 0, packs)
    pages._thread.join()  # pyright: ignore[reportPrivateUsage]
    try:
        # With another order it is another matrix, and that of the same rows is freed.
        assert pages.take_packed([("a", 0, b""), ("a", 64, b"")]) is None
        assert pages.take_packed([one, two]) is None
        found = pages.take_packed([("b", 0, b"")])
        assert found is not None
        assert bytes(found) == b"\2" * 64
        assert not pages.pack([two], 64, partial(write, 4)), "the thread has stopped"
    finally:
        early.end()
