"""What a topic of `outrider explain` takes and gives, and the topics about one round.

How much of a draft is kept, what that brings, how long to draft; and `round`, one round by hand on
a vocabulary of five words. The formulas are those of docs/theory.md, section 2, in plain Python;
tests hold them against the rule that the engine runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from outrider.estimate.theory import acceptance_rate, chances, expected_tokens, measured_speed_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What formulas are worked with. The defaults are those of docs/theory.md."""

    alpha: float = 0.8
    k: int = 4
    c: float = 0.1
    verify: float = 1.0
    batch: int = 1
    context: int = 0
    p_hit: float = 0.9
    branches: int = 24
    parameters: float = 7.0
    bandwidth: float = 900.0
    tflops: float = 300.0
    watts: float = 100.0


@dataclass(frozen=True, slots=True)
class Symbol:
    """How a number is written in formulas, and what it is."""

    sign: str
    meaning: str


SYMBOLS = {
    "alpha": Symbol("alpha", "chance that a drafted token is accepted after those before it"),
    "k": Symbol("K", "drafted tokens of a round"),
    "c": Symbol("c", "a pass of the drafter, in plain passes of the target"),
    "verify": Symbol("v", "the pass that verifies, in plain passes of the target"),
    "batch": Symbol("b", "sequences of a round"),
    "context": Symbol("n", "tokens that each sequence has already"),
    "p_hit": Symbol("p", "share of the verdicts that are foreseen"),
    "branches": Symbol("B", "verdicts that are drafted for, of one sequence and round"),
    "parameters": Symbol("N", "parameters of the target, in billions, of two bytes"),
    "bandwidth": Symbol("BW", "memory bandwidth, in GB/s"),
    "tflops": Symbol("F", "arithmetic, in TFLOP/s"),
    "watts": Symbol("P", "power that does not depend on the work, in watts"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """`name` = `worked` = `value` `unit`."""

    name: str
    worked: str
    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A title, the idea, the formula, the numbers put in, a table, what follows, where to read."""

    title: str
    idea: str
    formula: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    result: str = ""
    more: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Explain: TypeAlias = Callable[[Numbers], Explanation]


@dataclass(frozen=True, slots=True)
class Topic:
    """`takes` are the names of the numbers that it uses."""

    name: str
    text: str
    explain: Explain
    takes: tuple[str, ...] = ()


def fixed(*values: float, digits: int = 3) -> tuple[str, ...]:
    """Numbers of a row of a table."""
    return tuple(f"{value:.{digits}f}" for value in values)


def given(numbers: Numbers, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Rows of sign, value, flag and meaning."""
    return tuple(
        (
            SYMBOLS[name].sign,
            f"{getattr(numbers, name):g}",
            f"--{name.replace('_', '-')}",
            SYMBOLS[name].meaning,
        )
        for name in names
    )


_MOST_K = 64
_EXPECTED = "E = 1 + alpha + ... + alpha^K = (1 - alpha^(K+1)) / (1 - alpha)"


def acceptance(numbers: Numbers) -> Explanation:
    alpha, k = numbers.alpha, numbers.k
    likely = chances(alpha, k)
    expected = expected_tokens(alpha, k)
    rate = acceptance_rate(alpha, k)
    return Explanation(
        title="How much of a draft is kept",
        idea="A round keeps the draft up to the first token that the target refuses, and adds one "
        "token of the target's own: the recovered one after a refusal, the bonus one after none. "
        "So a round of K drafted tokens emits 1 to K + 1.",
        formula=(
            "P(n) = alpha^n (1 - alpha) for n < K,   P(K) = alpha^K",
            _EXPECTED,
            "accepted / drafted = (E - 1) / K",
        ),
        steps=(
            Step("E", _sum_of(alpha, k), expected, "tokens a round"),
            Step("accepted / drafted", f"({expected:.3f} - 1) / {k}", rate),
        ),
        header=("accepted n", "emitted", "P(n)"),
        rows=tuple((str(n), str(n + 1), f"{chance:.4f}") for n, chance in enumerate(likely)),
        result="Accepted / drafted, which a run counts, is lower than alpha: tokens behind a "
        "refusal are drafted and never looked at. Where alpha differs from request to request, E "
        "is higher than the mean alpha says.",
        more=(
            "docs/theory.md, sections 4 and 6",
            "outrider explain round",
            "outrider draft check TARGET DRAFT --measure: alpha of a pair",
        ),
    )


def speed_up(numbers: Numbers) -> Explanation:
    alpha, k, c, verify = numbers.alpha, numbers.k, numbers.c, numbers.verify
    expected = expected_tokens(alpha, k)
    gain = _gain(numbers, k)
    return Explanation(
        title="Speed-up of a round",
        idea="A round of K drafted tokens takes K passes of the drafter, one after the other, and "
        "one pass of the target over K + 1 tokens. Plain decoding takes a pass of the target for "
        "every token.",
        formula=(
            _EXPECTED,
            "S = E / (K c + v)",
            "from measured times: S = E T_plain / (T_draft(K) + T_verify(K+1))",
        ),
        steps=(
            Step("E", _sum_of(alpha, k), expected, "tokens a round"),
            Step("T", f"{k} x {c:g} + {verify:g}", k * c + verify, "plain passes a round"),
            Step("S", f"{expected:.3f} / {k * c + verify:.3f}", gain, "times plain decoding"),
        ),
        result=_verdict(gain),
        more=(
            "docs/theory.md, section 4",
            "outrider explain best-k; outrider explain batch",
            "outrider generate PROMPT --compare: the same, measured",
        ),
    )


def longest(numbers: Numbers) -> Explanation:
    alpha = numbers.alpha
    best = max(range(_MOST_K + 1), key=lambda k: _gain(numbers, k))
    rows: list[tuple[str, ...]] = []
    stride = 1 + best // 12
    for k in sorted({best, *range(0, min(best + 3 * stride, _MOST_K) + 1, stride)}):
        rate = expected_tokens(alpha, k) / _round(numbers, k)
        price = _round(numbers, k + 1) - _round(numbers, k)
        gain = f"{alpha ** (k + 1) / price:.3f}" if price > 0 else "free"
        rows.append((str(k), *fixed(expected_tokens(alpha, k), _round(numbers, k), rate), gain))
    return Explanation(
        title="How long to draft",
        idea="One more drafted token is reached with probability alpha^(K+1) and costs its time in "
        "any case. It pays as long as it brings tokens faster than the round does without it.",
        formula=(
            _EXPECTED,
            "S(K) = E(K) / T(K),   T(K) = K c + v,   T(0) = 1",
            "draft one more while alpha^(K+1) / (T(K+1) - T(K)) > E(K) / T(K)",
        ),
        steps=(Step("S", f"E({best}) / T({best})", _gain(numbers, best), "times plain decoding"),),
        header=("K", "E(K)", "T(K)", "S(K)", "one more brings"),
        rows=tuple(rows),
        result=f"The best K is {best}. "
        + ("So do not speculate." if not best else _verdict(_gain(numbers, best))),
        more=(
            "docs/theory.md, sections 4 and 5",
            "docs/algorithms/controllers.md: the engine chooses K by this rule in every round",
        ),
    )


def _round(numbers: Numbers, k: int) -> float:
    """The time of a round in plain passes; without a draft nothing is verified."""
    return k * numbers.c + numbers.verify if k else 1.0


def _gain(numbers: Numbers, k: int) -> float:
    times = {"draft": k * numbers.c, "verify": numbers.verify if k else 1.0}
    return measured_speed_up(expected_tokens(numbers.alpha, k), plain=1.0, **times)


def _sum_of(alpha: float, k: int) -> str:
    if alpha == 1:
        return f"{k} + 1"
    return f"(1 - {alpha:g}^{k + 1}) / (1 - {alpha:g})"


def _verdict(gain: float) -> str:
    if gain > 1:
        return f"{gain:.2f} times as fast as plain decoding."
    return f"{gain:.2f} times the speed of plain decoding: speculation loses here."


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
