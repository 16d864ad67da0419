"""Topics about drafting ahead of the verdict: what it brings, and which verdicts to draft for."""

from __future__ import annotations

import math
from dataclasses import replace

from outrider.cli.explain_page import Explanation, Numbers, Step, fixed
from outrider.estimate.theory import (
    AheadTimes,
    Misses,
    chances,
    expected_hit_rate,
    expected_tokens,
    geometric,
    optimal,
    speed_up,
    uniform,
)
from outrider.planner.overlap import crossover_batch, hide_limit

_SHARES = (0.0, 0.5, 0.7, 0.9, 1.0)
_POWER = Misses().recovered.power
_SCALE = Misses().recovered.scale


def ahead(numbers: Numbers) -> Explanation:
    expected = expected_tokens(numbers.alpha, numbers.k)
    draft = numbers.k * numbers.c
    in_turns = speed_up(expected, draft)
    drafting = AheadTimes(
        p_hit=numbers.p_hit,
        tokens_hit=expected,
        tokens_miss=expected,
        ahead=draft,
        fallback=draft,
        batch=numbers.batch,
    )
    # Nothing drafted after a miss costs no time and gives the target's own token alone.
    plain = replace(drafting, tokens_miss=1.0, fallback=0.0)
    rows = [_row(replace(drafting, p_hit=p), replace(plain, p_hit=p), in_turns) for p in _SHARES]
    others = f"{numbers.p_hit:g}^{numbers.batch}"
    better = "drafting" if drafting.speed >= plain.speed else "plain decoding"
    hidden = f"{draft:.2f} of a verification" + (
        ", and all of it fits beside one" if draft <= 1 else ", which is more than fits beside it"
    )
    most = hide_limit(1.0, numbers.c)
    hidden += "." if most is None else f"; up to K = {most} does."
    return Explanation(
        title="Drafting ahead of the verdict (SSD)",
        idea="While the target verifies a round, a drafter with resources of its own drafts after "
        "the verdicts that it foresees. After a hit the next draft is ready; after a miss it is "
        "drafted then (or the round goes without). In a batch that verifies together, a round "
        "waits for its slowest row.",
        formula=(
            "S = (p E_hit + (1-p) E_miss) / (h max(1, T_p) + (1-h) (1 + T_b)),   h = p^b",
            "S of drafting in turns = E / (1 + T_SD),   T_SD = K c",
            "here E_hit = E_miss = E, T_p = T_b = T_SD, and verification takes a plain pass",
        ),
        steps=(
            Step("T_SD", f"{numbers.k} x {numbers.c:g}", draft, "verifications"),
            Step(
                "S in turns",
                f"{expected:.3f} / (1 + {draft:.3f})",
                in_turns,
                "times plain decoding",
            ),
            Step("h", others, numbers.p_hit**numbers.batch, "of the rounds wait for nothing"),
            Step("S", _bracket(drafting), drafting.speed, "times plain decoding"),
        ),
        header=("p", "S, drafting after a miss", "S, plain after a miss", "over in turns"),
        rows=tuple(rows),
        result=f"{drafting.speed / in_turns:.2f} times drafting in turns. Drafting takes {hidden} "
        f"It can gain {1 + draft:.2f} times at most, the time that it hides. After a miss, "
        f"{better} is better here{_turn(numbers, drafting, plain)}. On one device both lanes share "
        "its bandwidth, and the gain is at most 1 / (share of the bandwidth that drafting in turns "
        "reaches).",
        more=(
            "docs/theory.md, sections 8 and 9",
            "docs/algorithms/drafting-ahead.md",
            "outrider bench engines --engines single,ssd: p, T_p and T_b of this machine",
        ),
    )


def fan_out(numbers: Numbers) -> Explanation:
    likely = chances(numbers.alpha, numbers.k)
    exact = geometric(numbers.branches, likely, _POWER)
    whole = optimal(numbers.branches, likely, Misses())
    even = uniform(numbers.branches, len(likely))
    found, same = (expected_hit_rate(counts, likely, Misses()) for counts in (whole, even))
    rows = [
        (str(n), *fixed(likely[n], digits=4), *fixed(exact[n]), str(whole[n]), str(even[n]))
        for n in range(len(likely))
    ]
    return Explanation(
        title="Which verdicts to draft for",
        idea="A verdict is the number n of tokens kept and the target's own token after them. Of "
        "each n the F likeliest tokens are drafted for, B verdicts in all. The first ones of every "
        "n bring most, so likely ends get more, but not all.",
        formula=(
            f"missed(F) = min(1, c F^-r),   here c = {_SCALE:g} and r = {_POWER:g}",
            "largest sum of P(n) (1 - missed(F_n)) with sum of F_n = B",
            "F_n proportional to P(n)^(1 / (1 + r)); in whole numbers, one by one to the largest "
            "gain",
        ),
        steps=(
            Step("p", "sum of P(n) (1 - missed(F_n))", found, "of the verdicts foreseen"),
            Step("p, all alike", "the same with equal F", same, "of the verdicts foreseen"),
        ),
        header=("n", "P(n)", "F, any number", "F, whole", "F, all alike"),
        rows=tuple(rows),
        result=f"{100 * (found - same):.1f} points more than with equal shares. The engine counts "
        "c and r as it goes.",
        more=(
            "docs/theory.md, section 8",
            "docs/algorithms/drafting-ahead.md",
            "outrider generate PROMPT --schedule ssd --fan-policy geometric",
        ),
    )


def _turn(numbers: Numbers, drafting: AheadTimes, plain: AheadTimes) -> str:
    """From which batch on plain decoding after a miss is better, where all work ahead is hidden."""
    if drafting.ahead > 1 or numbers.p_hit in (0, 1):
        return ""
    turn = crossover_batch(numbers.p_hit, drafting.tokens, plain.tokens, drafting.fallback)
    if math.isinf(turn):
        return " (as in any batch)"
    return f" (plain decoding from a batch of {max(1, math.ceil(turn))} on)"


def _row(drafting: AheadTimes, plain: AheadTimes, in_turns: float) -> tuple[str, ...]:
    ratio = drafting.speed / in_turns
    return (f"{drafting.p_hit:g}", *fixed(drafting.speed, plain.speed, ratio))


def _bracket(times: AheadTimes) -> str:
    whole = times.p_hit**times.batch
    return (
        f"{times.tokens:.3f} / ({whole:.3f} x {max(1.0, times.ahead):.3f} + "
        f"{1 - whole:.3f} x {1 + times.fallback:.3f})"
    )
