"""Seconds of simulated jobs, from a calibration.

A job drafts, then runs one target pass over verified drafts and prompt chunks:

    drafting   seconds of a draft of the deepest of those that were not ready, for as many sequences
    ahead      the same for K + 1 steps and F times as many sequences: a step over the draft that is
               being verified, then K steps of all branches at once (F verdicts a sequence)
    the pass   overhead + host b + rule R + target(rows, sum of S_i, sum of R_i S_i)
    hand-over  `sync`, where a job only drafts: what the two lanes say to each other

The target's part is that of `estimate/calibration.py`. The draft model's prefill is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.estimate.calibration import Calibration, DrafterCosts


@dataclass(frozen=True, slots=True)
class Drafted:
    """A sequence for which `depth` tokens are drafted, and the tokens that it had committed."""

    depth: int
    context: int


@dataclass(frozen=True, slots=True)
class Fed:
    """A sequence's part of a target pass: `rows` new tokens above `context` committed ones, of
    which `judged` are decided about and `emitted` go out; 0 for a prompt chunk."""

    rows: int
    context: int
    judged: int = 0
    emitted: int = 0


@dataclass(frozen=True, slots=True)
class JobCosts:
    """`fan_out` verdicts are drafted for ahead; `sync` is seconds."""

    calibration: Calibration
    drafter: DrafterCosts | None
    fan_out: int = 1
    sync: float = 0.0

    def draft_seconds(self, drafted: Sequence[Drafted]) -> float:
        """One after another in depth, all sequences at once; nothing where nothing is drafted."""
        return self._draft(drafted, steps=0, branches=1)

    def ahead_seconds(self, drafted: Sequence[Drafted]) -> float:
        return self._draft(drafted, steps=1, branches=self.fan_out)

    def pass_seconds(self, fed: Sequence[Fed]) -> float:
        if not fed:
            return 0.0
        known = self.calibration
        shared = known.overhead + known.host * len(fed)
        shared += known.rule * sum(one.judged for one in fed)
        shared += known.token * sum(one.emitted for one in fed)
        return shared + known.target.seconds(
            sum(one.rows for one in fed),
            sum(one.context for one in fed),
            sum(one.rows * one.context for one in fed),
        )

    def _draft(self, drafted: Sequence[Drafted], *, steps: int, branches: int) -> float:
        deep = [one for one in drafted if one.depth]
        if not deep or self.drafter is None:
            return 0.0
        depth = max(one.depth for one in deep) + steps
        context = sum(one.context for one in deep)
        return self.drafter.seconds(depth, len(deep) * branches, context)


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    """Seconds of the parts of a round of `batch` sequences with a context each. `ahead` is T_p,
    what is drafted beside a verification; `step` a draft step of one branch a sequence."""

    plain: float
    draft: float
    verify: float
    ahead: float
    step: float

    @property
    def draft_share(self) -> float:
        """T_SD over a plain pass."""
        return self.draft / self.plain if self.plain > 0 else 0.0

    @property
    def window_steps(self) -> float | None:
        """Draft steps in the time of a verification; None where they take no time."""
        return self.verify / self.step if self.step > 0 else None


def round_times(costs: JobCosts, *, batch: int, context: int, k: int) -> SimulatedTimes:
    """Of full drafts of `k` tokens for everybody, each lane alone."""
    deep = [Drafted(k, context)] * batch
    return SimulatedTimes(
        plain=costs.pass_seconds([Fed(1, context, 1)] * batch),
        draft=costs.draft_seconds(deep),
        verify=costs.pass_seconds([Fed(k + 1, context, k + 1)] * batch),
        ahead=costs.ahead_seconds(deep),
        step=costs.draft_seconds([Drafted(1, context)] * batch),
    )


def widest_fan_out(costs: JobCosts, *, batch: int, context: int, k: int, most: int) -> int:
    """The most verdicts a sequence, up to `most`, that can be drafted for within a verification;
    0 if not even one can. Costs never fall as branches grow, up to noise of their measurement."""
    window = round_times(costs, batch=batch, context=context, k=k).verify
    deep = [Drafted(k, context)] * batch
    fits = [
        fan_out
        for fan_out in range(1, most + 1)
        if replace(costs, fan_out=fan_out).ahead_seconds(deep) <= window
    ]
    return max(fits, default=0)
