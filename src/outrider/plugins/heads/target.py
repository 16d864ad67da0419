"""The target as heads read it: its tables, its last norm, its operators and its output head.

Shapes:  V = vocabulary, R = rows of a probe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.protocols import CausalLM
from outrider.kernels.native.ops import first_outputs
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear
from outrider.models.llama_weights import Tables
from outrider.models.weights import Placement


@runtime_checkable
class HeadTarget(CausalLM, Protocol):
    """A target that shares its embedding, last norm and output head with heads."""

    @property
    def kernels(self) -> Kernels: ...
    @property
    def tables(self) -> Tables: ...


def head_target(target: CausalLM) -> HeadTarget:
    """Return `target` as one that shares its tables. Raises ConfigError if it does not."""
    if not isinstance(target, HeadTarget):
        raise ConfigError(
            f"the target {target.spec.name} ({target.spec.family}) does not share its tables with "
            "draft heads; decoders of the Llama family do.",
            hint="draft without heads: --drafter ngram, or name a draft model with --draft",
        )
    return target


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


def placement_of(target: HeadTarget) -> Placement:
    """Return the precision and the device of the target's weights."""
    table = target.tables.embedding
    device = table.device if isinstance(table, Tensor) else table.packed.data.device
    return Placement("heads", table.dtype, device)


def draft_head(target: HeadTarget, num_ids: int) -> tuple[PackedLinear, Tensor | None]:
    """Return the target's output head, and the ids that its outputs stand for, None for all. If
    `num_ids` is not 0 it has the first ids alone, where kernels can read a part of it."""
    head = target.tables.head
    part = first_outputs(head, num_ids) if 0 < num_ids < head.num_out else None
    return (head, None) if part is None else (part, torch.arange(num_ids))


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
