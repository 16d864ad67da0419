"""What a sheet says of a target by itself, in numbers and in sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.core.spec import ModelSpec
from outrider.estimate.forecast import Mixture
from outrider_lab.planner.roofline import device_sheet, limits_of

LLAMA = ModelSpec(
    *("8b", "llama", 128_256, 4096, 32, 32, 8, 128, 14_336, 8192, 8_030_261_248, 2, 2)
)
H200 = device_sheet("h200")


def test_the_limits_of_a_dense_model() -> None:
    limits = limits_of(LLAMA, H200, 8)
    assert round(limits.ridge_rows) == 183
    assert limits.critical_context == pytest.approx(2 * 8_030_261_248 / (8 * 131_072))
    assert list(limits.sentences(8, 5)) == [
        "Up to 183 rows a pass waits for memory, from there on for arithmetic; passes of this plan "
        "have 40.",
        "Keys and values weigh more than the weights from 15,317 tokens of context on in a batch "
        "of 8.",
    ]


def test_a_mixture_reads_more_for_more_rows() -> None:
    sparse = replace(LLAMA, num_experts=128, num_active_experts=8, expert_parameters=7 * 10**9)
    limits = limits_of(sparse, H200, 1)
    mixture = Mixture(128, 8, 7e9 / 8_030_261_248)
    assert limits.mixture == mixture
    *_, told = limits.sentences(1, 5)
    ratio = mixture.read_share(5) / mixture.read_share(1)
    assert told == (
        "A row uses 8 of 128 experts, so a pass of 5 rows reads "
        f"{ratio:.2f} times the weights of one of 1."
    )
    assert 2 < ratio < 3


def test_a_model_that_keeps_no_context_has_no_critical_one() -> None:
    limits = limits_of(replace(LLAMA, num_kv_layers=0), H200, 1)
    assert limits.critical_context is None
    assert len(list(limits.sentences(1, 5))) == 1
