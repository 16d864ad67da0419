from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.native.ops import NativeInt4, NativeInt8
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear
from outrider.kernels.reference.linear import GROUP, SCHEMES, definition, quantise, quantise_rows
from outrider.kernels.registry import choose
from unit.kernels.implementations import CPU, kernels_named, randn, row_choices, software

# Inputs by outputs: the embedded pair's, tails of groups and of blocks, more than a slice, more
# than the reference sums at once.
SHAPES = ((256, 512), (704, 256), (5, 3), (50, 77), (129, 1), (1100, 70), (2080, 33))
IMPLEMENTATIONS = ("reference", "native-1", "native-2")


@functools.cache
def quantised_kernels(name: str, scheme: str) -> Kernels:
    kernels_named(name, torch.bfloat16)  # skips where there are none
    kind, _, threads = name.partition("-")
    return choose(
        device=CPU,
        dtype=torch.bfloat16,
        force_reference=kind == "reference",
        threads=int(threads or 0),
        quantise=scheme,
    )


def with_library(library: ctypes.CDLL, scheme: str) -> Kernels:
    side = NativeInt8(library, 2) if scheme == "int8" else NativeInt4(library, 2)
    return replace(quantised_kernels("native-2", scheme), pack=side.pack, linear=side.linear)


def run(kernels: Kernels, packed: PackedLinear, x_NI: Tensor) -> Tensor:
    out_NO = torch.full((x_NI.shape[0], packed.num_out), 7.0)
    kernels.linear(x_NI.contiguous(), packed, out_NO)
    return out_NO


def packed_head(kernels: Kernels, weight_OI: Tensor) -> PackedLinear:
    assert kernels.pack_head is not None
    return kernels.pack_head(weight_OI)


def rows_of_all_sizes(num_rows: int, num_in: int) -> Tensor:
    """Rows of magnitudes from 1e-9 to 1e9, one of zeros, one too small to be told from zeros."""
    x_NI = randn(num_rows, num_in) * torch.logspace(-9, 9, num_rows)[:, None]
    x_NI[1::7] = 0
    x_NI[2::7] *= 1e-33
    return x_NI


@dataclass(frozen=True)
class Case:
    """One matrix, packed by the reference and by another implementation."""

    definition: Kernels
    tested: Kernels
    expected: PackedLinear
    packed: PackedLinear

    @staticmethod
    def of(tested: Kernels, scheme: str, weight_OI: Tensor) -> Case:
        definition = quantised_kernels("reference", scheme)
        return Case(definition, tested, definition.pack(weight_OI), tested.pack(weight_OI))

    def check(self, x_NI: Tensor) -> None:
        expected_NO = run(self.definition, self.expected, x_NI)
        out_NO = run(self.tested, self.packed, x_NI)
        assert torch.equal(out_NO, expected_NO)
        added_NO, expected_sum_NO = torch.ones_like(out_NO), torch.ones_like(out_NO)
        self.tested.linear(x_NI, self.packed, added_NO, accumulate=True)
        self.definition.linear(x_NI, self.expected, expected_sum_NO, accumulate=True)
        assert torch.equal(added_NO, expected_sum_NO)


# Any two of shape, implementation and scheme meet, here and below; the product is `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["native-1", "native-2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_has_the_bits_of_the_reference(
    name: str, scheme: str, shape: tuple[int, int]
) -> None:
    num_in, num_out = shape
    weight_OI = randn(num_out, num_in, seed=1)
    weight_OI[num_out // 2] = 0
    case = Case.of(quantised_kernels(name, scheme), scheme, weight_OI)
    x_NI = rows_of_all_sizes(33, num_in)
    for num_rows in range(1, 34):
        case.check(x_NI[:num_rows])


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_has_the_bits_of_the_reference(scheme: str, data: st.DataObject) -> None:
    num_rows, num_in, num_out = (data.draw(st.integers(1, most)) for most in (40, 300, 150))
    weight_OI = randn(num_out, num_in, seed=1).bfloat16()
    case = Case.of(quantised_kernels("native-2", scheme), scheme, weight_OI)
    case.check(rows_of_all_sizes(num_rows, num_in))


@pytest.mark.parametrize("name", ["native-1", "native-2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_head_of_8_bits_has_the_bits_of_the_reference(name: str, shape: tuple[int, int]) -> None:
    num_in, num_out = shape
    weight_OI, x_NI = randn(num_out, num_in, seed=1), rows_of_all_sizes(33, num_in)
    weight_OI[num_out // 2] = 0
    sides = [quantised_kernels(one, "int4") for one in ("reference", name)]
    heads = [packed_head(side, weight_OI) for side in sides]
    for num_rows in (1, 2, 5, 16, 33):
        expected_NO, out_NO = (
            run(side, head, x_NI[:num_rows]) for side, head in zip(sides, heads, strict=True)
        )
        assert torch.equal(out_NO, expected_NO)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_table_reads_what_linears_multiply_by(name: str, bits: int) -> None:
    kernels, weight_VD = quantised_kernels(name, "int4"), randn(70, 50).bfloat16()
    assert kernels.table is not None
    packed = kernels.pack(weight_VD) if bits == 4 else packed_head(kernels, weight_VD)
    table = kernels.table(packed, torch.bfloat16)
    made = quantise(weight_VD, bits)
    scale_VD, *rest = made.factors_FOG.repeat_interleave(GROUP, dim=2)
    numbers_VD = made.codes_OI * scale_VD + (rest[0] if rest else 0)
    ids, out_ND = torch.tensor([69, 0, 33, 0]), torch.full((4, 50), 7.0)
    table.read(ids, out_ND)
    assert torch.equal(out_ND, numbers_VD[ids, :50])
    assert torch.equal(table.floats(), numbers_VD[:, :50].bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_plain_arithmetic_gives_the_bits_of_the_fast_instructions(scheme: str) -> None:
    case = Case.of(with_library(software(), scheme), scheme, randn(77, 1100, seed=1))
    for num_rows in (1, 2, 5, 13, 33):
        case.check(randn(num_rows, 1100))


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_the_pass(name: str, scheme: str, shape: tuple[int, int]) -> None:
    num_in, num_out = shape
    kernels = quantised_kernels(name, scheme)
    packed = kernels.pack(randn(num_out, num_in, seed=1))
    x_NI = randn(100, num_in)
    alone_NO = torch.cat([run(kernels, packed, x_1I) for x_1I in torch.split(x_NI, 1)])
    for rows in row_choices(100):
        assert torch.equal(run(kernels, packed, x_NI[rows]), alone_NO[rows])


@pytest.mark.parametrize(("scheme", "bound"), [("int8", 0.015), ("int4", 0.09)])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_it_is_near_the_product_of_floats(name: str, scheme: str, bound: float) -> None:
    kernels = quantised_kernels(name, scheme)
    weight_OI, x_NI = randn(300, 1024, seed=1), randn(20, 1024)
    exact_NO = x_NI.double() @ weight_OI.double().T
    error_NO = run(kernels, kernels.pack(weight_OI), x_NI).double() - exact_NO
    assert float(error_NO.square().sum() / exact_NO.square().sum()) ** 0.5 < bound


def test_the_bytes_are_those_of_the_scheme() -> None:
    weight_OI = randn(256, 512)
    held = {
        scheme: quantised_kernels("native-1", scheme).pack(weight_OI).nbytes for scheme in SCHEMES
    }
    assert held == {"int8": 256 * (512 + 4), "int4": 256 * (512 // 2 + 512 // GROUP * 4)}
    head = packed_head(quantised_kernels("native-1", "int4"), weight_OI)
    assert head.nbytes == 256 * (512 + 512 // GROUP * 2)
    reference = quantised_kernels("reference", "int4").pack(weight_OI)
    assert reference.nbytes == 256 * (512 + 512 // GROUP * 8)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_what_is_no_number_stays_in_its_row(name: str, scheme: str) -> None:
    kernels = quantised_kernels(name, scheme)
    packed, x_NI = kernels.pack(randn(70, 50)), randn(16, 50)
    expected_NO = run(kernels, packed, x_NI)
    x_NI[3, 7], x_NI[9, 49], x_NI[11, 0] = torch.nan, torch.inf, -torch.inf
    out_NO = run(kernels, packed, x_NI)
    bad = [3, 9, 11]
    good = [row for row in range(16) if row not in bad]
    assert out_NO[bad].isnan().all()
    assert torch.equal(out_NO[good], expected_NO[good])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_what_is_no_number_stays_in_its_output(name: str, scheme: str) -> None:
    kernels = quantised_kernels(name, scheme)
    weight_OI, x_NI = randn(70, 50), randn(5, 50)
    expected_NO = run(kernels, kernels.pack(weight_OI), x_NI)
    weight_OI[4, 0], weight_OI[66, 40] = torch.nan, torch.inf
    out_NO = run(kernels, kernels.pack(weight_OI), x_NI)
    good = [output for output in range(70) if output not in (4, 66)]
    assert out_NO[:, [4, 66]].isnan().all()
    assert torch.equal(out_NO[:, good], expected_NO[:, good])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_it_writes_its_output_and_nothing_else(name: str, scheme: str) -> None:
    kernels = quantised_kernels(name, scheme)
    packed = kernels.pack(randn(77, 50))
    assert run(kernels, packed, torch.empty(0, 50)).shape == (0, 77)
    for num_rows in (1, 3, 9, 30):
        memory = torch.full((num_rows * 77 + 64,), 5.0)
        kernels.linear(randn(num_rows, 50), packed, memory[: num_rows * 77].view(num_rows, 77))
        assert (memory[num_rows * 77 :] == 5.0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_matrix_may_be_quantised_in_parts(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [quantised_kernels(name, scheme) for name in ("reference", "native-1")]
    weight_IO = randn(50, 200)
    whole = [side.pack(weight_IO.T).data for side in kernels]
    monkeypatch.setattr("outrider.kernels.reference.linear._WEIGHTS_AT_ONCE", 64)
    monkeypatch.setattr("outrider.kernels.reference.linear._AT_ONCE", 6)
    for side, expected in zip(kernels, whole, strict=True):
        assert torch.equal(side.pack(weight_IO.T).data, expected)


def test_rows_round_to_the_nearest_integer_and_ties_to_even() -> None:
    x_NI = torch.tensor([[127.0, 0.5, 1.5, -2.5, -126.6], [0.0, 0.0, 0.0, -0.0, 0.0]])
    values_NI, scale_N = quantise_rows(x_NI)
    assert torch.equal(values_NI, torch.tensor([[127.0, 0, 2, -2, -127], [0, 0, 0, 0, 0]]))
    assert torch.equal(scale_N, torch.tensor([1.0, 0]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_choice_names_the_scheme(scheme: str) -> None:
    native, reference = (quantised_kernels(name, scheme) for name in ("native-1", "reference"))
    assert native.exact
    assert [choice.name for choice in native.choices[:2]] == [f"native {scheme}", "native"]
    assert [choice.name for choice in reference.choices[:2]] == [f"reference {scheme}", "reference"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_reference_takes_any_device_s_floats(scheme: str) -> None:
    side = definition(scheme)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        packed, out_NO = side.pack(randn(6, 40).to(dtype)), torch.zeros(3, 6)
        side.linear(randn(3, 40), packed, out_NO)
        assert out_NO.isfinite().all()
