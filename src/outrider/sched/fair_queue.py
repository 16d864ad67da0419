"""Who starts next among the requests of several keys: the key that has had the fewest tokens.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024):
a key's counter grows by the tokens that are read and written for it, over its weight, and of the
keys that wait the least counter goes first. A key that comes to wait begins where those that wait
are, so nobody saves up a share by being idle, and nobody pays for hours in which nobody else came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from outrider.core.errors import ContractError, given

T = TypeVar("T", bound=Hashable)
# Beyond these a key's tokens would be infinite, or none, for ever.
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6


class FairQueue(Generic[T]):
    """Items of one key start in the order in which they came. A key is known for ever: there are as
    many as somebody configured."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[T, None]] = {}
        self._running: Counter[str] = Counter()
        self._tokens: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        # The key that was the last to have nothing waiting any more.
        self._left: str | None = None

    def __len__(self) -> int:
        return sum(map(len, list(self._waiting.values())))

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._waiting.values() for item in items)

    def add(self, item: T, key: str, *, weight: float = 1.0) -> None:
        """Raises ContractError for a weight that is no number from LEAST_WEIGHT to MOST_WEIGHT."""
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ContractError(f"a weight of {weight}")
        if key not in self._waiting:
            others = [*self._waiting] or [self._left or key]
            floor = min(self._tokens.get(other, 0.0) for other in others)
            self._tokens[key] = max(self._tokens.get(key, 0.0), floor)
            self._waiting[key] = {}
        self._weights[key] = weight
        self._waiting[key][item] = None

    def remove(self, item: T, key: str) -> bool:
        """Whether it waited."""
        if item not in self._waiting.get(key, ()):
            return False
        del self._waiting[key][item]
        if not self._waiting[key]:
            del self._waiting[key]
            self._left = key
        return True

    @property
    def next_key(self) -> str | None:
        """Whose turn it is; of equals the one of which fewer run, or that came first."""
        return min(self._waiting, key=self._place, default=None)

    def _place(self, key: str) -> tuple[float, int]:
        return self._tokens[key], self._running[key]

    def pop(self) -> T:
        """The next one, which now runs."""
        key = given(self.next_key, "item that waits")
        item = next(iter(self._waiting[key]))
        self.take(item, key)
        return item

    def take(self, item: T, key: str) -> None:
        """One that runs though it may not be its turn."""
        self.remove(item, key)
        self._running[key] += 1

    def charge(self, key: str, num_tokens: int) -> None:
        """Tokens that were read or written for an item of `key`."""
        self._tokens[key] += num_tokens / self._weights[key]

    def ended(self, key: str) -> None:
        """One that ran does so no more."""
        self._running[key] -= 1

    @property
    def owing_key(self) -> str | None:
        """The key that should give way to the next one: several of its items run, none of the next
        key's does, and it has not had less than that."""
        key = self.next_key
        if key is None or self._running[key]:
            return None
        running = {k: num for k, num in self._running.items() if num > 1}
        most = max(running, key=running.__getitem__, default=None)
        return most if most is not None and self._tokens[most] >= self._tokens[key] else None
