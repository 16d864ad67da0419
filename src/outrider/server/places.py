"""Places among the requests in flight: who gets one, and what the others are told.

A request takes a place for each of its completions, and one while it has none. A server with a free
place takes any request whole: what its own limits allow is never refused by an idle server. A full
one still takes requests of keys that have less than their share of the places, so that one key
alone cannot shut others out; twice as many as there are is the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from outrider.server.errors import ASK_AGAIN, ApiError


@dataclass(slots=True)
class Place:
    """What one request holds."""

    key: str
    most: int
    most_of_a_key: int
    num_completions: int = 0


# Of the request that the present task answers.
_PLACE: ContextVar[Place | None] = ContextVar("outrider_place", default=None)


@dataclass(slots=True, kw_only=True)
class Places:
    """`weights` of keys are 1 where none is named."""

    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    taken: Counter[str] = field(default_factory=Counter[str])
    """By key; a key that has none is not in it."""

    def weight(self, key: str) -> float:
        return self.weights.get(key, 1.0)

    @contextmanager
    def place(self, key: str, most: int, most_of_a_key: int) -> Generator[None]:
        """For one request, of `most` at once and `most_of_a_key` for one key. Raises ApiError where
        there is none."""
        place = Place(key, most, most_of_a_key)
        self._check(place)
        self.taken[key] += 1
        before = _PLACE.set(place)
        try:
            yield
        finally:
            _PLACE.reset(before)
            self.taken[key] -= max(1, place.num_completions)
            if not self.taken[key]:
                del self.taken[key]

    def widen(self, num_completions: int) -> None:
        """The request that is being answered has so many completions more. Raises ApiError where
        others took the places meanwhile."""
        place = _PLACE.get()
        if place is None:
            return
        held = max(1, place.num_completions)
        more = place.num_completions + num_completions - held
        if more:
            self._check(place, held)
        place.num_completions += num_completions
        self.taken[place.key] += more

    def _check(self, place: Place, held: int = 0) -> None:
        """Whether one more finds a place beside what others hold, besides these `held`."""
        key, most = place.key, place.most
        mine, total = self.taken[key] - held, self.taken.total() - held
        if mine >= place.most_of_a_key:
            raise _too_many(f"{mine} completions of this key are in flight.")
        if total < most:
            return
        others = sum(map(self.weight, self.taken.keys() - {key}))
        share = most * self.weight(key) / (others + self.weight(key))
        if mine > share and others:
            raise _too_many(f"the server is full, and {mine} of the places are this key's.")
        if mine >= share or total >= 2 * most:
            raise ApiError(
                503,
                f"{total} completions are in flight. Ask again later.",
                code="overloaded",
                retry_after=ASK_AGAIN,
            )


def _too_many(told: str) -> ApiError:
    return ApiError(
        429,
        f"{told} Wait for one to end.",
        code="rate_limit_exceeded",
        retry_after=ASK_AGAIN,
    )
