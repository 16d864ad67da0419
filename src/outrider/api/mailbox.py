"""Events that wait for a reader: those of a slow reader become one larger event.

However many wait, each token is copied at most twice: once into a merged event, and once when the
reader takes all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.api.result import MOST_EVENTS, TextEvent


@dataclass(slots=True)
class Mailbox:
    """The waiting events of one request. Its owners must use it from one thread at a time."""

    _merged: list[TextEvent] = field(default_factory=list[TextEvent])
    """Events older than those in `_fresh`; each was more than MOST_EVENTS events."""
    _fresh: deque[TextEvent] = field(default_factory=deque[TextEvent])

    def put(self, events: Iterable[TextEvent]) -> None:
        self._fresh += events
        if len(self._fresh) > MOST_EVENTS:
            self._merged.append(TextEvent.merged(self._fresh))
            self._fresh.clear()

    def take(self) -> TextEvent | None:
        """The next event; one for all if more wait than a reader gets separately."""
        if self._merged:
            event = TextEvent.merged([*self._merged, *self._fresh])
            self._merged.clear()
            self._fresh.clear()
            return event
        return self._fresh.popleft() if self._fresh else None

    def __bool__(self) -> bool:
        return bool(self._merged or self._fresh)
