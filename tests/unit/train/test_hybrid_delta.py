"""Chunks of the delta rule say what the recurrence says token by token, and so do gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.reference.delta import Cells, DeltaInputs, TokenRun, recur
from outrider_lab.train.hybrid_module import chunked_delta

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(
    seed: int, num_tokens: int, num_windows: int = 1, dtype: torch.dtype = torch.float32
) -> Inputs:
    """As a layer makes them: unit keys, rates within (0, 1), heads that forget fast and slowly."""
    rng = torch.Generator().manual_seed(seed)
    heads = (num_windows, 3, num_tokens)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=dtype)

    q_BHTK, k_BHTK = (torch.nn.functional.normalize(drawn(*heads, 4), dim=-1) for _ in range(2))
    speeds_H1 = torch.tensor([[1e-3], [0.3], [8.0]], dtype=dtype)
    fade_BHT = -speeds_H1 * drawn(*heads).abs()
    return q_BHTK / 2, k_BHTK, drawn(*heads, 5), drawn(*heads).sigmoid(), fade_BHT


def by_token(values: Inputs) -> Tensor:
    """The definition, written once more where gradients can follow it."""
    q_BHTK, k_BHTK, v_BHTV, rate_BHT, fade_BHT = values
    state_BHKV = q_BHTK.new_zeros(*q_BHTK.shape[:2], q_BHTK.shape[-1], v_BHTV.shape[-1])
    found: list[Tensor] = []
    for token in range(q_BHTK.shape[2]):
        k_BHK = k_BHTK[:, :, token]
        state_BHKV = fade_BHT[:, :, token, None, None].exp() * state_BHKV
        seen_BHV = (state_BHKV * k_BHK[..., None]).sum(-2)
        change_BHV = rate_BHT[:, :, token, None] * (v_BHTV[:, :, token] - seen_BHV)
        state_BHKV = state_BHKV + k_BHK[..., None] * change_BHV[..., None, :]
        found.append((state_BHKV * q_BHTK[:, :, token, :, None]).sum(-2))
    return torch.stack(found, dim=2)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), num_tokens=st.integers(1, 24), chunk=st.sampled_from([1, 7, 16]))
def test_any_chunk_gives_what_the_decoder_computes(seed: int, num_tokens: int, chunk: int) -> None:
    values = inputs(seed, num_tokens)
    q_THK, k_THK, v_THV, rate_TH, fade_TH = (part[0].transpose(0, 1) for part in values)
    wanted_THV = torch.empty(num_tokens, 3, 5)
    none = (None,) * num_tokens
    run = TokenRun(0, states=none, inputs=none)
    decoded = DeltaInputs(q_THK, k_THK, v_THV, rate_TH, fade_TH.exp())
    recur(decoded, [run], Cells([], []), 0, wanted_THV)
    found_HTV = chunked_delta(*values, chunk=chunk)[0]
    torch.testing.assert_close(found_HTV.transpose(0, 1), wanted_THV, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [5, 16, 21])
def test_gradients_are_those_of_the_recurrence(num_tokens: int) -> None:
    """In double precision; the last case has a chunk that is not full."""
    values = inputs(7, num_tokens, num_windows=2, dtype=torch.float64)
    weights = torch.randn(2, 3, num_tokens, 5, dtype=torch.float64)

    def gradients(function: str) -> tuple[Tensor, ...]:
        q, k, v, rate, fade = (part.clone().requires_grad_() for part in values)
        own: Inputs = (q, k, v, rate, fade)
        found = chunked_delta(*own, chunk=8) if function == "chunks" else by_token(own)
        return torch.autograd.grad((found * weights).sum(), own)

    for found, wanted in zip(gradients("chunks"), gradients("tokens"), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-7)


def test_a_head_that_forgets_at_once_does_not_overflow() -> None:
    q, k, v, rate, fade = inputs(3, 64)
    own = fade.mul(50).requires_grad_()
    found = chunked_delta(q, k, v, rate, own)
    (gradient,) = torch.autograd.grad(found.sum(), own)
    assert torch.isfinite(found).all()
    assert torch.isfinite(gradient).all()
