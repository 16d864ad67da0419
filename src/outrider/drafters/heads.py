"""Nets that draft from the target's hidden states: what MTP and EAGLE have in common.

The block reads, at position p, the token there and the hidden state of the token before it, and
predicts the token at p + 1. For text that the target has read, that state is the target's own;
where the block drafts on, it is the block's. The block has KV of its own.

Shapes:  P = tokens, N = packed tokens, M = packed logits rows, K = captured layers,
         D = hidden size, V = vocabulary of the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.core.protocols import StateStore, StepRow

# The logit of an id that heads do not know: no mass beside any that they do. It is a number, since
# a mask may leave none but such ids, and a law over them must be one.
NOT_DRAFTED = -1e10


@dataclass(frozen=True, slots=True)
class NetOutput:
    """Logits of the rows that asked for them, packed; the block's own states of all tokens."""

    logits_MV: Tensor
    hidden_ND: Tensor


class HeadNet(Protocol):
    """One block or a few (drafters/eagle/net.py, drafters/mtp/net.py)."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose states `fuse` takes."""
        ...

    @property
    def state(self) -> StateStore:
        """The block's own KV: nodes are staged by `step` and kept by `commit`."""
        ...

    def fuse(self, hidden_PKD: Tensor) -> Tensor:
        """From the target's states to what the block reads in their place, of shape [P, D]."""
        ...

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        """One packed pass; `hidden_ND` has the state of the token before each packed token."""
        ...
