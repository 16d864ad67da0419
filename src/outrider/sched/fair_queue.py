"""A fair queue over API keys: the key that has had the fewest tokens starts its next request first.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024):
a key's counter grows by the tokens that are read and written for it, divided by its weight, and of
the keys with waiting requests the one with the least counter goes first. A key whose requests begin
to wait starts at the least counter of the waiting keys. So no key saves up a share while idle, or
pays for hours in which it was alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from outrider.core.errors import ContractError, given

T = TypeVar("T", bound=Hashable)
# Outside this range a key would have infinitely many tokens, or none, for ever.
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6


class FairQueue(Generic[T]):
    """A queue in which items of one key start in the order in which they came. Keys are never
    forgotten: there are only as many as the operator configured."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[T, None]] = {}
        self._running: Counter[str] = Counter()
        self._tokens: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        # The key whose last waiting item left most recently.
        self._left: str | None = None

    def __len__(self) -> int:
        return sum(map(len, list(self._waiting.values())))

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._waiting.values() for item in items)

    def add(self, item: T, key: str, *, weight: float = 1.0) -> None:
        """Add an item. Raises ContractError for a weight outside LEAST_WEIGHT to MOST_WEIGHT."""
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
        """Remove an item; return whether it was waiting."""
        if item not in self._waiting.get(key, ()):
            return False
        del self._waiting[key][item]
        if not self._waiting[key]:
            del self._waiting[key]
            self._left = key
        return True

    @property
    def next_key(self) -> str | None:
        """The key whose item starts next; of equals the one with fewer running, or the first."""
        return min(self._waiting, key=self._rank, default=None)

    def _rank(self, key: str) -> tuple[float, int]:
        return self._tokens[key], self._running[key]

    def pop(self) -> T:
        """Return the next item and count it as running."""
        key = given(self.next_key, "item that waits")
        item = next(iter(self._waiting[key]))
        self.take(item, key)
        return item

    def take(self, item: T, key: str) -> None:
        """Count an item as running, even if it is not its turn."""
        self.remove(item, key)
        self._running[key] += 1

    def charge(self, key: str, num_tokens: int) -> None:
        """Charge a key for tokens that were read or written for one of its items."""
        self._tokens[key] += num_tokens / self._weights[key]

    def ended(self, key: str) -> None:
        """Count one running item of the key less."""
        self._running[key] -= 1

    @property
    def owing_key(self) -> str | None:
        """The key that should give way to `next_key`, or None. Several of its items run while the
        next key has none running, and it has had at least as many tokens."""
        key = self.next_key
        if key is None or self._running[key]:
            return None
        running = {k: num for k, num in self._running.items() if num > 1}
        most = max(running, key=running.__getitem__, default=None)
        return most if most is not None and self._tokens[most] >= self._tokens[key] else None
