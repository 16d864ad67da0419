"""Admission control: the number of completions in flight, shared fairly among API keys. Requests
beyond it are refused with status 429 or 503.

A request takes a slot for each of its completions, and one slot before they start. A server with a
free slot admits any request, however many completions it has: an idle server never refuses what its
own limits allow. A full server still admits requests of keys that have less than their share of the
slots, so that one key alone cannot shut out the others. It never admits more than twice the number
of slots.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from outrider.core.clock import give_back
from outrider.server.errors import ASK_AGAIN, ApiError


@dataclass(slots=True)
class Slot:
    """The slots that one request holds, and its limits."""

    key: str
    most: int
    most_of_a_key: int
    num_completions: int = 0


# Seconds after the last body until its memory is returned to the system, which takes milliseconds.
_FREED_SECONDS = 1.0
# Requests of a batch have this prefix before their key, and this fraction of the key's weight.
BATCH, BATCH_WEIGHT = "batch/", 1 / 64
# The slot of the request that the current task answers.
_SLOT: ContextVar[Slot | None] = ContextVar("outrider_slot", default=None)


@dataclass(slots=True, kw_only=True)
class Admission:
    """Slots of all keys. Keys without an entry in `weights` have weight 1."""

    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    taken: Counter[str] = field(default_factory=Counter[str])
    """Number of slots by key; a key without a slot has no entry."""

    def weight(self, key: str) -> float:
        own = self.weights.get(key.removeprefix(BATCH), 1.0)
        return own * BATCH_WEIGHT if key.startswith(BATCH) else own

    @contextmanager
    def slot(
        self, key: str, most: int, most_of_a_key: int, *, is_in: bool = False
    ) -> Generator[None]:
        """Hold a slot for one request, of `most` in all and `most_of_a_key` for one key. Raises
        ApiError if none is free. A request that `is_in` was just admitted, and is not checked
        again."""
        slot = Slot(key, most, most_of_a_key)
        if not is_in:
            self._check(slot)
        self.taken[key] += 1
        before = _SLOT.set(slot)
        try:
            yield
        finally:
            _SLOT.reset(before)
            self.taken[key] -= max(1, slot.num_completions)
            if not self.taken[key]:
                del self.taken[key]

    def widen(self, num_completions: int) -> None:
        """Take slots for `num_completions` more completions of the current request. Raises
        ApiError if other requests have taken the slots in the meantime."""
        slot = _SLOT.get()
        if slot is None:
            return
        held = max(1, slot.num_completions)
        more = slot.num_completions + num_completions - held
        if more:
            self._check(slot, held)
        slot.num_completions += num_completions
        self.taken[slot.key] += more

    def _check(self, slot: Slot, held: int = 0) -> None:
        """Check that a slot is free, besides the request's own `held` ones. Raises ApiError."""
        key, most = slot.key, slot.most
        mine, total = self.taken[key] - held, self.taken.total() - held
        if mine >= slot.most_of_a_key:
            raise _too_many(f"{mine} completions of this key are in flight.")
        if total < most:
            return
        others = sum(map(self.weight, self.taken.keys() - {key}))
        share = most * self.weight(key) / (others + self.weight(key))
        if mine > share and others:
            raise _too_many(f"the server is full, and this key has {mine} of its completions.")
        if mine >= share or total >= 2 * most:
            raise ApiError(
                503,
                f"{total} completions are in flight. Ask again later.",
                code="overloaded",
                retry_after=ASK_AGAIN,
            )


@dataclass(slots=True)
class Bodies:
    """Memory for bodies being read: `most` bytes in all, at most half of them for one key."""

    most: int = 64 << 20
    taken: Counter[str] = field(default_factory=Counter[str])
    """Bytes by key."""
    _waiting: dict[asyncio.Future[None], tuple[str, int]] = field(
        default_factory=dict[asyncio.Future[None], tuple[str, int]]
    )
    _num_freed: int = 0

    @asynccontextmanager
    async def hold(self, key: str, num_bytes: int, seconds: float) -> AsyncGenerator[None]:
        """Hold memory for a body. Raises ApiError if none is free within `seconds`."""
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


def _too_many(problem: str) -> ApiError:
    return ApiError(
        429, f"{problem} Wait for one to end.", code="rate_limit_exceeded", retry_after=ASK_AGAIN
    )
