"""Joules a token: what flows anyway, what moving bytes costs, and what arithmetic costs.

    J = (static watts x T_round + byte joules x bytes + FLOP joules x FLOPs) / tokens of the round

For one sequence bytes dominate, and speculation reads weights once for E tokens: joules fall nearly
as seconds do. Refused tokens cost arithmetic as well, and a drafter its own bytes, so the best K by
joules is then at most the best by time. Where a batch is so large that arithmetic bounds the pass,
this need not be so: time grows with every row there, while weights are still shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.estimate.theory import RoundLaw
from outrider.planner.roofline import PassWork
from outrider.planner.rounds import Load
from outrider.planner.sheets import Power


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
    energy: Energy, load: Load, law: RoundLaw, seconds: float, *, depth: int
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
    energy: Energy, load: Load, law: RoundLaw, seconds: float, *, depth: int
) -> float:
    """Of rounds as those of `round_joules`."""
    spent = round_joules(energy, load, law, seconds, depth=depth)
    return spent.total / (load.batch * law.tokens)


def _pass(work: PassWork, load: Load, rows: float) -> tuple[float, float]:
    """Bytes and operations."""
    kept = load.batch * load.context * work.spec.kv_bytes_per_token
    counted = rows * (work.row_flops + load.context * work.read_flops)
    return work.weight_bytes(rows) + kept, counted
