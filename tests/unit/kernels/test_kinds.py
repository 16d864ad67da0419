"""Kinds of linears that a machine has, and why it does not have the others."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core import env
from outrider.core.errors import ContractError
from outrider.kernels.native import tuning as contests
from outrider.kernels.native import tuning as kinds
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.cpu import DOTS, TILES, VECTORS
from outrider.kernels.native.ops import NativeOps
from outrider.kernels.native.tuning import kind_answer, refused_kinds
from outrider.kernels.registry import choose
from unit.kernels.implementations import CPU


@pytest.fixture(autouse=True)
def _nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.delenv("OUTRIDER_LINEARS", raising=False)


def machine(
    no_dots: int, no_tiles: str | None, monkeypatch: pytest.MonkeyPatch, *, amd: bool = False
) -> Any:
    """A library with these answers."""
    monkeypatch.setattr(kinds, "tiles_refusal", lambda _: no_tiles)  # pyright: ignore
    return SimpleNamespace(
        outrider_dots_missing=lambda: no_dots, outrider_dots_faster=lambda: int(amd)
    )


@pytest.mark.parametrize(("missing", "part"), [(1, "this CPU"), (2, "the compiler")])
def test_what_is_missing_is_reported(
    missing: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(
    ("no_dots", "no_tiles", "amd", "kind"),
    [
        (0, None, False, TILES),
        (0, None, True, TILES),
        (1, None, False, TILES),
        (0, "AMX: no", True, DOTS),
        (0, "AMX: no", False, VECTORS),
        (2, "AMX: no", True, VECTORS),
        (1, "AMX: no", False, VECTORS),
    ],
)
def test_a_rule_chooses_among_kinds_of_other_bits(
    no_dots: int, no_tiles: str | None, amd: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is timed: two machines of one make, however busy, write one text."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a contest decides bits")

    monkeypatch.setattr(contests, "decide", refuse)
    library = machine(no_dots, no_tiles, monkeypatch, amd=amd)
    assert kind_answer(library, torch.bfloat16, "none", None).chosen == kind
    for dtype in (torch.float32, torch.float16):
        assert kind_answer(library, dtype, "none", None).chosen == VECTORS


def test_the_doctor_names_the_rule() -> None:
    linear = choose(device=CPU, dtype=torch.bfloat16).choices[0]
    if linear.name != "native":
        pytest.skip("; ".join(linear.refusals))
    assert linear.kind in (VECTORS, DOTS, TILES)
    assert "tiles where they can be used" in linear.why
    assert not linear.timings


def test_this_cpu_answers_by_its_flags() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    built = built_kernels(env.compiler(), env.cache_folder())
    if built.library is None or not cpuinfo.exists():
        pytest.skip(built.refusal or "no /proc/cpuinfo")
    if "OUTRIDER_SOFTWARE" in (env.compiler() or ""):
        pytest.skip("instructions of the CPU's are replaced by plain C++")
    has_dots = "avx512_bf16" in cpuinfo.read_text().split()
    refusal = refused_kinds(built.library, torch.bfloat16, "none").get(DOTS)
    assert (refusal == "AVX512-BF16: this CPU has no dot products of bfloat16") == (not has_dots)
    assert bool(built.library.outrider_dots_faster()) == ("AuthenticAMD" in cpuinfo.read_text())


def test_the_choice_says_why_and_what_was_refused() -> None:
    linear = choose(device=CPU, dtype=torch.float32).choices[0]
    if linear.name != "native":
        pytest.skip("; ".join(linear.refusals))
    assert linear.why == (
        "dots: they multiply bfloat16 only; tiles: they multiply bfloat16 and integers only"
    )


def test_float32_has_vectors_only(native_library: ctypes.CDLL) -> None:
    with pytest.raises(ContractError):
        NativeOps(native_library, torch.float32, 1, kind=DOTS)
