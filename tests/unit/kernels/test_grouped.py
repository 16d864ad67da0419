"""Linears over blocks of GGUF files: no number changes, and a row's sums are its own."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from doubles.gguf_writer import OTHER_SCALES, SCALES, TENSORS, random_blocks
from outrider.core import env
from outrider.core.errors import ContractError
from outrider.kernels.native import build
from outrider.kernels.native import build as levels
from outrider.kernels.native.build import Built
from outrider.kernels.native.cpu import TILES, tiles_refusal
from outrider.kernels.native.ops import NativeGrouped, first_outputs
from outrider.kernels.plan import BlockRows, PackedLinear
from outrider.models.gguf.blocks import TYPES, codebook, decode, has_codebook, held_bytes
from unit.kernels.implementations import kernels_named, library_of, randn, row_choices, software

KINDS = (*SCALES, *OTHER_SCALES)
# Half a block of columns, several, and a tail; 768 inputs are more than a slice of any type.
SHAPES = ((768, 45), (256, 8), (1024, 100))


@functools.cache
def grouped(num_threads: int) -> NativeGrouped:
    kernels_named("native-1", torch.bfloat16)  # skips where there are none
    return NativeGrouped(library_of(built()), num_threads)


def built() -> Built:
    return build.built_kernels(env.compiler(), env.cache_folder())


def on_tiles(num_threads: int, *, in_software: bool) -> NativeGrouped:
    """Skips the test, with the reason, where the CPU has no tiles."""
    library = software() if in_software else library_of(built())
    if refusal := tiles_refusal(library):
        pytest.skip(refusal)
    return NativeGrouped(library, num_threads, kind=TILES)


def blocks(kind: str, num_out: int, num_in: int, *, seed: int = 0) -> BlockRows:
    number, block, _ = TENSORS[kind]
    raw = random_blocks(kind, num_out * num_in // block, seed)
    return BlockRows(raw.reshape(-1), number, num_out, num_in, codebook_EV=book(kind))


def book(kind: str) -> NDArray[np.uint8] | None:
    return codebook(kind) if has_codebook(kind) else None


def packed(side: NativeGrouped, *parts: BlockRows) -> PackedLinear:
    found = side.pack(parts)
    assert found is not None
    return found


def numbers(one: BlockRows) -> Tensor:
    found = decode(one.raw, TYPES[one.kind]).reshape(one.num_out, one.num_in)
    flat: Tensor = torch.from_numpy(found)  # pyright: ignore[reportUnknownMemberType]
    return flat if one.order_O is None else flat[one.order_O]


def run(
    side: NativeGrouped, matrix: PackedLinear, x_NI: Tensor, begin: Tensor | None = None
) -> Tensor:
    out_NO = torch.full((len(x_NI), matrix.num_out), 7.0) if begin is None else begin.clone()
    side.linear(x_NI.contiguous(), matrix, out_NO, begin is not None)
    return out_NO


def defined(x_NI: Tensor, parts: Sequence[BlockRows]) -> NDArray[np.float32]:
    """What csrc/groups_add.h says, a step at a time in float64, each rounded to float32: but for
    ties that is what one fused multiply-add gives."""
    x_NUG = x_NI.numpy().reshape(len(x_NI), -1, 32)
    largest_NU = np.abs(x_NUG).max(axis=2)
    inverse_NU = np.float32(127) / largest_NU
    ints_NUG = np.rint(x_NUG * inverse_NU[:, :, None]).astype(np.float64)
    scale_NU = largest_NU / np.float32(127)
    columns: list[NDArray[np.float32]] = []
    for one in parts:
        columns += [
            _column(row, ints_NUG, scale_NU, one) for row in one.raw.reshape(one.num_out, -1)
        ]
    return np.stack(columns, axis=1)


def _column(
    row: NDArray[np.uint8],
    ints_NUG: NDArray[np.float64],
    scale_NU: NDArray[np.float32],
    one: BlockRows,
) -> NDArray[np.float32]:
    """Q4_0 and Q4_1 alone: enough to hold the order of steps."""
    _, _, num_bytes = TENSORS["Q4_0" if one.kind == 2 else "Q4_1"]
    units = row.reshape(-1, num_bytes)
    sums_N = np.zeros(len(ints_NUG), np.float32)
    for u, unit in enumerate(units):
        halves = unit[:4].view(np.float16).astype(np.float32)
        codes = np.concatenate([unit[-16:] & 15, unit[-16:] >> 4]).astype(np.float64)
        zero = 8 if one.kind == 2 else 0
        dots_N = (ints_NUG[:, u] * (codes - zero)).sum(axis=1)
        factor_N = halves[0] * scale_NU[:, u]
        sums_N = (dots_N * factor_N.astype(np.float64) + sums_N).astype(np.float32)
        if one.kind == 3:
            total_N = scale_NU[:, u] * ints_NUG[:, u].sum(axis=1).astype(np.float32)
            more_N = halves[1].astype(np.float64) * total_N.astype(np.float64)
            sums_N = (more_N + sums_N).astype(np.float32)
    return sums_N


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_number_of_a_file_changes(kind: str, shape: tuple[int, int]) -> None:
    num_in, num_out = shape
    side, one = grouped(2), blocks(kind, num_out, num_in)
    order = torch.randperm(num_out, generator=torch.Generator().manual_seed(1))
    for item in (one, one.in_order(order)):
        table = side.table(packed(side, item), torch.float32)
        assert table.floats().equal(numbers(item))
        some = torch.tensor([num_out - 1, 0, 3])
        out_NI = torch.empty(3, num_in)
        table.read(some, out_NI)
        assert out_NI.equal(numbers(item)[some])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_that_plans_reckon_with(kind: str) -> None:
    one = blocks(kind, 64, 512)
    held = held_bytes(TYPES[one.kind]) * len(one.raw) // TYPES[one.kind].block_bytes
    assert packed(grouped(1), one).nbytes == held


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_has_no_other_rows(kind: str) -> None:
    side = grouped(1)
    table = side.table(packed(side, blocks(kind, 8, 256)), torch.float32)
    for bad in (-1, 8, 1 << 40):
        with pytest.raises(IndexError):
            table.read(torch.tensor([0, bad]), torch.empty(2, 256))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_near_the_product_of_the_numbers(kind: str) -> None:
    """Within what rounding inputs to 8 bits by groups of 32 costs."""
    side, one = grouped(2), blocks(kind, 100, 1024)
    x_NI = randn(40, 1024)
    exact_NO = x_NI.double() @ numbers(one).double().T
    difference_NO = run(side, packed(side, one), x_NI).double() - exact_NO
    assert float(difference_NO.square().mean()) < 0.012**2 * float(exact_NO.square().mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_does_not_depend_on_the_pass(kind: str, num_threads: int) -> None:
    side = grouped(num_threads)
    matrix = packed(side, blocks(kind, 77, 768), blocks("Q6_K", 40, 768), blocks(kind, 5, 768))
    x_NI = randn(100, 768) * torch.logspace(-9, 9, 100)[:, None]
    alone_NO = torch.cat([run(grouped(1), matrix, row_I[None]) for row_I in x_NI])
    for rows in row_choices(100):
        assert run(side, matrix, x_NI[rows]).equal(alone_NO[rows])


@pytest.mark.parametrize("in_software", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_give_the_bits_of_other_kernels(kind: str, in_software: bool) -> None:
    """With tails of blocks and of tiles, slices of blocks, and a part that tiles leave out.

    Tiles in hardware are for large matrices, as so many outputs are."""
    side, (float_part, _) = on_tiles(2, in_software=in_software), float8(5, 1280)
    num_out = 77 if in_software else 1229
    parts = (blocks(kind, num_out, 1280), float_part, blocks(kind, 5, 1280, seed=2))
    matrix, alone = packed(side, *parts), packed(grouped(1), *parts)
    x_NI = randn(50, 1280) * torch.logspace(-9, 9, 50)[:, None]
    x_NI[7, 300] = torch.nan
    alone_NO = torch.cat([run(grouped(1), alone, row_I[None]) for row_I in x_NI])
    for num_rows in (7, 16, 31, 32, 33, 50):
        found_NO = run(side, matrix, x_NI[:num_rows])
        fine_N = torch.arange(num_rows) != 7
        assert found_NO[fine_N].equal(alone_NO[:num_rows][fine_N])
        assert bool(found_NO[~fine_N].isnan().all())
    side.linear(x_NI, matrix, found_NO, accumulate=True)
    assert found_NO[:7].equal(alone_NO[:7] + alone_NO[:7])


@pytest.mark.parametrize("kinds", [("Q4_0",), ("Q4_1",), ("Q4_1", "Q4_0", "Q4_1")], ids=str)
def test_sums_are_those_of_the_definition(kinds: tuple[str, ...]) -> None:
    if platform.machine() == "x86_64" and levels.levels_here()[0].name == "x86-64":
        pytest.skip("this CPU has no fused multiply-add")
    side = grouped(2)
    parts = [blocks(kind, 9 + place, 256, seed=place) for place, kind in enumerate(kinds)]
    x_NI = randn(7, 256)
    found = run(side, packed(side, *parts), x_NI)
    assert found.equal(torch.from_numpy(defined(x_NI, parts)))  # pyright: ignore[reportUnknownMemberType]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_arithmetic_gives_the_bits_of_the_fast_instructions(kind: str) -> None:
    x_NI, one = randn(13, 768), blocks(kind, 45, 768)
    fast, plain = grouped(2), NativeGrouped(software(), 1)
    assert run(plain, packed(plain, one), x_NI).equal(run(fast, packed(fast, one), x_NI))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_at_their_limits_do_not_overflow(kind: str) -> None:
    """The largest codes against the largest integers, of either sign."""
    number, block, num_bytes = TENSORS[kind]
    raw = random_blocks(kind, 16 * 512 // block, 0)
    kept = {at + i for at in SCALES.get(kind, ()) for i in (0, 1)} or set(OTHER_SCALES[kind])
    for place in range(num_bytes):
        if place not in kept:
            raw[:, place] = 255
    side = grouped(1)
    one = BlockRows(raw.reshape(-1), number, 16, 512, codebook_EV=book(kind))
    x_NI = torch.ones(6, 512) * torch.tensor([1.0, -1.0, 3.0, -2.0, 1e-3, 1e3])[:, None]
    exact_NO = x_NI.double() @ numbers(one).double().T
    largest = x_NI.abs().double() @ numbers(one).double().abs().T
    difference = (run(side, packed(side, one), x_NI).double() - exact_NO).abs()
    assert bool((difference <= 1e-5 * largest).all())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_row(kind: str) -> None:
    side, x_NI = grouped(2), randn(5, 256)
    matrix = packed(side, blocks(kind, 40, 256))
    fine_NO = run(side, matrix, x_NI)
    x_NI[1, 7], x_NI[3, 200] = torch.nan, -torch.inf
    found_NO = run(side, matrix, x_NI)
    assert bool(found_NO[[1, 3]].isnan().all())
    assert found_NO[[0, 2, 4]].equal(fine_NO[[0, 2, 4]])
    zeros_NO = run(side, matrix, torch.zeros(2, 256))
    assert bool((zeros_NO == 0).all())


@pytest.mark.parametrize("num_rows", [1, 2, 7, 40])
def test_it_adds_to_its_output_and_writes_nothing_else(num_rows: int) -> None:
    side, x_NI = grouped(2), randn(num_rows, 256)
    matrix = packed(side, blocks("Q4_K", 33, 256), blocks("Q8_0", 3, 256))
    begin_NO = randn(num_rows, 36, seed=3)
    assert run(side, matrix, x_NI, begin_NO).equal(begin_NO + run(side, matrix, x_NI))
    room = torch.full((num_rows + 2, 36), 5.0)
    side.linear(x_NI, matrix, room[1:-1])
    assert bool((room[[0, -1]] == 5).all())


def test_a_factor_multiplies_the_sums_and_the_rows_of_its_part() -> None:
    """The second scale of NVFP4: of each part its own."""
    side, x_NI, one = grouped(2), randn(9, 256), blocks("NVFP4", 40, 256)
    matrix = packed(side, one, replace(one, factor=0.375))
    out_NO = run(side, matrix, x_NI)
    assert out_NO[:, 40:].equal(out_NO[:, :40] * 0.375)
    rows_NI = torch.empty(2, 256)
    side.table(matrix, torch.float32).read(torch.tensor([3, 43]), rows_NI)
    assert rows_NI[1].equal(rows_NI[0] * 0.375)


def float8(num_out: int, num_in: int, *, seed: int = 0) -> tuple[BlockRows, Tensor]:
    """Blocks of a float32 and 128 floats of 8 bits, and their numbers."""
    noise = torch.Generator().manual_seed(seed)
    values_OI = torch.randn(num_out, num_in, generator=noise).to(torch.float8_e4m3fn)
    values_OI[0, :2] = torch.tensor([448.0, 2.0**-9]).to(torch.float8_e4m3fn)
    scales_OU1 = torch.rand(num_out, num_in // 128, 1, generator=noise) / 50 + 1e-4
    bytes_OU128 = values_OI.view(torch.uint8).view(num_out, -1, 128)
    raw = torch.cat([scales_OU1.view(torch.uint8), bytes_OU128], dim=2)
    numbers_OI = (values_OI.float().view(num_out, -1, 128) * scales_OU1).view(num_out, num_in)
    return BlockRows(raw.flatten().numpy(), 132, num_out, num_in), numbers_OI


def test_floats_of_8_bits_stay_what_they_are() -> None:
    """And rows of activations are not rounded for them."""
    side, (one, numbers_OI) = grouped(2), float8(45, 768)
    table = side.table(packed(side, one), torch.float32)
    assert table.floats().equal(numbers_OI)
    x_NI = randn(40, 768)
    exact_NO = x_NI.double() @ numbers_OI.double().T
    assert torch.allclose(run(side, packed(side, one), x_NI).double(), exact_NO, atol=1e-5)


def test_a_row_over_floats_of_8_bits_does_not_depend_on_the_pass() -> None:
    """Nor on the instructions, nor on parts of another type."""
    side, plain = grouped(2), NativeGrouped(software(), 1)
    (one, _), (two, _) = float8(77, 1280), float8(5, 1280, seed=1)
    parts = [one, blocks("Q6_K", 40, 1280), two]
    matrix, alone, soft = (packed(each, *parts) for each in (side, grouped(1), plain))
    x_NI = randn(100, 1280)
    alone_NO = torch.cat([run(grouped(1), alone, row_I[None]) for row_I in x_NI])
    for rows in row_choices(100):
        assert run(side, matrix, x_NI[rows]).equal(alone_NO[rows])
    assert run(plain, soft, x_NI[:13]).equal(alone_NO[:13])
    only = packed(side, two)
    assert run(side, only, x_NI).equal(alone_NO[:, -5:])


def test_matrices_that_it_cannot_hold_are_left_to_others() -> None:
    side, fine = grouped(1), blocks("Q4_0", 4, 64)
    assert side.pack([fine] * 8) is not None
    assert side.pack([fine] * 9) is None
    assert side.pack([fine, BlockRows(fine.raw, 9, 4, 64)]) is None
    with pytest.raises(ContractError, match="widths"):
        side.pack([fine, blocks("Q4_0", 4, 32)])
    with pytest.raises(ContractError, match="widths"):
        run(side, packed(side, fine), randn(1, 32))


@pytest.mark.parametrize("count", [1, 45, 46, 144])
def test_the_first_outputs_of_a_matrix_are_a_matrix_in_its_memory(count: int) -> None:
    side, parts = grouped(2), [blocks("Q4_K", 45, 768), blocks("Q6_K", 100, 768, seed=1)]
    whole, x_NI = packed(side, *parts), randn(9, 768)
    part = first_outputs(whole, count)
    assert part is not None
    assert part.data is whole.data
    assert torch.equal(run(side, part, x_NI), run(side, whole, x_NI)[:, :count])
