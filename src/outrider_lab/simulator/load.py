"""Load of a simulation, and the fleet of replicas that serves it: lengths of prompts and outputs,
common beginnings, arrival times, routing and failures.

Numbers are keyed by (seed, request, what is decided), so every engine and every fleet of a
comparison meets the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, count
from typing import Final, TypeVar

from outrider.core.errors import ConfigError, ContractError, did_you_mean
from outrider.core.philox import philox_uniform
from outrider.sched.admission import Routed, best_known, blocks_of, least_busy


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


R = TypeVar("R", bound=Routed)
BY_BEGINNING: Final = "beginning"
ROUTINGS: Final = (BY_BEGINNING, "queue", "turns")
MOST_REPLICAS: Final = 256


# A failed replica forgets all that it has read. Its requests continue on another one, which reads
# prompt and text so far again; without another one they wait for the first that is back.
@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a replica, from the second `at` on and for so many seconds."""

    replica: int
    at: float
    seconds: float

    @property
    def ends(self) -> float:
        return self.at + self.seconds


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet of replicas. `routing` is "beginning" (the server's policy), "queue" (least busy) or
    "turns". Raises ConfigError for an unknown routing or an impossible failure."""

    replicas: int = 1
    routing: str = BY_BEGINNING
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise ConfigError(
                f"there are {self.replicas} replicas.",
                hint=f"from 1 to {MOST_REPLICAS}",
            )
        if self.routing not in ROUTINGS:
            raise ConfigError(
                f"no routing {self.routing!r}.", hint=did_you_mean(self.routing, ROUTINGS)
            )
        for one in self.failures:
            if not 0 <= one.replica < self.replicas:
                raise ConfigError(
                    f"replica {one.replica} fails, and there are {self.replicas}, from 0 on.",
                    hint="--replicas 2 --failures 1@10+5",
                )
            if not (one.at >= 0 and one.seconds > 0):
                raise ConfigError(
                    f"a failure begins at {one.at:g} s and takes {one.seconds:g} s.",
                    hint="it takes some time: --failures 0@10+5",
                )


class Router:
    """A policy that chooses one of the replicas that are up for a request."""

    def __init__(self, routing: str) -> None:
        self._routing = routing
        self._turns = count()

    def choose(self, engines: Sequence[R], ids: Sequence[int], *, is_moved: bool) -> R:
        """Return the engine for a prompt `ids`; there is at least one. A moved request goes to the
        least busy engine, as in the server."""
        if self._routing == "turns":
            return engines[next(self._turns) % len(engines)]
        blocks = list(blocks_of(ids)) if self._routing == BY_BEGINNING else []
        chosen = least_busy(engines) if is_moved or not blocks else best_known(engines, blocks)
        chosen.known.note(blocks)
        return chosen
