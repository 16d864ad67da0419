"""Plans of several replicas: the same texts at once, shared out evenly, on 1, 2, 4, ... devices.

Each replica is planned like one engine with its share of the texts, on a device of its own, so
rates add up. Queues, common prompts and failures are for the simulator.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.core.errors import CapacityError
from outrider.estimate.calibration import Calibration
from outrider.planner.advise import AdvisedPlan, Question, advise


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """A plan for replicas with `batch` texts each, together `tokens_per_second`, drafted by
    `words`; `price` is that of a million tokens. None without memory for the texts."""

    replicas: int
    batch: int
    tokens_per_second: float | None
    words: str
    price: float | None

    @property
    def each(self) -> float | None:
        """Tokens a second of one text."""
        if self.tokens_per_second is None:
            return None
        return self.tokens_per_second / (self.replicas * self.batch)

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def replica_plans(
    calibration: Calibration, question: Question, *, texts: int, most: int, price: float | None
) -> tuple[ReplicaPlan, ...]:
    """Return plans of 1, 2, 4, ... and `most` replicas for so many `texts` at once; `price` is that
    of an hour of one replica. `question` is that of one replica."""
    counts = [1 << n for n in range(most.bit_length()) if 1 << n < most]
    return tuple(_plan(calibration, question, count, texts, price) for count in (*counts, most))


def _plan(
    calibration: Calibration, question: Question, count: int, texts: int, price: float | None
) -> ReplicaPlan:
    batch = math.ceil(texts / count)
    asked = replace(question, job=replace(question.job, batch=batch))
    try:
        made = advise(calibration, asked)
    except CapacityError:
        return ReplicaPlan(count, batch, None, "does not fit", None)
    rate = count * tokens_per_second(made)
    cost = None if price is None else 1e6 * price * count / (3600 * rate)
    best = made.best.words if made.best is not None and made.speculate else "plain decoding"
    return ReplicaPlan(count, batch, rate, best, cost)


def tokens_per_second(plan: AdvisedPlan) -> float:
    """Return the rate of what a plan advises."""
    if plan.best is None or not plan.speculate:
        return plan.plain_tokens_per_second
    return plan.best.tokens_per_second
