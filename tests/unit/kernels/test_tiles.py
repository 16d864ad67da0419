"""Linears of every kind: in software on any CPU, in hardware where there is one."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider.core import env
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.kernels import registry
from outrider.kernels.native.build import Built, built_kernels
from outrider.kernels.native.cpu import DOTS, TILES, VECTORS
from outrider.kernels.native.ops import NativeInt8, NativeOps
from outrider.kernels.native.tuning import TunedKernel, refused_kinds
from outrider.kernels.plan import PackedLinear
from outrider.kernels.reference.linear import TorchInt8
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from unit.kernels.implementations import (
    library_of,
    randn,
    relative_error,
    row_choices,
    software,
)

# As for vectors: the chains are shorter, the tolerance is the same.
TOLERANCE = 2e-6
# Inputs by outputs: whole steps and blocks, less than one, tails of both, more rows of the widest
# than stay in a cache.
SHAPES = ((256, 64), (5, 3), (50, 77), (129, 1), (160, 70))
FORMATS = (VECTORS, DOTS, "bfloat16", "int8")

# Compiles the kernels once more.
pytestmark = pytest.mark.slow


@functools.cache
def software_of(form: str, threads: int = 1) -> NativeOps | NativeInt8:
    return kind_of(software(), form, threads)


def name_of(form: str) -> str:
    """The kind of linear that `form` is tested on."""
    return form if form in (VECTORS, DOTS) else TILES


def kind_of(library: ctypes.CDLL, form: str, threads: int = 1) -> NativeOps | NativeInt8:
    if form == "int8":
        return NativeInt8(library, threads, kind=TILES)
    return NativeOps(library, torch.bfloat16, threads, kind=name_of(form))


def hardware_of(form: str, threads: int = 1) -> NativeOps | NativeInt8:
    """Skips the test, with the reason, where there is none."""
    library = library_of(built_kernels(env.compiler(), env.cache_folder()))
    scheme = form if form == "int8" else "none"
    refused = refused_kinds(library, torch.bfloat16, scheme)
    if (kind := name_of(form)) in refused:
        pytest.skip(refused[kind])
    return kind_of(library, form, threads)


def weights(num_out: int, num_in: int) -> Tensor:
    return randn(num_out, num_in, seed=1).bfloat16()


def run(kind: NativeOps | NativeInt8, packed: PackedLinear, x_NI: Tensor) -> Tensor:
    out_NO = torch.full((x_NI.shape[0], packed.num_out), 7.0)
    kind.linear(x_NI.contiguous(), packed, out_NO)
    return out_NO


def expected(form: str, weight_OI: Tensor, x_NI: Tensor) -> Tensor:
    """Exact bits for integers; the float64 product of rounded inputs for bfloat16."""
    if form != "int8":
        return x_NI.bfloat16().double() @ weight_OI.double().T
    definition = TorchInt8()
    out_NO = torch.empty(x_NI.shape[0], weight_OI.shape[0])
    definition.linear(x_NI, definition.pack(weight_OI), out_NO)
    return out_NO


def assert_right(form: str, out_NO: Tensor, expected_NO: Tensor) -> None:
    if form == "int8":
        assert torch.equal(out_NO, expected_NO)
    else:
        assert relative_error(out_NO, expected_NO) < TOLERANCE


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_rows_is_right_and_a_row_has_its_bits(
    form: str, shape: tuple[int, int]
) -> None:
    num_in, num_out = shape
    weight_OI, x_NI = weights(num_out, num_in), randn(40, num_in)
    packed = software_of(form).pack(weight_OI)
    expected_NO = expected(form, weight_OI, x_NI)
    alone_NO = torch.cat([run(software_of(form), packed, x_1I) for x_1I in torch.split(x_NI, 1)])
    assert_right(form, alone_NO, expected_NO)
    for num_rows in range(1, 41):
        assert torch.equal(run(software_of(form), packed, x_NI[:num_rows]), alone_NO[:num_rows])
    for rows in row_choices(40):
        assert torch.equal(run(software_of(form), packed, x_NI[rows]), alone_NO[rows])


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_is_right(form: str, data: st.DataObject) -> None:
    num_rows, num_in, num_out = (data.draw(st.integers(1, most)) for most in (40, 300, 150))
    weight_OI, x_NI = weights(num_out, num_in), randn(num_rows, num_in)
    packed = software_of(form).pack(weight_OI)
    out_NO = run(software_of(form), packed, x_NI)
    assert_right(form, out_NO, expected(form, weight_OI, x_NI))
    summed_NO = out_NO.clone()
    software_of(form).linear(x_NI, packed, summed_NO, accumulate=True)
    assert torch.equal(summed_NO, out_NO + out_NO)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(form: str, threads: int) -> None:
    kind, weight_OI, x_NI = software_of(form, threads), weights(500, 1100), randn(20, 1100)
    alone_NO = run(software_of(form), software_of(form).pack(weight_OI), x_NI)
    packed = kind.pack(weight_OI)
    for num_rows in (1, 9, 20):
        assert torch.equal(run(kind, packed, x_NI[:num_rows]), alone_NO[:num_rows])


@pytest.mark.parametrize("form", FORMATS)
def test_more_rows_than_a_cache_holds(form: str) -> None:
    weight_OI, x_NI = weights(70, 2100), randn(390, 2100)
    packed = software_of(form, 2).pack(weight_OI)
    out_NO = run(software_of(form, 2), packed, x_NI)
    assert_right(form, out_NO, expected(form, weight_OI, x_NI))
    rows = torch.arange(1, 390, 31)
    assert torch.equal(run(software_of(form), packed, x_NI[rows]), out_NO[rows])
    summed_NO = out_NO.clone()
    software_of(form).linear(x_NI, packed, summed_NO, accumulate=True)
    assert torch.equal(summed_NO, out_NO + out_NO)


def test_more_sums_than_are_kept_at_once() -> None:
    kind = hardware_of("bfloat16", 2)
    packed, x_NI = kind.pack(weights(8300, 1100)), randn(510, 1100)
    rows = torch.arange(1, 510, 101)
    assert torch.equal(run(kind, packed, x_NI[rows]), run(kind, packed, x_NI)[rows])


@pytest.mark.parametrize("form", FORMATS)
def test_it_writes_its_output_and_nothing_else(form: str) -> None:
    packed = software_of(form).pack(weights(77, 50))
    assert run(software_of(form), packed, torch.empty(0, 50)).shape == (0, 77)
    for num_rows in (1, 3, 17, 37):
        memory = torch.full((num_rows * 77 + 64,), 5.0)
        software_of(form).linear(randn(num_rows, 50), packed, memory[: num_rows * 77].view(-1, 77))
        assert (memory[num_rows * 77 :] == 5.0).all()


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_no_number_stays_in_its_row_and_output(form: str) -> None:
    weight_OI, x_NI = weights(70, 51), randn(20, 51)
    right_NO = run(software_of(form), software_of(form).pack(weight_OI), x_NI)
    x_NI[3, 7], x_NI[9, 49], weight_OI[4, 0], weight_OI[66, 40] = (torch.nan, torch.inf) * 2
    out_NO = run(software_of(form), software_of(form).pack(weight_OI), x_NI)
    rows, outputs = torch.ones(20, dtype=torch.bool), torch.ones(70, dtype=torch.bool)
    rows[[3, 9]], outputs[[4, 66]] = False, False
    assert not out_NO[~rows].isfinite().any()
    assert not out_NO[:, ~outputs].isfinite().any()
    assert torch.equal(out_NO[rows][:, outputs], right_NO[rows][:, outputs])


def with_denormals(kind: NativeOps | NativeInt8, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Twenty sums of 75 products, two of them of denormals, and the products without those. They
    differ much in size, so that sums are rounded, and their order counts; `scale` is that of both
    factors."""
    x_I = (randn(75).pow(5) * scale).bfloat16()
    weight_OI = (randn(20, 75, seed=1).pow(5) * scale).bfloat16()
    x_I[3], weight_OI[:, 8] = 1e-39, -1e-39
    out_1O = run(kind, kind.pack(weight_OI), x_I.float()[None])
    x_I[3], weight_OI[:, 8] = 0, 0
    return out_1O[0], x_I.double() * weight_OI.double()


def test_sums_of_tiles_run_in_the_documented_order() -> None:
    """Two chains a step of 32 inputs, over even and odd ones; denormals are zeros."""
    found_O, products_OI = with_denormals(software_of("bfloat16"))
    total_O = torch.zeros(20)
    for step_OC in torch.split(products_OI, 32, dim=1):
        chains = [torch.zeros(20), torch.zeros(20)]
        for i, product_O in enumerate(step_OC.unbind(1)):
            chains[i % 2] = (chains[i % 2].double() + product_O).float()
        total_O = total_O + (chains[0] + chains[1])
    assert torch.equal(found_O, total_O)


@pytest.mark.parametrize(
    ("of", "scale"), [(software_of, 1.0), (hardware_of, 1.0), (hardware_of, 2.0**-67)]
)
def test_sums_of_dots_run_in_the_documented_order(
    of: Callable[[str], NativeOps | NativeInt8], scale: float
) -> None:
    """One chain over pairs of inputs, the second of a pair first; denormals are zeros, sums too."""
    found_O, products_OI = with_denormals(of(DOTS), scale)
    total_O = torch.zeros(20)
    for pair_OC in torch.split(products_OI, 2, dim=1):
        for product_O in pair_OC.flip(1).unbind(1):
            total_O = (total_O.double() + product_O).float()
            total_O[total_O.abs() < torch.finfo(torch.float32).tiny] = 0
    assert torch.equal(found_O, total_O)


def test_weights_take_the_bytes_of_whole_steps_and_blocks() -> None:
    held = {form: software_of(form).pack(weights(70, 160)).nbytes for form in FORMATS}
    vectors, dots = held.pop(VECTORS), held.pop(DOTS)
    assert held == {"bfloat16": 96 * 160 * 2, "int8": 96 * (4 + 192)}
    assert 70 * 160 * 2 <= vectors == dots <= held["bfloat16"]
    assert software_of(DOTS).pack(weights(70, 159)).nbytes == dots


@pytest.mark.parametrize("form", FORMATS)
def test_a_pass_in_one_call_has_the_bits_of_its_operators(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_software, kind = Built(library=software()), name_of(form)
    quantise = form if form == "int8" else "none"

    def built(*_: object) -> Built:
        return in_software

    def wins(*_: object) -> TunedKernel:
        return TunedKernel(kind)

    monkeypatch.setattr(registry, "built_kernels", built)
    monkeypatch.setattr(registry, "kind_answer", wins)
    options = LoadOptions(
        capacity=ModelCapacity(num_slots=512, page_size=8),
        dtype="bfloat16",
        device="cpu",
        quantise=quantise,
    )
    model = load_model(write_checkpoint(tmp_path, variant("llama2"), seed=4), options)
    assert isinstance(model, LlamaModel)
    assert model.forward() is not None
    assert model.kernels.choices[0].kind == kind

    def logits() -> Tensor:
        model.state.open(1, ())
        many_MV = model.step([StepRow.chain(1, (1, 2, 3, 4, 5))], DraftNeeds()).logits_MV.clone()
        model.state.close(1)
        return many_MV

    whole_MV = logits()
    model.kernels = replace(model.kernels)  # equal ones, which the decoder calls itself
    assert model.forward() is None
    assert torch.equal(whole_MV, logits())
    assert whole_MV.isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
def test_the_cpu_has_the_sums_of_the_software(form: str) -> None:
    hardware = hardware_of(form, 2)
    weight_OI, x_NI = weights(1000, 1101), randn(40, 1101)
    packed = hardware.pack(weight_OI)
    out_NO = run(hardware, packed, x_NI)
    software_NO = run(software_of(form), software_of(form).pack(weight_OI), x_NI)
    if name_of(form) != TILES:
        assert torch.equal(out_NO, software_NO)
    assert_right(form, out_NO, software_NO.double())
    for rows in row_choices(40):
        assert torch.equal(run(hardware, packed, x_NI[rows]), out_NO[rows])
