from __future__ import annotations

import math

import pytest
import torch

from outrider.core.clock import host_ints
from outrider.models.rope import frequencies, rope_tables, turning_order
from outrider.models.rope_config import Rope

LLAMA3 = Rope("llama3", 500000.0, 8.0, 8192)


def test_plain_frequencies_fall_geometrically() -> None:
    freqs_H = frequencies(Rope(theta=10000.0), 8)
    torch.testing.assert_close(freqs_H, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_linear_stretches_every_position() -> None:
    plain_H = frequencies(Rope(), 16)
    assert torch.equal(frequencies(Rope("linear", factor=4.0), 16), plain_H / 4)


def test_llama3_keeps_the_fast_and_stretches_the_slow() -> None:
    plain_H, scaled_H = frequencies(Rope(theta=500000.0), 128), frequencies(LLAMA3, 128)
    wavelength_H = 2 * math.pi / plain_H
    fast_H, slow_H = wavelength_H < 8192 / 4, wavelength_H > 8192
    assert torch.equal(scaled_H[fast_H], plain_H[fast_H])
    assert torch.equal(scaled_H[slow_H], plain_H[slow_H] / 8)
    between_H = ~(fast_H | slow_H)
    assert between_H.any()
    assert (scaled_H[between_H] < plain_H[between_H]).all()
    assert (scaled_H[between_H] > plain_H[between_H] / 8).all()


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_lies_between_plain_and_linear(truncate: bool) -> None:
    rope = Rope("yarn", 10000.0, 4.0, 2048, truncate=truncate)
    plain_H, yarn_H = frequencies(Rope(), 64), frequencies(rope, 64)
    assert yarn_H[0] == plain_H[0]
    torch.testing.assert_close(yarn_H[-1], plain_H[-1] / 4)
    assert (yarn_H <= plain_H).all()
    assert (yarn_H >= plain_H / 4 * 0.999999).all()


def test_yarn_survives_a_ramp_of_no_width() -> None:
    rope = Rope("yarn", 10000.0, 4.0, 1, beta_fast=2.0, beta_slow=1.0)
    assert frequencies(rope, 4).isfinite().all()


def test_tables_are_cos_and_sin_of_the_angle() -> None:
    cos_TH, sin_TH = rope_tables(Rope(attention_factor=2.0), head_dim=4, num_positions=9)
    assert cos_TH.shape == sin_TH.shape == (9, 2)
    assert cos_TH.dtype == torch.float32
    torch.testing.assert_close(cos_TH[8], 2 * torch.tensor([math.cos(8), math.cos(0.08)]))
    torch.testing.assert_close(sin_TH[8], 2 * torch.tensor([math.sin(8), math.sin(0.08)]))


def test_longrope_divides_each_frequency_by_its_short_factor() -> None:
    rope = Rope("longrope", short_factors=(1.0, 2.0, 4.0, 8.0))
    plain_R = frequencies(Rope(), 8)
    torch.testing.assert_close(frequencies(rope, 8), plain_R / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_what_never_turns_has_a_cos_of_one_whatever_the_attention_factor() -> None:
    rope = Rope(partial_rotary_factor=0.5, attention_factor=2.0)
    cos_TH, sin_TH = rope_tables(rope, head_dim=8, num_positions=5)
    half_TR, _ = rope_tables(Rope(attention_factor=2.0), head_dim=4, num_positions=5)
    assert torch.equal(cos_TH[:, :2], half_TR)
    assert torch.equal(cos_TH[:, 2:], torch.ones(5, 2))
    assert torch.equal(sin_TH[:, 2:], torch.zeros(5, 2))


def test_the_two_halves_of_what_turns_come_to_lie_half_a_head_apart() -> None:
    assert turning_order(Rope(), 16) is None
    order_D = turning_order(Rope(partial_rotary_factor=0.75), 16)
    assert order_D is not None
    order = host_ints(order_D)
    pairs = list(zip(order[:8], order[8:], strict=True))
    assert pairs[:6] == [(i, i + 6) for i in range(6)]
    assert pairs[6:] == [(12, 14), (13, 15)]


def test_long_tables_are_made_in_parts_with_the_same_bits() -> None:
    rope = Rope(partial_rotary_factor=0.5, attention_factor=1.25)
    cos_TH, sin_TH = rope_tables(rope, head_dim=16, num_positions=150_001)
    angles_TR = torch.arange(150_001, dtype=torch.float32)[:, None] * frequencies(rope, 16)
    assert torch.equal(cos_TH[:, :4], angles_TR.cos() * 1.25)
    assert torch.equal(sin_TH[:, :4], angles_TR.sin() * 1.25)
    assert bool((cos_TH[:, 4:] == 1).all())
    assert bool((sin_TH[:, 4:] == 0).all())
