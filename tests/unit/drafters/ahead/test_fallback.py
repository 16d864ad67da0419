"""Which fallback answers a miss, and from which batch on drafting now no longer pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.clocks import FakeClock
from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.plugins.lanes.ahead.forecast import Fallback, crossover
from outrider.testing import row


@dataclass(slots=True)
class Timed:
    """Drafts one token, and takes so many seconds for it."""

    name: str
    clock: FakeClock
    seconds: float = 0.0
    needs: DraftNeeds = field(default_factory=DraftNeeds)
    asked: list[int] = field(default_factory=list[int])

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...
    def close(self, seq_id: int) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self.clock.advance(self.seconds)
        self.asked.append(len(rows))
        return [Draft.chain([1]) for _ in rows]


def goodput(batch: int, hit: float, tokens: float, seconds: float) -> float:
    """Tokens of a round over its seconds, in verifications; `seconds` are those of a fallback."""
    return tokens / (1 + (1 - hit**batch) * seconds)


@examples(100)
@given(
    hit=st.floats(0.05, 0.95),
    slow=st.floats(1, 8),
    fast=st.floats(1, 8),
    seconds=st.floats(0.05, 3),
    batch=st.integers(1, 32),
)
def test_below_the_crossover_drafting_now_is_faster(
    hit: float, slow: float, fast: float, seconds: float, batch: int
) -> None:
    limit = crossover(hit, slow, fast, seconds)
    ours, theirs = goodput(batch, hit, slow, seconds), goodput(batch, hit, fast, 0.0)
    if batch < limit - 1e-6:
        assert ours >= theirs * (1 - 1e-9)
    if batch > limit + 1e-6:
        assert ours <= theirs * (1 + 1e-9)


def test_the_ends_of_the_crossover() -> None:
    assert crossover(1.0, 2, 3, 0.5) == math.inf
    assert crossover(0.5, 3, 1, 0.5) == math.inf
    assert crossover(0.5, 2, 2, 0.5) == 0
    assert crossover(0.0, 1.2, 1, 0.5) == 0
    assert crossover(0.8, 1.25, 1, 0.5) == pytest.approx(math.log(0.5) / math.log(0.8))


def make(kind: str, seconds: float = 0.5) -> tuple[Fallback, Timed, Timed]:
    clock = FakeClock()
    jit, fast = Timed("model", clock, seconds), Timed("ngram", clock)
    fallback = Fallback(jit, fast, kind, clock)  # pyright: ignore[reportArgumentType]
    return fallback, jit, fast


def test_each_kind_asks_its_own_drafter_for_the_missing_rows_alone() -> None:
    rows = [row(0, [1], depth=3), row(1, [2], depth=3)]
    for kind, slow, quick in (("jit", [2], []), ("ngram", [], [2]), ("none", [], [])):
        fallback, jit, fast = make(kind)
        drafts, source = fallback.propose(rows, 5)
        assert (jit.asked, fast.asked, source) == (slow, quick, kind)
        assert [len(draft) for draft in drafts] == [int(kind != "none")] * 2
        assert fallback.propose([], 5) == ([], "none")
        assert (jit.asked, fast.asked) == (slow, quick)


def test_whoever_must_have_the_model_gets_it() -> None:
    fallback, jit, _ = make("none")
    assert fallback.propose([row(0, [1], depth=3)], 1, now=True)[1] == "jit"
    assert jit.asked == [1]


def chosen(batch: int, *, tokens: float, seconds: float) -> list[str]:
    """What `auto` takes once it has seen both, verifications lasting one second."""
    fallback, _, _ = make("auto", seconds)
    estimates = fallback.estimates
    for _ in range(50):
        estimates.hits.add(True)
        estimates.hits.add(False)
        estimates.verify_seconds.add(1.0)
        estimates.tokens["table"].add(4.0)
        estimates.tokens["jit"].add(tokens)
        estimates.tokens["ngram"].add(1.0)
        estimates.jit_seconds.add(seconds)
    return [fallback.propose([row(0, [1], depth=3)], batch)[1] for _ in range(32)]


def test_auto_takes_what_pays_and_tries_the_other_now_and_then() -> None:
    assert chosen(1, tokens=4.0, seconds=0.5) == ["jit"] * 31 + ["ngram"]
    assert chosen(8, tokens=1.1, seconds=0.5) == ["ngram"] * 31 + ["jit"]
    assert chosen(1, tokens=1.2, seconds=0.07)[0] == "jit"


def test_auto_takes_turns_while_it_knows_too_little() -> None:
    fallback, _, _ = make("auto")
    sources = [fallback.propose([row(0, [1], depth=3)], 1)[1] for _ in range(4)]
    assert sources == ["jit", "ngram", "jit", "ngram"]
