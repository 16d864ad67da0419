"""Load of a simulation: lengths of prompts and outputs, common beginnings, arrival times.

Numbers are keyed by (seed, request, what is decided), so every engine and every fleet of a
comparison meets the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate

from outrider.core.errors import ContractError
from outrider.core.philox import philox_uniform


class Decides(IntEnum):
    """The purpose of a random number; part of its key, so that no number serves twice."""

    VERDICT = 0
    HIT = 1
    PROMPT = 2
    OUTPUT = 3
    GAP = 4
    FAMILY = 5


def uniform(seed: int, decides: Decides, seq_id: int, start: int = 0) -> float:
    """Return a number in [0, 1)."""
    return philox_uniform(seed, (0, start, seq_id, int(decides)))


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request with tokens to read and to write, both at least one. `arrives` is in seconds since
    the beginning; a closed loop does not read it. All prompts of a `family` have their first
    `num_shared` tokens in common."""

    num_prompt: int
    num_output: int
    arrives: float = 0.0
    family: int = 0
    num_shared: int = 0

    def prompt_ids(self, seq_id: int) -> list[int]:
        """Return ids as a router would see them: equal where prompts are equal."""
        return [~self.family] * self.num_shared + [seq_id] * (self.num_prompt - self.num_shared)


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """The requests of a simulation. `in_flight` is the number of users of a closed loop, None if
    requests come by the clock; then they are in the order of their arrival.

    Requests come in one of three ways: all together; in a closed loop, where each of n users sends
    the next request when answered; or as a Poisson process, whose gaps are exponential with mean 1
    / rate. Lengths are spread evenly between (1 - s) and (1 + s) times their mean.
    """

    requests: tuple[SimulatedRequest, ...]
    in_flight: int | None = None

    @property
    def num_tokens(self) -> int:
        """The tokens to be written in all."""
        return sum(request.num_output for request in self.requests)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of prompts and outputs, and the spread s of both, from 0 to below 1. A prompt
    begins with the `shared` tokens of one of so many families, equally likely; one token or more is
    its own."""

    prompt: int
    output: int
    spread: float = 0.0
    families: int = 1
    shared: int = 0

    def request(self, seq_id: int, seed: int) -> SimulatedRequest:
        prompt, output = (
            self._around(mean, uniform(seed, decides, seq_id))
            for mean, decides in ((self.prompt, Decides.PROMPT), (self.output, Decides.OUTPUT))
        )
        family = int(uniform(seed, Decides.FAMILY, seq_id) * self.families)
        shared = min(self.shared, prompt - 1)
        return SimulatedRequest(prompt, output, family=family, num_shared=shared)

    def _around(self, mean: int, u: float) -> int:
        return max(round(mean * (1 + self.spread * (2 * u - 1))), 1)


def requests_of(lengths: Lengths, num: int, *, seed: int) -> tuple[SimulatedRequest, ...]:
    """Return requests that do not depend on the engine."""
    return tuple(lengths.request(seq_id, seed) for seq_id in range(num))


def poisson(requests: Iterable[SimulatedRequest], rate: float, *, seed: int) -> SimulatedLoad:
    """Return a load that comes at a mean `rate` of requests a second."""
    if not rate > 0:
        raise ContractError("a rate is above 0")
    found = tuple(requests)
    gaps = (-math.log1p(-uniform(seed, Decides.GAP, i)) / rate for i in range(len(found)))
    return SimulatedLoad(
        tuple(
            replace(one, arrives=moment)
            for one, moment in zip(found, accumulate(gaps), strict=True)
        )
    )
