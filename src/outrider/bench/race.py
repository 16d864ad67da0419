"""Two or more ways of doing the same work, timed side by side in one process.

Every contestant runs every piece of work once before the next piece begins, in an order that
rotates, so that drift of the machine (clock, neighbours, caches) falls on all alike. Results are
ratios of medians and of sums; seconds are kept for the record only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

W = TypeVar("W")


@dataclass(slots=True)
class Score:
    """One contestant's tokens and seconds, a value a piece of work."""

    tokens: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    def to_dict(self) -> dict[str, float]:
        rates = [t / s for t, s in zip(self.tokens, self.seconds, strict=True)]
        return {
            "tokens_per_second": round(self.tokens_per_second, 2),
            "median_tokens_per_second": round(statistics.median(rates), 2),
            "tokens": sum(self.tokens),
            "seconds": round(sum(self.seconds), 3),
        }


def race(
    contestants: Mapping[str, Callable[[W], Sequence[Sequence[int]]]],
    work: Sequence[W],
    *,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Scores by name; a contestant maps a piece of work to the ids it emitted.

    The first piece of work is run once untimed, to warm everybody up; `tick` is called after each.
    """
    names = list(contestants)
    for name in names:
        contestants[name](work[0])
    scores = {name: Score() for name in names}
    for turn, piece in enumerate(work):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            started = perf_counter()
            emitted = contestants[name](piece)
            scores[name].seconds.append(perf_counter() - started)
            scores[name].tokens.append(sum(map(len, emitted)))
        tick()
    return scores


def best(scores: Mapping[str, Score], names: Sequence[str]) -> str:
    """The fastest of `names`."""
    return max(names, key=lambda name: scores[name].tokens_per_second)
