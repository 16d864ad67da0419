"""Contestants that take turns: two or more methods for the same work, timed in alternation.

Every contestant runs every piece of work once before the next piece begins, in an order that
rotates from visit to visit, so that drift of the machine (clock, neighbours, caches) falls on all
alike. Results are ratios within visits; seconds are stored for the record only.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

from outrider.measure.machine import Neighbours

if TYPE_CHECKING:
    from outrider.api.llm import LLM

C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")
# The token ids of each prompt of a piece of work.
Texts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Visit(Generic[R]):
    """The result of each contestant's turn, in the order of the contestants, not of their turns.
    `foreign_cpu_share` is the CPU share of other programs meanwhile (machine.py)."""

    results: Sequence[R]
    foreign_cpu_share: float | None


def visit(contestants: Sequence[C], turn: int, run: Callable[[C], R]) -> Visit[R]:
    """Let every contestant `run` once, in rotated order beginning with number `turn`."""
    found: dict[int, R] = {}
    with Neighbours() as neighbours:
        for number in rotated(range(len(contestants)), turn):
            found[number] = run(contestants[number])
    return Visit([found[number] for number in range(len(contestants))], neighbours.share)


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items in rotated order, beginning with number `turn`."""
    return [items[(turn + offset) % len(items)] for offset in range(len(items))]


def in_turns(groups: Iterable[Sequence[T]]) -> list[T]:
    """The first of every group, then the second of every group, and so on."""
    return [one for row in zip_longest(*groups) for one in row if one is not None]


@dataclass(frozen=True, slots=True)
class Attempt(Generic[R]):
    """The result of a turn: its `value`, or the `reason` for which there is none."""

    value: R | None
    reason: str | None
    seconds: float


def attempt(work: Callable[[], R], clock: Callable[[], float] = perf_counter) -> Attempt[R]:
    """Run and time `work`. One contestant must not end hours of others: any error becomes the
    reason of its attempt, and only an interrupt passes through."""
    began = clock()
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 - see above
        return Attempt(None, f"{type(error).__name__}: {error}", clock() - began)
    return Attempt(value, None, clock() - began)


def different_tokens(ours: Texts, theirs: Texts, name: str, more: str = "") -> str | None:
    """The reason of a failed sample whose tokens must be those of the contestant `name` and are
    not, followed by `more`. None if they are the same."""
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if tuple(a) != tuple(b):
            differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            token = next(differing, min(len(a), len(b)))
            where = f"token {token}" if len(theirs) == 1 else f"token {token} of prompt {row}"
            return f"DifferentTokens: not those of {name} from {where} on{more}"
    return None


def facts_of(llm: LLM) -> dict[str, object]:
    """Facts about a loaded contestant, for the record of a run."""
    return {
        "drafter": llm.drafter,
        "kernels": {choice.op: choice.name for choice in llm.kernels.choices},
        "row_exact_kernels": llm.kernels.exact,
        "notes": list(llm.notes),
    }


def digest_of(texts: Texts) -> str:
    """12 hexadecimal digits of a hash of token ids: equal for two runs with equal texts."""
    return hashlib.sha256(json.dumps([list(ids) for ids in texts]).encode()).hexdigest()[:12]


@dataclass(slots=True)
class Score:
    """One contestant's tokens and seconds, a value per piece of work."""

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
    contestants: Mapping[str, Callable[[W], Texts]],
    work: Sequence[W],
    *,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Scores by name; a contestant maps a piece of work to the ids it emitted.

    The first piece of work is run once untimed, as a warm-up; `tick` is called after each.
    """
    for run in contestants.values():
        run(work[0])
    scores = {name: Score() for name in contestants}
    for turn, piece in enumerate(work):
        for name in rotated(list(contestants), turn):
            started = perf_counter()
            emitted = contestants[name](piece)
            scores[name].seconds.append(perf_counter() - started)
            scores[name].tokens.append(sum(map(len, emitted)))
        tick()
    return scores


def best(scores: Mapping[str, Score], names: Sequence[str]) -> str:
    """The fastest of `names`."""
    return max(names, key=lambda name: scores[name].tokens_per_second)
