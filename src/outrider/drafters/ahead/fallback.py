"""What drafts after a verdict that nobody foresaw.

`jit` drafts with the model now, for the sequences that missed and no others: the round waits for
it. `ngram` copies from the text, which costs nothing and is kept less often. `none` does without.
`auto` chooses between the first two. Let p be the share of foreseen verdicts, G_x the tokens of a
round with fallback x, T the seconds of drafting now over those of a verification. In a batch of b
all verdicts are foreseen with probability p^b, so a round takes 1 + (1 - p^b) T with jit and 1 with
ngram; jit pays while b < b* = ln(1 - (G_jit / G_ngram - 1) / T) / ln p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.draft import Draft
from outrider.core.protocols import Drafter, DraftRow

Kind = Literal["jit", "ngram", "none", "auto"]
Source = Literal["table", "jit", "ngram", "none"]

# Rounds of each source before its mean is believed; and of so many misses, one tries the other.
ENOUGH = 16
TRY_EVERY = 32


def crossover(hit: float, tokens_jit: float, tokens_fast: float, seconds_jit: float) -> float:
    """b*: the batch below which drafting now pays. `seconds_jit` is over those of a verification.

    Infinite where it pays in every batch, 0 where in none.
    """
    if hit >= 1 or seconds_jit <= 0:
        return math.inf
    left = 1 - (tokens_jit / tokens_fast - 1) / seconds_jit
    if left <= 0:
        return math.inf
    if left >= 1 or hit <= 0:
        return 0.0
    return math.log(left) / math.log(hit)


@dataclass(slots=True)
class Mean:
    """A running mean in which old values fade."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.total = 0.98 * self.total + value
        self.weight = 0.98 * self.weight + 1

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


def _means() -> dict[Source, Mean]:
    return {"table": Mean(), "jit": Mean(), "ngram": Mean(), "none": Mean()}


@dataclass(slots=True)
class Estimates:
    """Running means: the share of hits, tokens of a round by where its draft came from, and the
    seconds of drafting now and of a verification."""

    hits: Mean = field(default_factory=Mean)
    tokens: dict[Source, Mean] = field(default_factory=_means)
    jit_seconds: Mean = field(default_factory=Mean)
    verify_seconds: Mean = field(default_factory=Mean)

    @property
    def crossover(self) -> float | None:
        """b* by what was seen; None while there is too little of it."""
        slow, fast = self.tokens["jit"], self.tokens["ngram"]
        if min(slow.weight, fast.weight) < ENOUGH / 2 or not self.verify_seconds.value:
            return None
        p, on_hit = self.hits.value, self.tokens["table"].value
        tokens_jit = p * on_hit + (1 - p) * slow.value
        tokens_fast = p * on_hit + (1 - p) * fast.value
        seconds = self.jit_seconds.value / self.verify_seconds.value
        return crossover(p, tokens_jit, tokens_fast, seconds)


class Fallback:
    """Drafts for rows that missed. `fast` is asked where `kind` allows; both know all sequences."""

    def __init__(
        self, jit: Drafter, fast: Drafter, kind: Kind = "jit", clock: Clock = HOST_CLOCK
    ) -> None:
        self.estimates = Estimates()
        self._jit = jit
        self._fast = fast
        self._kind: Kind = kind
        self._clock = clock
        self._num_choices = 0

    def propose(
        self, rows: Sequence[DraftRow], batch: int, *, now: bool = False
    ) -> tuple[list[Draft], Source]:
        """Drafts of `rows`, of a batch of so many, and where they came from. `now` asks for the
        model whatever the kind."""
        if not rows:
            return [], "none"
        source = "jit" if now else self._source(batch)
        if source == "none":
            return [Draft.empty() for _ in rows], source
        if source == "ngram":
            return self._fast.propose(rows), source
        began = self._clock()
        drafts = self._jit.propose(rows)
        self.estimates.jit_seconds.add(self._clock() - began)
        return drafts, source

    def _source(self, batch: int) -> Source:
        if self._kind == "auto":
            return self._cheaper(batch)
        return self._kind

    def _cheaper(self, batch: int) -> Source:
        self._num_choices += 1
        limit = self.estimates.crossover
        if limit is None:
            return "jit" if self._num_choices % 2 else "ngram"
        jit = batch < limit
        if self._num_choices % TRY_EVERY == 0:
            jit = not jit
        return "jit" if jit else "ngram"
