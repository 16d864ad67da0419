"""What a device sheet says of a target by itself: where its passes turn, whatever is drafted.

Formulas are those of roofline.py. Here they become numbers of one target and the sentences that a
plan has of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.core.spec import ModelSpec
from outrider.planner.roofline import Mixture, PassWork, critical_context, mixture_of, ridge_rows
from outrider.planner.sheets import DeviceSheet


@dataclass(frozen=True, slots=True)
class Limits:
    """Up to `ridge_rows` a pass waits for memory. From `critical_context` tokens of each text on
    its keys and values weigh more than the weights, None for a model that keeps none. `mixture` is
    that of a model with experts."""

    ridge_rows: float
    critical_context: float | None
    mixture: Mixture | None

    def sentences(self, batch: int, rows_each: int) -> Iterator[str]:
        """Of rounds that verify `rows_each` rows of each of `batch` texts."""
        rows = batch * rows_each
        yield (
            f"Up to {self.ridge_rows:.0f} rows a pass waits for memory, from there on for "
            f"arithmetic; passes of this plan have {rows}."
        )
        if self.critical_context is not None:
            yield (
                f"Keys and values weigh more than the weights from {self.critical_context:,.0f} "
                f"tokens of context on in a batch of {batch}."
            )
        if self.mixture is not None:
            plain, verified = (self.mixture.read_share(num) for num in (batch, rows))
            yield (
                f"A row uses {self.mixture.num_active} of {self.mixture.num_experts} experts, so a "
                f"pass of {rows} rows reads {verified / plain:.2f} times the weights of one of "
                f"{batch}."
            )


def limits_of(spec: ModelSpec, sheet: DeviceSheet, batch: int) -> Limits:
    """For a batch of so many texts."""
    context = critical_context(spec, batch)
    return Limits(
        ridge_rows(PassWork(spec), sheet),
        context if math.isfinite(context) else None,
        mixture_of(spec),
    )
