from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from outrider.kernels.native.cpu import cpu_identity
from outrider.kernels.operators import OPS, Choice, for_kinds, for_scans
from outrider.kernels.reference.delta import torch_delta
from outrider.kernels.registry import choose
from outrider.plugins.gpu.kernels import build
from unit.kernels.implementations import CPU, DTYPES, kernels_named, randn


def refusal_of(device: torch.device, dtype: torch.dtype) -> str:
    kernels = choose(device=device, dtype=dtype)
    assert [choice.op for choice in kernels.choices] == list(OPS)
    assert {choice.name for choice in kernels.choices} == {"reference"}
    (refusals,) = {choice.refusals for choice in kernels.choices}
    return "; ".join(refusals)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_comes_first(dtype: torch.dtype) -> None:
    kernels = kernels_named("native-1", dtype)
    assert kernels.exact
    assert {(choice.name, choice.refusals) for choice in kernels.choices} == {("native", ())}


def test_every_refusal_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of(torch.device("meta"), torch.float32) == (
        "native: it runs on cpu, not on meta"
    )
    assert refusal_of(CPU, torch.float64) == (
        "native: it computes in float32, bfloat16 and float16, not in float64"
    )
    monkeypatch.setenv("CXX", "no-such-c++")
    assert refusal_of(CPU, torch.float32) == (
        "native: the C++ compiler 'no-such-c++' was not found"
    )


def test_a_compiler_that_fails_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text comes several times slower then; nobody should have to guess why."""
    # Of this test alone: the warning comes once a process.
    caplog.set_level("INFO")
    monkeypatch.setenv("CXX", "no-compiler-of-this-test")
    for _ in range(2):
        choose(device=CPU, dtype=torch.float32)
    choose(device=CPU, dtype=torch.float32, force_reference=True)
    told = [record for record in caplog.records if "reference kernels" in record.message]
    warnings = [record.message for record in told if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "'no-compiler-of-this-test' was not found" in warnings[0]


def test_the_reference_can_be_asked_for() -> None:
    kernels = choose(device=CPU, dtype=torch.float32, force_reference=True)
    assert kernels.exact
    assert kernels.choices[0].refusals == ("native: the reference was requested",)


@pytest.mark.parametrize(
    ("package", "capability", "refusal"),
    [
        (False, None, "the package triton is not installed"),
        (True, None, "PyTorch finds no CUDA device"),
        (True, (7, 5), "it needs compute capability 8.0, not 7.5"),
    ],
)
def test_why_triton_is_passed_over(
    package: bool,
    capability: tuple[int, int] | None,
    refusal: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(_: str) -> str | None:
        return "triton" if package else None

    def its_capability(_: torch.device) -> tuple[int, int] | None:
        return capability

    monkeypatch.setattr(build, "find_spec", found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", its_capability)
    told = refusal_of(torch.device("cuda"), torch.float32)
    assert told == f"native: it runs on cpu, not on cuda; triton: {refusal}"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_that_does_not_start_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here there is no device, as on others there is no compiler."""

    def capability(_: torch.device) -> tuple[int, int]:
        return 9, 0

    def no_driver() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(build, "find_spec", str)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr("outrider.plugins.gpu.kernels.tiles.current_device", no_driver)
    reason = (
        "triton: it does not start, which takes a C compiler and Python's headers "
        "(Failed to find C compiler)"
    )
    assert refusal_of(torch.device("cuda"), torch.bfloat16).endswith(reason)


def test_rocm_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def capability(_: torch.device) -> tuple[int, int]:
        return 9, 4

    monkeypatch.setattr(build, "find_spec", str)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    reason = "triton: on ROCm some of its kernels need more shared memory than there is"
    assert refusal_of(torch.device("cuda"), torch.bfloat16).endswith(reason)


def test_other_devices_promise_no_bits() -> None:
    assert not choose(device=torch.device("meta"), dtype=torch.float32).exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_the_definition_of_a_linear_on_other_devices(dtype: torch.dtype) -> None:
    kernels = choose(device=torch.device("meta"), dtype=dtype)
    weight_OI, x_NI, out_NO = randn(6, 5).to(dtype), randn(3, 5, seed=1), torch.ones(3, 6)
    kernels.linear(x_NI, kernels.pack(weight_OI), out_NO, accumulate=True)
    exact_NO = 1 + x_NI.to(dtype).double() @ weight_OI.double().T
    torch.testing.assert_close(out_NO.double(), exact_NO, rtol=2e-2, atol=2e-2)


def test_a_cpu_has_an_identity() -> None:
    assert cpu_identity()


def test_layers_that_attend_in_their_own_way_leave_triton_s_attention() -> None:
    plain = choose(device=CPU, dtype=torch.float32, force_reference=True)
    assert for_kinds(plain) is plain
    choices = tuple(Choice(op, "triton") for op in OPS)
    found = for_kinds(replace(plain, choices=choices))
    assert not found.exact
    named = {choice.op: choice for choice in found.choices}
    assert named["attention"].name == "reference"
    assert "windows, caps or sinks" in named["attention"].refusals[-1]
    assert {choice.name for op, choice in named.items() if op != "attention"} == {"triton"}


def test_recurrences_that_triton_lacks_run_by_their_definition() -> None:
    plain = choose(device=CPU, dtype=torch.float32, force_reference=True)
    assert for_scans(plain) is plain
    choices = tuple(Choice(op, "triton") for op in OPS)
    found = for_scans(replace(plain, choices=choices))
    assert found.exact is plain.exact
    assert found.delta is torch_delta
    named = {choice.op: choice for choice in found.choices}
    assert "gated delta rules only" in named["delta"].refusals[-1]
    assert {op for op, choice in named.items() if choice.name != "triton"} == {"delta"}
