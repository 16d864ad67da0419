"""`outrider explain`: a formula, the numbers put in, the result, and where to read more.

The topics on drafting ahead of the verdict are here, and `published`: tables of Kumar, Dao, May,
"Speculative speculative decoding", computed again from what they state. The prediction of Table 2
does not follow from Table 1 by the formula beside it; docs/project/published-tables.md says more.
"""

from __future__ import annotations

import math
import sys
import textwrap
from dataclasses import dataclass, fields, replace

from rich.style import Style

from outrider.cli.call import Call
from outrider.cli.explain_machine import batch, energy, roofline
from outrider.cli.explain_rounds import (
    Explanation,
    Numbers,
    Step,
    Topic,
    acceptance,
    fixed,
    given,
    longest,
    one_round,
)
from outrider.cli.explain_rounds import speed_up as gain
from outrider.cli.output import json_line, screen_table, table
from outrider.cli.paint import QUIET, Painter
from outrider.cli.plan_options import ExplainOptions
from outrider.core.errors import ConfigError
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


ALPHA = 0.9
KS = (2, 4, 6, 8, 10, 12)
# Table 1: T_draft(K) / T_target.
DRAFT_TIMES = {
    "8B/1B": (0.36, 0.69, 1.02, 1.35, 1.67, 2.01),
    "70B/1B": (0.04, 0.08, 0.12, 0.15, 0.19, 0.23),
}
# Table 2, of 8B/1B.
PREDICTED = (2.12, 2.57, 2.73, 2.75, 2.69, 2.60)
ACHIEVED = (2.19, 2.64, 2.81, 2.87, 2.75, 2.70)
# Half of the last digit that is printed.
_ROUNDING = 0.005


@dataclass(frozen=True, slots=True)
class Published:
    """A row of Table 2 beside what its inputs give. `low` to `high` are the draft times that round
    to the prediction; `achieved_time` is the one that gives what was achieved."""

    k: int
    tokens: float
    draft_time: float
    by_formula: float
    predicted: float
    achieved: float
    implied: float
    low: float
    high: float
    achieved_time: float

    @property
    def follows(self) -> bool:
        """Whether some draft time that rounds to Table 1's rounds to the prediction as well."""
        return self.low <= self.draft_time + _ROUNDING and self.draft_time - _ROUNDING <= self.high


def rows() -> list[Published]:
    found: list[Published] = []
    pairs = zip(KS, DRAFT_TIMES["8B/1B"], PREDICTED, ACHIEVED, strict=True)
    for k, draft_time, predicted, achieved in pairs:
        tokens = expected_tokens(ALPHA, k)
        found.append(
            Published(
                k=k,
                tokens=tokens,
                draft_time=draft_time,
                by_formula=speed_up(tokens, draft_time),
                predicted=predicted,
                achieved=achieved,
                implied=draft_time_of(tokens, predicted),
                low=draft_time_of(tokens, predicted + _ROUNDING),
                high=draft_time_of(tokens, predicted - _ROUNDING),
                achieved_time=draft_time_of(tokens, achieved),
            )
        )
    return found


def draft_time_of(tokens: float, gain: float) -> float:
    """T with `gain` = `tokens` / (1 + T)."""
    return tokens / gain - 1


def published(_: Numbers) -> Explanation:
    found = rows()
    first = found[0]
    excess = [row.predicted / row.by_formula - 1 for row in found]
    return Explanation(
        title="A published prediction that does not follow from its inputs",
        idea="Table 1 of the paper on speculative speculative decoding has the time of drafting "
        "for a Llama 8B with a 1B drafter. Table 2 has a theoretical speed-up at alpha = 0.9, "
        "said to be E / (1 + T_SD). Putting Table 1 into that formula gives less.",
        formula=(
            "E = (1 - 0.9^(K+1)) / (1 - 0.9)",
            "S = E / (1 + T_SD)",
            "T_SD that the printed S implies = E / S - 1",
        ),
        steps=(
            Step("S at K = 2", f"{first.tokens:.4f} / (1 + {first.draft_time})", first.by_formula),
            Step("T_SD implied", f"{first.tokens:.4f} / {first.predicted} - 1", first.implied),
        ),
        header=("K", "T_SD", "S by formula", "printed", "achieved", "T_SD implied", "its rounding"),
        rows=tuple(
            (
                str(row.k),
                f"{row.draft_time:.2f}",
                f"{row.by_formula:.3f}",
                f"{row.predicted:.2f}",
                f"{row.achieved:.2f}",
                f"{row.implied:.3f}",
                f"{row.low:.3f}-{row.high:.3f}",
            )
            for row in found
        ),
        result=f"The printed column is {100 * min(excess):.1f} to {100 * max(excess):.1f} % above "
        f"the formula, and rounding explains {sum(row.follows for row in found)} of "
        f"{len(found)} rows. So no report of ours takes a prediction from anything but the times "
        "of its own run.",
        more=("docs/project/published-tables.md: all tables, and what else was tried",),
    )


_DEVICE = ("parameters", "bandwidth", "tflops")

TOPICS = (
    Topic("round", "One round by hand: accept, refuse, recover.", one_round),
    Topic("acceptance", "How much of a draft is kept.", acceptance, ("alpha", "k")),
    Topic(
        "speed-up", "What a round brings over plain decoding.", gain, ("alpha", "k", "c", "verify")
    ),
    Topic("best-k", "How long to draft, and when not to.", longest, ("alpha", "c", "verify")),
    Topic("roofline", "What a pass waits for: memory or arithmetic.", roofline, _DEVICE),
    Topic(
        "batch",
        "Speculation for many sequences at once, and with long contexts.",
        batch,
        ("alpha", "k", "c", "batch", "context", *_DEVICE),
    ),
    Topic("ssd", "Drafting ahead of the verdict.", ahead, ("alpha", "k", "c", "p_hit", "batch")),
    Topic("fan-out", "Which verdicts to draft for.", fan_out, ("alpha", "k", "branches")),
    Topic(
        "energy",
        "Joules a token: saved too, but not as much as time.",
        energy,
        ("alpha", "k", "c", "watts", *_DEVICE),
    ),
    Topic("published", "A published prediction that does not follow from its inputs.", published),
)


_WIDTH = 80
_BOLD, _FORMULA = Style.parse("bold"), Style.parse("cyan")


def explain(call: Call[ExplainOptions]) -> int:
    if call.argument is None:
        _numbers(None, call.options)
        return _list(as_json=call.options.json)
    topic = next(topic for topic in TOPICS if topic.name == call.argument)
    numbers = _numbers(topic, call.options)
    found = topic.explain(numbers)
    if call.options.json:
        used = {name: getattr(numbers, name) for name in topic.takes}
        print(json_line({"topic": topic.name, "given": used, **found.to_dict()}))
    else:
        _show(topic, numbers, found)
    return 0


def _list(*, as_json: bool) -> int:
    if as_json:
        print(json_line([{"topic": t.name, "text": t.text, "takes": t.takes} for t in TOPICS]))
        return 0
    rows = [(topic.name, topic.text, " ".join(map(_flag, topic.takes))) for topic in TOPICS]
    print(screen_table(rows, header=("topic", "explains", "takes")))
    print("\nOne of them: outrider explain speed-up --alpha 0.8 --k 4 --c 0.1")
    return 0


def _numbers(topic: Topic | None, options: ExplainOptions) -> Numbers:
    """Those given, and the rest as they are. Raises ConfigError for one that has no place."""
    asked = {item.name: getattr(options, item.name) for item in fields(Numbers)}
    asked = {name: value for name, value in asked.items() if value is not None}
    if topic is None:
        if asked:
            raise ConfigError(f"{_flag(next(iter(asked)))}, but no topic.", hint="outrider explain")
        return Numbers()
    strange = [name for name in asked if name not in topic.takes]
    if strange:
        takes = " ".join(map(_flag, topic.takes)) or "no numbers"
        raise ConfigError(
            f"{topic.name} has no {_flag(strange[0])} in its formula.",
            hint=f"outrider explain {topic.name} takes {takes}",
        )
    return replace(Numbers(), **asked)


def _show(topic: Topic, numbers: Numbers, found: Explanation) -> None:
    painter = Painter("auto", sys.stdout)
    painter.write(f"{found.title}\n\n", _BOLD)
    _paragraph(painter, found.idea)
    for line in found.formula:
        painter.write(f"  {line}\n", _FORMULA)
    _block(painter, table(given(numbers, topic.takes)))
    for step in found.steps:
        value = f"{step.value:.3f} {step.unit}".rstrip()
        painter.write(f"\n  {step.name} = {step.worked} = ", Style.null())
        painter.write(value, _BOLD)
    painter.write("\n", Style.null())
    _block(painter, table(found.rows, header=found.header) if found.rows else "")
    painter.write("\n", Style.null())
    _paragraph(painter, found.result)
    painter.line("\n".join(["Read more:", *(f"  {place}" for place in found.more)]))


def _paragraph(painter: Painter, text: str) -> None:
    wrapped = textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    painter.write(f"{wrapped}\n\n", Style.null())


def _block(painter: Painter, text: str) -> None:
    if text:
        painter.write("\n" + textwrap.indent(text, "  ") + "\n", QUIET)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
