"""Checks of drafters' reports: a draft is drawn as its distribution says.

A drafter's reported distribution is the only part of it that could change a text and that no rule
can check. So a drafter is run once for every outcome of its draws, over models of a few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.core.draft import Budget, Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.rng import Role
from outrider.plugins.proof.distributions import EveryBranch, Tokens, runs

MakeDrafter = Callable[[], Drafter]
# Temperature and filters, for drafters that shape their distribution.
SAMPLED = SamplingParams(temperature=1.3, top_k=4, seed=2)
DEPTH = 2
# Distributions are float32.
_ROUNDING = 1e-5
_OWN_ROLES = frozenset({Role.DRAFT, Role.RACE})
# In the last text, different tokens have followed its last token.
TEXTS: tuple[Tokens, ...] = ((1, 2, 1), (0,), (0, 1, 0, 2, 0, 1, 0))


@dataclass(frozen=True, slots=True)
class Drawing:
    """Drafted tokens, the probability of their draws, and the probability that the drafter reports;
    None if it reports nothing."""

    tokens: Tokens
    weight: float
    reported: float | None


def drawings(make: MakeDrafter, text: Tokens) -> list[Drawing]:
    """Return every draft of two tokens after `text`. Raises AssertionError for a draw with a number
    that is not a drafter's."""
    weights: dict[Tokens, float] = {}
    reports: dict[Tokens, float | None] = {}

    def drafted(rng: EveryBranch) -> Tokens:
        drafter = make()
        drafter.open(0, text)
        draft = drafter.propose([DraftRow(0, list(text), None, Budget(DEPTH), SAMPLED, rng)])[0]
        drafter.close(0)
        foreign = rng.roles - _OWN_ROLES
        if foreign:
            raise AssertionError(
                f"after {text} it draws with numbers of Role.{min(foreign).name}, which decide "
                "for the target; a drafter's are those of row.rng.pick(probs_V, node, Role.DRAFT)"
            )
        reports[draft.tokens] = _reported(draft)
        return draft.tokens

    for tokens, weight in runs(drafted):
        weights[tokens] = weights.get(tokens, 0.0) + weight
    return [Drawing(tokens, weight, reports[tokens]) for tokens, weight in weights.items()]


def _reported(draft: Draft) -> float | None:
    if draft.probs_NV is None:
        return None
    return math.prod(float(p_V[t]) for p_V, t in zip(draft.probs_NV, draft.tokens, strict=True))


def misreports(text: Tokens, found: Sequence[Drawing], *, secret: bool) -> Iterator[str]:
    """Yield a sentence for each draft that is not drawn as reported. With `secret`, draws that are
    not reported at all count too: they bias nothing, but give a rule less than is known."""
    for one in found:
        if one.reported is None and not secret:
            continue
        reported = 1.0 if one.reported is None else one.reported
        if abs(one.weight - reported) >= _ROUNDING:
            drawn = f"after {text} it drafts {one.tokens} with {one.weight:.4f}"
            yield f"{drawn}, and reports {reported:.4f}"
