"""The topic `round`: one round by hand, on a vocabulary of five words, without a model.

The formulas are those of docs/theory.md, section 2, in plain Python; tests hold them against the
rule that the engine runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cli.explain_page import Explanation, Numbers, Step

WORDS = ("the", "cat", "sat", "on", "mat")
DRAFT = ("cat", "sat", "mat", "on")
# The drafter's laws of the drafted words, then the target's, which has one more.
Q = (
    (0.05, 0.40, 0.10, 0.05, 0.40),
    (0.10, 0.05, 0.60, 0.15, 0.10),
    (0.07, 0.08, 0.15, 0.20, 0.50),
    (0.30, 0.10, 0.20, 0.35, 0.05),
)
P = (
    (0.02, 0.45, 0.08, 0.05, 0.40),
    (0.07, 0.05, 0.48, 0.25, 0.15),
    (0.11, 0.10, 0.09, 0.45, 0.25),
    (0.25, 0.10, 0.15, 0.45, 0.05),
    (0.40, 0.05, 0.05, 0.05, 0.45),
)
# One uniform number a word that is looked at, and one for the word after the last accepted.
COINS = (0.91, 0.35, 0.72)
LAST = 0.60


@dataclass(frozen=True, slots=True)
class Walk:
    """What the rule does: the words accepted, whether one was refused, the law that the round's
    last word is drawn from, and that word."""

    accepted: tuple[str, ...]
    refused: bool
    law: tuple[float, ...]
    last: str

    @property
    def emitted(self) -> tuple[str, ...]:
        return (*self.accepted, self.last)


def ratio(p: float, q: float) -> float:
    """The chance that a drawn word is accepted."""
    return min(1.0, p / q)


def residual(p: Sequence[float], q: Sequence[float]) -> tuple[float, ...]:
    """What the target has above the drafter, as a law."""
    above = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return tuple(one / sum(above) for one in above)


def walk(coins: Sequence[float], last: float) -> Walk:
    """The round, with these uniform numbers."""
    for place, word in enumerate(DRAFT):
        index = WORDS.index(word)
        if coins[place] >= ratio(P[place][index], Q[place][index]):
            law = residual(P[place], Q[place])
            return Walk(DRAFT[:place], True, law, _drawn(law, last))
    return Walk(DRAFT, False, P[-1], _drawn(P[-1], last))


def one_round(_: Numbers) -> Explanation:
    done = walk(COINS, LAST)
    place = len(done.accepted)
    p, q = P[place], Q[place]
    mass = sum(max(0.0, a - b) for a, b in zip(p, q, strict=True))
    chosen = f"max(0, {p[WORDS.index(done.last)]:g} - {q[WORDS.index(done.last)]:g}) / {mass:.2f}"
    return Explanation(
        title="One round by hand",
        idea=f"The text so far is `the`, and the drafter has drawn `{' '.join(DRAFT)}`. One pass "
        "of the target gives its laws at all places. Each drafted word x is accepted with "
        "probability min(1, p(x) / q(x)); at the first refusal the round takes a word from what p "
        "has above q, and the rest of the draft is dropped.",
        formula=(
            "accept x if u < p(x) / q(x)",
            "residual(x) = max(0, p(x) - q(x)) / Z,   Z = sum of max(0, p - q)",
            "so P(x) = min(q, p) + max(0, p - q) = p(x), whatever q is",
        ),
        steps=(
            Step("Z", " + ".join(f"{a - b:.2f}" for a, b in zip(p, q, strict=True) if a > b), mass),
            Step(f"residual({done.last})", chosen, done.law[WORDS.index(done.last)]),
        ),
        header=("place", "word", "p", "q", "p / q", "u", "decision"),
        rows=tuple(_row(number, done) for number in range(len(DRAFT))),
        result=f"Emitted: `{' '.join(done.emitted)}`, {place} accepted and "
        f"{'the recovered' if done.refused else 'the bonus'} word: {place + 1} tokens for one pass "
        "of the target.",
        more=("docs/theory.md, sections 2 and 3: the proof", "docs/algorithms/exact-rule.md"),
    )


def _row(place: int, done: Walk) -> tuple[str, ...]:
    index, num_accepted = WORDS.index(DRAFT[place]), len(done.accepted)
    p, q = P[place][index], Q[place][index]
    decision = "accepted" if place < num_accepted else "refused"
    seen = place <= num_accepted
    return (
        str(place + 1),
        DRAFT[place],
        f"{p:.2f}",
        f"{q:.2f}",
        f"{p / q:.3f}",
        f"{COINS[place]:.2f}" if seen else "",
        decision if seen else "never looked at",
    )


def _drawn(law: Sequence[float], number: float) -> str:
    """The first word whose share of the law, with all before it, lies above `number`."""
    total = 0.0
    for word, share in zip(WORDS, law, strict=True):
        total += share
        if number < total:
            return word
    return max(zip(law, WORDS, strict=True))[1]
