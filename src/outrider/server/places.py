"""Places among the requests in flight: who gets one, and what the others are told.

A request takes a place for each of its completions, and one while it has none. A server with a free
place takes any request whole: what its own limits allow is never refused by an idle server. A full
one still takes requests of keys that have less than their share of the places, so that one key
alone cannot shut others out; twice as many as there are is the most.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from outrider.core.collector import give_back
from outrider.server.errors import ASK_AGAIN, ApiError


@dataclass(slots=True)
class Place:
    """What one request holds."""

    key: str
    most: int
    most_of_a_key: int
    num_completions: int = 0


# When the last bodies are freed; to give back takes milliseconds.
_FREED_SECONDS = 1.0
# Requests of batches have the key behind this word, and so small a share of the server beside it.
BATCH, BATCH_WEIGHT = "batch/", 1 / 64
# Of the request that the present task answers.
_PLACE: ContextVar[Place | None] = ContextVar("outrider_place", default=None)


@dataclass(slots=True, kw_only=True)
class Places:
    """`weights` of keys are 1 where none is named."""

    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    taken: Counter[str] = field(default_factory=Counter[str])
    """By key; a key that has none is not in it."""

    def weight(self, key: str) -> float:
        own = self.weights.get(key.removeprefix(BATCH), 1.0)
        return own * BATCH_WEIGHT if key.startswith(BATCH) else own

    @contextmanager
    def place(
        self, key: str, most: int, most_of_a_key: int, *, is_in: bool = False
    ) -> Generator[None]:
        """For one request, of `most` at once and `most_of_a_key` for one key. Raises ApiError where
        there is none; one that `is_in` had its place until now."""
        place = Place(key, most, most_of_a_key)
        if not is_in:
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


@dataclass(slots=True)
class Bodies:
    """Memory of bodies that are being read, `most` bytes at once, half of them of one key."""

    most: int = 64 << 20
    taken: Counter[str] = field(default_factory=Counter[str])
    """Bytes by key."""
    _waiting: dict[asyncio.Future[None], tuple[str, int]] = field(
        default_factory=dict[asyncio.Future[None], tuple[str, int]]
    )
    _num_freed: int = 0

    @asynccontextmanager
    async def hold(self, key: str, num_bytes: int, seconds: float) -> AsyncGenerator[None]:
        """Raises ApiError where there is no memory within `seconds`."""
        if self._fits(key, num_bytes):
            self.taken[key] += num_bytes
        else:
            await self._turn(key, num_bytes, seconds)
        try:
            yield
        finally:
            self._release(key, num_bytes)

    def _fits(self, key: str, num_bytes: int) -> bool:
        most_of_key = self.most // 2 if key else self.most
        if self.taken[key] + num_bytes > most_of_key:
            return False
        return self.taken.total() + num_bytes <= self.most

    async def _turn(self, key: str, num_bytes: int, seconds: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = key, num_bytes
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException as error:
            if self._waiting.pop(turn, None) is None:
                self._release(key, num_bytes)
            if not isinstance(error, TimeoutError):
                raise
            words = "bodies of other requests have the memory for them. Ask again later."
            raise ApiError(503, words, code="overloaded", retry_after=ASK_AGAIN) from None

    def _release(self, key: str, num_bytes: int) -> None:
        self.taken[key] -= num_bytes
        if not self.taken[key]:
            del self.taken[key]
        for turn, (other, num) in list(self._waiting.items()):
            if not turn.done() and self._fits(other, num):
                del self._waiting[turn]
                self.taken[other] += num
                turn.set_result(None)
        self._num_freed += num_bytes
        if not self.taken and self._num_freed >= self.most // 2:
            self._num_freed = 0
            loop = asyncio.get_running_loop()
            loop.call_later(_FREED_SECONDS, loop.run_in_executor, None, give_back)


def _too_many(told: str) -> ApiError:
    return ApiError(
        429, f"{told} Wait for one to end.", code="rate_limit_exceeded", retry_after=ASK_AGAIN
    )
