"""Fleets of the simulator: replicas of an engine, how requests are routed to them, and failures.

A failed replica forgets all that it has read. Its requests continue on another one, which reads
prompt and text so far again; without another one they wait for the first that is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeVar

from outrider.core.errors import ConfigError, did_you_mean
from outrider.sched.routing import Routed, best_known, blocks_of, least_busy

R = TypeVar("R", bound=Routed)
BY_BEGINNING: Final = "beginning"
ROUTINGS: Final = (BY_BEGINNING, "queue", "turns")
MOST_REPLICAS: Final = 256


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
