"""Draft heads that read the target's hidden states: the common parts of EAGLE and MTP.

At position p the net reads the token there and the hidden state of the token before it, and
predicts the token at p + 1. For text that the target has read the state is the target's; below it
the state is the net's own. The net has a KV cache of its own, and takes tables, operators and
precision from its target (`NormedTarget`).

Shapes:  P = tokens, N = packed tokens, M = packed logits rows, K = captured layers, D = hidden
         size, V = vocabulary of the drafts or vocabulary, R = rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError, ConfigError, given
from outrider.core.protocols import CacheStore, CausalLM, DraftRow, StepRow
from outrider.drafters.growth import TextPart
from outrider.kernels.operators import Kernels
from outrider.models.heads import HeadTarget, head_target
from outrider.models.weights import Placement

# The logit of an id that heads do not know: no mass next to any known id. It is a number, since a
# mask may leave only such ids, and their distribution must be valid.
NOT_DRAFTED = -1e10


@dataclass(frozen=True, slots=True)
class NetOutput:
    """Logits of the rows that requested them, packed, and the block's own states of all tokens."""

    logits_MV: Tensor
    hidden_ND: Tensor


def target_states(parts: Sequence[TextPart]) -> Tensor:
    """Return hidden_PKD of the token before each token of `parts`."""
    states = [_states_before(part.row, part.start, len(part.tokens)) for part in parts]
    return states[0] if len(states) == 1 else torch.cat(states)


def _states_before(row: DraftRow, start: int, count: int) -> Tensor:
    """Return the states before these tokens; the state before a text's first token is zero."""
    hidden_PKD = given(row.hidden, "hidden state").read(max(start - 1, 0), start + count - 1)
    if start > 0:
        return hidden_PKD
    return torch.cat([hidden_PKD.new_zeros(1, *hidden_PKD.shape[1:]), hidden_PKD])


class HeadNet(Protocol):
    """A net of one block or a few (drafters/head_net.py)."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose states `fuse` takes."""
        ...

    @property
    def state(self) -> CacheStore:
        """The block's own KV: nodes are staged by `step` and retained by `commit`."""
        ...

    def fuse(self, hidden_PKD: Tensor) -> Tensor:
        """Return the states that the block reads, of shape [P, D], from the target's states."""
        ...

    def step(self, rows: Sequence[StepRow], hidden_ND: Tensor) -> NetOutput:
        """Run one packed pass; `hidden_ND` has the state of the token before each packed token."""
        ...


class NormConfig(Protocol):
    @property
    def rms_norm_eps(self) -> float: ...


@runtime_checkable
class NormedTarget(HeadTarget, Protocol):
    """A target whose last norm is by the root mean square, so that heads can repeat it."""

    @property
    def config(self) -> NormConfig: ...


def normed_target(target: CausalLM) -> NormedTarget:
    """Return the target. Raises ConfigError if it shares no tables or ends in another norm."""
    shared = head_target(target)
    if not isinstance(shared, NormedTarget):
        raise ConfigError(
            f"the target {target.spec.name} ({target.spec.family}) ends in a norm that these heads "
            "cannot repeat.",
            hint="draft without heads: --drafter ngram",
        )
    return shared


def own_kernels(target: HeadTarget) -> Kernels:
    """Return the target's operators with other scratch: heads draft while a lane verifies."""
    twin = target.kernels.twin
    return target.kernels if twin is None else twin()


def placement_of(target: HeadTarget) -> Placement:
    """Return the precision and the device of the target's weights."""
    embedding_VD = target.tables.embeddings
    return Placement("heads", embedding_VD.dtype, embedding_VD.device)


def check_finite(folder: Path, logits_RV: Tensor, part: str) -> None:
    """Check that the answer of `part` to a probe, which touches every weight, has only numbers.
    Raises CheckpointError otherwise."""
    broken_R = ~logits_RV.isfinite().all(-1)
    if bool(broken_R.any()):
        index = int(broken_R.nonzero()[0, 0])
        raise CheckpointError(
            f"{folder}: {part} {index} has weights that are not numbers (NaN).",
            hint="take an earlier checkpoint, or train it anew with a lower learning rate",
        )
