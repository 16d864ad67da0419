"""Native filters at edges that a sum or a search may fall on the wrong side of.

Shapes:  N = rows, V = vocabulary.
"""

from __future__ import annotations

import pytest
import torch

from outrider.core.sampling import PLAIN
from unit.kernels.implementations import IMPLEMENTATIONS, kernels_named, randn


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("num_likely", [20, 77, 300])
def test_a_nucleus_reaches_its_mass_by_the_definition_s_sum(name: str, num_likely: int) -> None:
    """Where `top_p` lies a little above the mass of all likely tokens, one unlikely one belongs to
    them; a sum in float32 cannot tell."""
    side, generator = kernels_named(name, torch.float32).sampling, torch.Generator().manual_seed(0)
    for _ in range(40):
        probs_V = torch.zeros(3000)
        probs_V[:num_likely] = torch.rand(num_likely, generator=generator) / 2 + 0.5
        probs_V[num_likely : num_likely + 50] = 0.02
        probs_V /= probs_V.double().sum().float()
        likely = float(probs_V[:num_likely].double().sum())
        probs_V = probs_V[torch.randperm(3000, generator=generator)]
        for more in (3e-9, 3e-8, 1e-7):
            got_NV, wanted_NV = probs_V[None].clone(), probs_V[None].double()
            side.keep_likely(got_NV, likely + more, 0.0)
            PLAIN.keep_likely(wanted_NV, likely + more, 0.0)
            assert torch.equal(got_NV > 0, wanted_NV > 0)


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("k", [1, 255, 257, 1023, 1024, 1025, 4095, 8999])
def test_top_k_of_every_size_and_order(name: str, k: int) -> None:
    """A row that rises makes a search for its largest look at every number."""
    side, some_V = kernels_named(name, torch.float32).sampling, randn(9000)
    rising_V = some_V.sort().values
    rows = (some_V, rising_V, rising_V.flip(0), (4 * some_V).round(), torch.zeros(9000))
    logits_NV = torch.stack(rows)
    got_NV, wanted_NV = torch.empty_like(logits_NV), torch.empty_like(logits_NV)
    side.top_k(logits_NV, k, got_NV)
    PLAIN.top_k(logits_NV, k, wanted_NV)
    assert torch.equal(got_NV, wanted_NV)


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
@pytest.mark.parametrize("min_p", [0.0, 0.5, 0.27, 0.25])
def test_a_nucleus_ends_where_its_mass_is_reached_exactly(
    name: str, kept: int, min_p: float
) -> None:
    """Powers of two: every sum and share is exact, so there is one answer."""
    side = kernels_named(name, torch.float32).sampling
    probs_NV = torch.tensor([[0.0625, 0.5, 0.0625, 0.125, 0.25]])
    wanted_NV = probs_NV.double()
    top_p = 1 - 2.0**-kept
    side.keep_likely(probs_NV, top_p, min_p)
    PLAIN.keep_likely(wanted_NV, top_p, min_p)
    assert torch.allclose(probs_NV.double(), wanted_NV, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("kept", [1, 2, 9, 17])
def test_tokens_of_just_a_sixteenth_of_the_likeliest_count(name: str, kept: int) -> None:
    """A sixteenth is the first bound that a nucleus is looked for above."""
    side, probs_NV = kernels_named(name, torch.float32).sampling, torch.zeros(1, 3000)
    probs_NV[0, 1500] = 0.5
    probs_NV[0, 40 : 40 + 16 * 130 : 130] = 1 / 32
    wanted_NV = probs_NV.double()
    top_p = 0.5 + (kept - 1) / 32
    side.keep_likely(probs_NV, top_p, 0.0)
    PLAIN.keep_likely(wanted_NV, top_p, 0.0)
    assert int((probs_NV > 0).sum()) == kept
    assert torch.allclose(probs_NV.double(), wanted_NV, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("most", [1e-39, 1.17e-38, 1e-45])
def test_a_nucleus_of_numbers_that_are_next_to_none(name: str, most: float) -> None:
    side, probs_NV = kernels_named(name, torch.float32).sampling, torch.zeros(1, 64)
    probs_NV[0, 3] = most
    side.keep_likely(probs_NV, 0.5, 0.0)
    assert (int(probs_NV[0].argmax()), int((probs_NV > 0).sum())) == (3, 1)


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 12.0])
def test_a_nucleus_of_thousands_is_that_of_the_definition(
    name: str, top_p: float, spread: float
) -> None:
    """Equal numbers, numbers of one bucket, and numbers over many."""
    side = kernels_named(name, torch.float32).sampling
    probs_NV = torch.softmax(spread * randn(2, 20_001).double(), dim=-1).float()
    wanted_NV = probs_NV.double()
    side.keep_likely(probs_NV, top_p, 0.0)
    PLAIN.keep_likely(wanted_NV, top_p, 0.0)
    assert torch.equal(probs_NV > 0, wanted_NV > 0)
    torch.testing.assert_close(probs_NV.double(), wanted_NV, rtol=1e-6, atol=0)
