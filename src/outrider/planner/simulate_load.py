"""What is asked of a simulated engine: requests by their lengths, and when they come.

Three ways to come: all together; in a closed loop, where each of n users asks again when answered;
or as a Poisson process of a rate, whose gaps are drawn from an exponential law with the mean
1 / rate. Lengths are spread evenly between (1 - s) and (1 + s) times their mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from outrider.core.errors import ContractError
from outrider.planner.simulate_chance import Decides, uniform


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens to read and to write, both at least one. `arrives` is in seconds since the beginning;
    a closed loop does not read it."""

    num_prompt: int
    num_output: int
    arrives: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """`in_flight` is the number of users of a closed loop, None where requests come by the clock;
    then they are in the order of their arrival."""

    requests: tuple[Request, ...]
    in_flight: int | None = None

    @property
    def num_tokens(self) -> int:
        """To be written in all."""
        return sum(request.num_output for request in self.requests)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of prompts and outputs, and the spread s of both, from 0 to below 1."""

    prompt: int
    output: int
    spread: float = 0.0

    def request(self, seq_id: int, seed: int) -> Request:
        prompt, output = (
            self._around(mean, uniform(seed, decides, seq_id))
            for mean, decides in ((self.prompt, Decides.PROMPT), (self.output, Decides.OUTPUT))
        )
        return Request(prompt, output)

    def _around(self, mean: int, u: float) -> int:
        return max(round(mean * (1 + self.spread * (2 * u - 1))), 1)


def requests_of(lengths: Lengths, num: int, *, seed: int) -> tuple[Request, ...]:
    """The same whatever engine they are for."""
    return tuple(lengths.request(seq_id, seed) for seq_id in range(num))


def poisson(requests: Iterable[Request], rate: float, *, seed: int) -> Load:
    """`rate` is requests a second."""
    if not rate > 0:
        raise ContractError("a rate is above 0")
    found = tuple(requests)
    gaps = (-math.log1p(-uniform(seed, Decides.GAP, i)) / rate for i in range(len(found)))
    return Load(
        tuple(
            Request(one.num_prompt, one.num_output, moment)
            for one, moment in zip(found, accumulate(gaps), strict=True)
        )
    )
