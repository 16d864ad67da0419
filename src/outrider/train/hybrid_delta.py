"""The gated delta rule over whole windows, a chunk at a time, so that training is matrix products.

Token by token (kernels/reference/delta.py) the state S of a value head goes

    S <- a S;   d = b (v - S^T k);   S <- S + k d^T;   o = S^T q.

With S0 the state before a chunk and g_t the sum of log a up to its token t, a chunk's changes are
the solution of one triangular system (Yang et al. 2024, arXiv 2406.06484, 3.2, and "Gated Delta
Networks", arXiv 2412.06464, 3.3):

    (I + L) D = B (V - e^g K S0),         L_ti = b_t e^(g_t - g_i) k_t . k_i   for i < t
    O = e^g Q S0 + M D,                   M_ti = e^(g_t - g_i) q_t . k_i       for i <= t
    S1 = e^(g_c) S0 + (e^(g_c - g) K)^T D

Systems of all chunks are solved together; only S goes from chunk to chunk. It sums in another order
than the decoder, which may not depend on how a text is cut; a loss may.

Shapes:  B = windows, H = value heads, T = tokens, K = key size, V = value size, N = chunks,
         C = tokens of a chunk, W = V + K.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

# Longer chunks take more products of tokens with tokens, shorter ones more turns of the loop.
_CHUNK = 32


def chunked_delta(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    rate_BHT: Tensor,
    fade_BHT: Tensor,
    chunk: int = _CHUNK,
) -> Tensor:
    """o_BHTV from a state of zeros. `rate_BHT` is b, `fade_BHT` is log a, at most 0."""
    num_tokens = q_BHTK.shape[2]
    # Tokens of zeros change nothing: d = 0 and a = 1.
    missing = -num_tokens % chunk
    q, k, v = (_chunks(part, missing, chunk) for part in (q_BHTK, k_BHTK, v_BHTV))
    rate, fade = (_chunks(part[..., None], missing, chunk) for part in (rate_BHT, fade_BHT))
    so_far_BHNC1 = fade.cumsum(-2)
    places_C = torch.arange(chunk, device=q.device)
    later_CC = places_C[None] > places_C[:, None]
    between_BHNCC = (so_far_BHNC1 - so_far_BHNC1.mT).masked_fill(later_CC, -torch.inf).exp()
    grown_BHNC1 = so_far_BHNC1.exp()
    # The diagonal is taken as ones and never read.
    system_BHNCC = rate * between_BHNCC * (k @ k.mT)
    given_BHNCW = rate * torch.cat([v, grown_BHNC1 * k], dim=-1)
    linalg = cast("Any", torch.linalg)
    solved_BHNCW: Tensor = linalg.solve_triangular(
        system_BHNCC, given_BHNCW, upper=False, unitriangular=True
    )
    fresh, seen = torch.split(solved_BHNCW, [v.shape[-1], k.shape[-1]], dim=-1)
    seeing_BHNCC = between_BHNCC * (q @ k.mT)
    asking_BHNCK = grown_BHNC1 * q
    ends_BHN11 = so_far_BHNC1[..., -1:, :]
    leaving_BHNKC = ((ends_BHN11 - so_far_BHNC1).exp() * k).mT
    state_BHKV = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    found: list[Tensor] = []
    for number in range(q.shape[2]):
        change_BHCV = fresh[:, :, number] - seen[:, :, number] @ state_BHKV
        found.append(
            asking_BHNCK[:, :, number] @ state_BHKV + seeing_BHNCC[:, :, number] @ change_BHCV
        )
        kept_BHKV = ends_BHN11[:, :, number].exp() * state_BHKV
        state_BHKV = kept_BHKV + leaving_BHNKC[:, :, number] @ change_BHCV
    return torch.cat(found, dim=2)[:, :, :num_tokens]


def _chunks(x_BHTF: Tensor, missing: int, chunk: int) -> Tensor:
    """x_BHNCF, with `missing` tokens of zeros behind the last."""
    padded_BHTF = functional.pad(x_BHTF, (0, 0, 0, missing))
    return padded_BHTF.reshape(*x_BHTF.shape[:2], -1, chunk, x_BHTF.shape[-1])
