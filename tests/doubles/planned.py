"""Calibrations with round numbers, and a machine of given costs that decodes nothing.

A round of that machine takes `draft_pass` seconds for each token of its longest draft,
`target(rows)` for the pass, `judge` for each drafted token after it, and `catch_up` for each token
that a drafter has not read. What
controllers see is multiplied by noise and depends on drawn acceptances; what a run is judged by is
free of both: expected tokens over noiseless seconds. With the same seed a machine repeats itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.core.draft import RoundTrace
from outrider.core.protocols import Controller
from outrider.estimate.cost import Curve
from outrider_lab.planner.calibration import Calibration, DrafterCosts, PassCosts, PlaceCount


def counts(rates: Sequence[float], num_rounds: int = 10_000) -> tuple[PlaceCount, ...]:
    """As if so many drafts had been kept just as often as `rates` say."""
    found: list[PlaceCount] = []
    for rate in rates:
        kept = round(num_rounds * rate)
        found.append(PlaceCount(num_rounds, kept))
        num_rounds = kept
    return tuple(found)


def costs(
    step: float,
    rates: Sequence[float] = (),
    *,
    name: str = "model",
    each: float = 0.0,
    num_rounds: int = 10_000,
) -> DrafterCosts:
    """`step` seconds a token, and `each` more for every sequence beyond the first."""
    draft = tuple(
        (b, Curve(((1.0, step + each * (b - 1)), (64.0, 64 * (step + each * (b - 1))))))
        for b in (1, 512)
    )
    return DrafterCosts(name, draft, places=counts(rates, num_rounds))


def flat(*drafters: DrafterCosts, target: float = 1.0, scatter: float = 0.0) -> Calibration:
    """Each pass takes `target` seconds whatever it holds."""
    passes = PassCosts(Curve(((1.0, target),)))
    return Calibration("paper", "paper-target", passes, drafters, scatter=scatter)


def sloped(*drafters: DrafterCosts, per_row: float, most: int = 4096) -> Calibration:
    """A pass takes 1 second and `per_row` for every row beyond the first."""
    rows = Curve(((1.0, 1.0), (float(most), 1 + per_row * (most - 1))))
    return Calibration("paper", "paper-target", PassCosts(rows), drafters)


DEEPEST = 64.0


def drafter(step: float, *, name: str = "model") -> DrafterCosts:
    """`step` seconds a token, whoever drafts beside."""
    return DrafterCosts(name, ((1, Curve(((1.0, step), (DEEPEST, DEEPEST * step)))),))


def calibration(target: float, step: float) -> Calibration:
    """Each pass takes `target` seconds whatever it holds, each draft token `step`."""
    return Calibration("paper", "target", PassCosts(Curve(((1.0, target),))), (drafter(step),))


# Rate of acceptance of place j (from 0) of request i when it has so many tokens.
Rate = Callable[[int, int, int], float]


@dataclass(slots=True)
class ToyMachine:
    target: Callable[[int], float]
    draft_pass: float
    rate: Rate
    num_requests: int = 1
    overhead: float = 0.0
    judge: float = 0.0
    noise: float = 0.0
    spikes: float = 0.0
    catch_up: float = 0.0
    speed: Callable[[int], float] = field(default=lambda _: 1.0)
    seed: int = 0

    def expected(self, request: int, depth: int, num_tokens: int) -> float:
        """Tokens of a round that drafts `depth`."""
        rates = [self.rate(request, place, num_tokens) for place in range(depth)]
        return 1 + sum(math.prod(rates[: place + 1]) for place in range(depth))

    def seconds(self, depth: int, num_tokens: int) -> float:
        """Of a round that drafts `depth` for every request, without noise."""
        took = self.target(self.num_requests * (1 + depth)) + self.draft_pass * depth
        took += self.judge * self.num_requests * depth
        return self.speed(num_tokens) * (self.overhead + took)

    def run(self, controller: Controller, num_tokens: int) -> Run:
        """Until all requests together have `num_tokens`."""
        chance = random.Random(self.seed)
        run = Run(tokens=[0] * self.num_requests)
        unread = [0] * self.num_requests
        while sum(run.tokens) < num_tokens:
            ids = list(range(self.num_requests))
            depths = [budget.depth for budget in controller.budgets(ids)]
            speed = self.speed(sum(run.tokens))
            slow = speed * math.exp(chance.gauss(0, self.noise))
            slow *= 8 if chance.random() < self.spikes else 1
            reading = max((unread[i] for i in ids if depths[i]), default=0) * self.catch_up
            drafting = reading + self.draft_pass * max(depths)
            verifying = self.target(self.num_requests + sum(depths))
            accepting = self.overhead + self.judge * sum(depths)
            run.seconds += speed * (drafting + verifying + accepting)
            for i in ids:
                accepted = 0
                while accepted < depths[i] and chance.random() < self.rate(
                    i, accepted, run.tokens[i]
                ):
                    accepted += 1
                run.expected += self.expected(i, depths[i], run.tokens[i])
                unread[i] = 0 if depths[i] else unread[i] + 1
                run.tokens[i] += accepted + 1
                controller.observe(
                    RoundTrace(
                        seq_id=i,
                        pass_index=len(run.depths),
                        drafter="toy",
                        batch_size=self.num_requests,
                        num_target_passes=1,
                        num_prompt_tokens=0,
                        num_drafted=depths[i],
                        num_accepted=accepted,
                        num_emitted=accepted + 1,
                        num_rows_copied=0,
                        draft_seconds=slow * drafting,
                        verify_seconds=slow * verifying,
                        accept_seconds=slow * accepting,
                    )
                )
            run.depths.append(depths)
        return run


@dataclass(slots=True)
class Run:
    """`depths` are those of each round, in the order of the requests."""

    tokens: list[int]
    expected: float = 0.0
    seconds: float = 0.0
    depths: list[list[int]] = field(default_factory=list[list[int]])

    @property
    def tokens_per_second(self) -> float:
        return self.expected / self.seconds
