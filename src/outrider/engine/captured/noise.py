"""The numbers of core/rng.py, made by tensor operators where the round runs.

A captured round cannot ask the host for a number, so it makes its own: the same block of
Philox4x32-10 over the same key (seed, sample, start, node, role), hence the same text for a seed.
A product of two words of 32 bits may pass the sign of int64; it wraps, and its halves are right.

Shapes:  B = rows, N = numbers of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.rng import ROOT, Role
from outrider.engine.captured.laws import Keys

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Decisions:
    """Node and role of each number that a row may ask for, int64: made once, read every round."""

    nodes_N: Tensor
    roles_N: Tensor

    @classmethod
    def of_round(cls, k: int, device: torch.device) -> Decisions:
        """Of k draws, k coins and k + 1 tokens of the target's own, in this order."""
        named = [(node, Role.DRAFT) for node in range(k)]
        named += [(node, Role.ACCEPT) for node in range(k)]
        named += [(node, Role.NEXT) for node in range(ROOT, k)]
        pairs_N2 = torch.tensor([(node + 1, int(role)) for node, role in named], device=device)
        return cls(pairs_N2[:, 0].contiguous(), pairs_N2[:, 1].contiguous())


def keyed_uniforms(keys: Keys, decisions: Decisions) -> Tensor:
    """uniforms_BN in [0, 1), float64, bit for bit those of `KeyedNoise`."""
    k0_B1, k1_B1 = (keys.seed_B & _MASK)[:, None], ((keys.seed_B >> 32) & _MASK)[:, None]
    c0, c1 = decisions.nodes_N[None], keys.start_B[:, None]
    c2, c3 = keys.sample_B[:, None], decisions.roles_N[None]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ k0_B1, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ k1_B1, p0 & _MASK
        k0_B1, k1_B1 = (k0_B1 + 0x9E3779B9) & _MASK, (k1_B1 + 0xBB67AE85) & _MASK
    return ((c0 << 21) | (c1 >> 11)).double() * 2.0**-53
