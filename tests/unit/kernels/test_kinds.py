"""Which kinds of linear a machine is told to have, and why not the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core import env
from outrider.kernels import kinds
from outrider.kernels.build import built_kernels
from outrider.kernels.kinds import DOTS, TILES, refused_kinds
from outrider.kernels.native import NativeOps
from outrider.kernels.registry import choose
from unit.kernels.implementations import CPU


def machine(no_dots: int, no_tiles: str | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library that answers as it is told."""
    monkeypatch.setattr(kinds, "tiles_refusal", lambda _: no_tiles)  # pyright: ignore
    return SimpleNamespace(outrider_dots_missing=lambda: no_dots)


@pytest.mark.parametrize(("missing", "part"), [(1, "this CPU"), (2, "the compiler")])
def test_what_is_missing_is_told(missing: int, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = machine(missing, "AMX: no", monkeypatch)
    refused = refused_kinds(library, torch.bfloat16, "none")
    assert refused[DOTS].startswith("AVX512-BF16: ")
    assert part in refused[DOTS]
    assert refused[TILES] == "AMX: no"


def test_a_kind_is_refused_where_it_cannot_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    library = machine(0, None, monkeypatch)
    assert refused_kinds(library, torch.bfloat16, "none") == {}
    assert list(refused_kinds(library, torch.bfloat16, "int8")) == [DOTS]
    assert list(refused_kinds(library, torch.float32, "none")) == [DOTS, TILES]


def test_this_cpu_answers_by_its_flags() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    built = built_kernels(env.compiler(), env.cache_folder())
    if built.library is None or not cpuinfo.exists():
        pytest.skip(built.refusal or "no /proc/cpuinfo")
    has_dots = "avx512_bf16" in cpuinfo.read_text().split()
    refusal = refused_kinds(built.library, torch.bfloat16, "none").get(DOTS)
    assert (refusal == "AVX512-BF16: this CPU has no dot products of bfloat16") == (not has_dots)


def test_the_choice_says_why_and_what_was_refused() -> None:
    linear = choose(device=CPU, dtype=torch.float32).choices[0]
    if linear.name != "native":
        pytest.skip("; ".join(linear.refusals))
    assert linear.why == (
        "dots: they multiply bfloat16 only; tiles: they multiply bfloat16 and integers only"
    )


def test_float32_has_vectors_only() -> None:
    built = built_kernels(env.compiler(), env.cache_folder())
    if built.library is None:
        pytest.skip(str(built.refusal))
    with pytest.raises(AssertionError):
        NativeOps(built.library, torch.float32, 1, kind=DOTS)
