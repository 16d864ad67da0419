"""The topic `published`: tables of papers, computed again from what they state.

The tables are those of Kumar, Dao, May, "Speculative speculative decoding": the time of drafting
relative to a verification (Table 1), and the speed-up over plain decoding at alpha = 0.9 (Table 2)
as it was predicted and as it was achieved. The prediction does not follow from Table 1 by the
formula beside it. docs/project/published-tables.md has the whole story.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.explain_page import Explanation, Numbers, Step
from outrider.estimate.theory import expected_tokens, speed_up

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
