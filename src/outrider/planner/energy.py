"""Energy: joules a token from static power, bytes moved and arithmetic; the limits of a device.

    J = (static watts x T_round + byte joules x bytes + FLOP joules x FLOPs) / tokens of the round

For one sequence bytes dominate, and speculation reads weights once for E tokens: joules fall nearly
as seconds do. Refused tokens cost arithmetic as well, and a drafter its own bytes, so the best K by
joules is then at most the best by time, unless the batch is so large that arithmetic bounds the
pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.core.spec import ModelSpec
from outrider.estimate.theory import RoundStats
from outrider.planner.devices import DeviceSheet, Power
from outrider.planner.roofline import Mixture, PassWork, critical_context, mixture_of, ridge_rows
from outrider.planner.rounds import DecodeLoad


@dataclass(frozen=True, slots=True)
class Energy:
    """`draft` is the draft model, None of a drafter that runs none; `draft_power` that of a device
    of its own, which rests while nothing is drafted."""

    power: Power
    target: PassWork
    draft: PassWork | None = None
    draft_power: Power | None = None


@dataclass(frozen=True, slots=True)
class Joules:
    """Of a round: what flows in its time whatever is done, what moving bytes costs, and what
    arithmetic does."""

    static: float
    moving: float
    counting: float

    @property
    def total(self) -> float:
        return self.static + self.moving + self.counting


def round_joules(
    energy: Energy, load: DecodeLoad, law: RoundStats, seconds: float, *, depth: int
) -> Joules:
    """Of rounds that take `seconds` and draft `depth` deep; of plain ones with depth 0."""
    drafted = law.drafting * law.num_drafted if depth else 0.0
    moved, counted = _pass(energy.target, load, load.batch * (1 + drafted))
    power = energy.power
    static = power.static_watts * seconds
    moving, counting = power.byte_joules * moved, power.flop_joules * counted
    if energy.draft is not None and drafted:
        steps = law.drafting * depth
        once, each = _pass(energy.draft, load, load.batch)
        drafts_with = energy.draft_power or power
        moving += drafts_with.byte_joules * steps * once
        counting += drafts_with.flop_joules * steps * each
        if energy.draft_power is not None:
            static += energy.draft_power.static_watts * seconds
    return Joules(static, moving, counting)


def joules_a_token(
    energy: Energy, load: DecodeLoad, law: RoundStats, seconds: float, *, depth: int
) -> float:
    """Of rounds as those of `round_joules`."""
    spent = round_joules(energy, load, law, seconds, depth=depth)
    return spent.total / (load.batch * law.tokens)


def _pass(work: PassWork, load: DecodeLoad, rows: float) -> tuple[float, float]:
    """Bytes and operations."""
    kept = load.batch * load.context * work.spec.kv_bytes_per_token
    counted = rows * (work.row_flops + load.context * work.read_flops)
    return work.weight_bytes(rows) + kept, counted


@dataclass(frozen=True, slots=True)
class DeviceLimits:
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


def limits_of(spec: ModelSpec, sheet: DeviceSheet, batch: int) -> DeviceLimits:
    """For a batch of so many texts."""
    context = critical_context(spec, batch)
    return DeviceLimits(
        ridge_rows(PassWork(spec), sheet),
        context if math.isfinite(context) else None,
        mixture_of(spec),
    )
