"""Models that are costs alone: which products a pass makes, and of what memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.kernels.plan import PackedLinear
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider_lab.models.gemm import (
    GEMM_SHAPES,
    GemmModel,
    NonGemmCosts,
    gemm_shape,
    make_gemm,
    products,
)

NEEDS = DraftNeeds()
SHAPE = gemm_shape("64x160x3x4x2x16")
CAPACITY = ModelCapacity(num_slots=64, page_size=8, max_rows=16, max_logits=16)


def made(
    costs: NonGemmCosts | None = None,
    *,
    name: str = "64x160x3x4x2x16",
    quantise: str = "none",
    dtype: str = "auto",
) -> GemmModel:
    options = LoadOptions(
        capacity=CAPACITY, device="cpu", threads=1, quantise=quantise, dtype=dtype
    )
    return make_gemm(gemm_shape(name), costs or NonGemmCosts(), options)


def multiplied(model: GemmModel, num_rows: int) -> list[tuple[int, int, int]]:
    """(rows, outputs, inputs) of every product of one pass."""
    found: list[tuple[int, int, int]] = []
    linear = model.kernels.linear

    def spy(x_NI: Tensor, packed: PackedLinear, out_NO: Tensor, accumulate: bool = False) -> None:
        assert x_NI.is_contiguous()
        assert out_NO.is_contiguous()
        assert out_NO.shape == (x_NI.shape[0], packed.num_out)
        found.append((x_NI.shape[0], packed.num_out, packed.num_in))
        linear(x_NI, packed, out_NO, accumulate)

    model.kernels = replace(model.kernels, linear=spy)
    passed(model, num_rows)
    return found


def passed(model: GemmModel, num_rows: int = 1) -> Tensor:
    model.state.open(0, ())
    logits_MV = model.step([StepRow.chain(0, (1,) * num_rows)], NEEDS).logits_MV.clone()
    model.state.close(0)
    return logits_MV


def test_a_layer_is_seven_products_of_the_right_sizes() -> None:
    layer = [(64, 64), (32, 64), (32, 64), (64, 64), (160, 64), (160, 64), (64, 160)]
    assert multiplied(made(), 5) == [(5, *sizes) for _ in range(3) for sizes in layer]


@pytest.mark.parametrize("costs", [NonGemmCosts(attention=True), NonGemmCosts(norms=True)])
def test_with_what_surrounds_them_they_are_fused_as_in_real_layers(costs: NonGemmCosts) -> None:
    layer = [(128, 64), (64, 64), (320, 64), (64, 160)]
    assert multiplied(made(costs), 2) == [(2, *sizes) for _ in range(3) for sizes in layer]


def test_a_head_multiplies_by_the_vocabulary() -> None:
    assert multiplied(made(NonGemmCosts(head=True)), 2)[-1] == (2, SHAPE.vocab_size, 64)


@pytest.mark.parametrize("attention", [False, True])
def test_attention_and_norms_run_where_they_are_asked_for(attention: bool) -> None:
    model = made(NonGemmCosts(attention=attention, norms=not attention))
    calls = {"attention": 0, "rms_norm": 0}

    def counted(name: str) -> object:
        plain = getattr(model.kernels, name)

        def call(*given: object) -> None:
            calls[name] += 1
            plain(*given)

        return call

    changed = {name: counted(name) for name in calls}
    model.kernels = replace(model.kernels, **changed)  # pyright: ignore[reportArgumentType]
    passed(model)
    assert calls == {"attention": 3 * attention, "rms_norm": 6 * (not attention)}


@pytest.mark.parametrize("fused", [False, True])
def test_known_shapes_have_the_weights_of_their_models(fused: bool) -> None:
    """Of the layers alone: 6.98 of the 8.03 billion of Llama-8B are there."""

    def weights(name: str) -> int:
        shape = GEMM_SHAPES[name]
        sizes = products(shape, fused=fused).values()
        return shape.num_layers * sum(num_out * num_in for num_out, num_in in sizes)

    assert weights("llama-1b") == 973_078_528
    assert weights("llama-8b") == 6_979_321_856
    assert weights("llama-70b") == 68_451_041_280


def test_weights_are_written_and_products_stay_in_range() -> None:
    model = made(name="64x160x60x4x2x16")
    for weight in model.streamed:
        values = weight if weight.is_floating_point() else weight.view(torch.uint8)
        assert (values != 0).float().mean() > 0.9
    model.state.open(0, ())
    model.step([StepRow.chain(0, (1, 2))], NEEDS)
    x_ND = model._passes.scratch.x_ND[:2]  # pyright: ignore[reportPrivateUsage]
    assert x_ND.isfinite().all()
    assert 1e-3 < float(x_ND.abs().mean()) < 1e3
    assert (x_ND[0] == x_ND[1]).all()


def test_logits_without_a_head_are_zero_and_memory_is_kept_as_in_any_model() -> None:
    model = made()
    assert not passed(model, 3).any()
    assert model.state.num_free_tokens == CAPACITY.num_slots
    assert model.spec.num_parameters == 3 * (64 * (128 + 64 + 480))
    assert model.weight_bytes >= 2 * model.spec.num_parameters


def test_quantised_weights_take_less() -> None:
    plain, quantised = made(), made(quantise="int8")
    assert quantised.weight_bytes < 0.8 * plain.weight_bytes
    assert not passed(quantised).any()


def test_a_twin_shares_weights_and_memory() -> None:
    model = made()
    twin = model.twin()
    if twin is None:
        pytest.skip("these kernels have no twin")
    assert twin.state is model.state
    assert [w.data_ptr() for w in twin.streamed] == [w.data_ptr() for w in model.streamed]


@given(
    heads=st.integers(1, 8),
    group=st.integers(1, 4),
    head_dim=st.integers(1, 8).map(lambda n: 2 * n),
    rest=st.tuples(st.integers(1, 99), st.integers(1, 99), st.integers(1, 9)),
)
def test_any_sizes_can_be_written(
    heads: int, group: int, head_dim: int, rest: tuple[int, int, int]
) -> None:
    hidden, ffn, layers = rest
    shape = gemm_shape(f"{hidden}x{ffn}x{layers}x{heads * group}x{heads}x{head_dim}")
    found = shape.hidden_size, shape.ffn_size, shape.num_layers
    assert found == rest
    assert (shape.num_heads, shape.num_kv_heads) == (heads * group, heads)
    assert (shape.head_dim, shape.is_whole) == (head_dim, True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-7b", "no shape"),
        ("12x", "is no shape"),
        ("64x0x1x1x1", "size of 0"),
        ("64x64x1x3x2x4", "no multiple"),
        ("64x64x1x2x2x3", "cannot turn"),
    ],
)
def test_words_that_are_no_shape_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        gemm_shape(name)
    assert caught.value.hint


def test_what_cannot_be_taken_is_refused() -> None:
    for wrong in (lambda: SHAPE.with_layers(4), lambda: SHAPE.scaled(3)):
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(ConfigError, match="no cost 'atention'") as caught:
        NonGemmCosts.named(["atention"])
    assert "attention" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="dtype"):
        made(dtype="int3")
