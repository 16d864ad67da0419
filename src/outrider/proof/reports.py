"""Whether a drafter draws by the distributions that it reports: the one thing that it can say which
changes a text, and that no rule can see.

A drafter is run once for every way its draws can fall. Those of the program are enumerated by its
own tests; in a certificate stands that of another package, over scripted models of four tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.core.budget import Budget
from outrider.core.config import EngineConfig
from outrider.core.draft import Draft
from outrider.core.drafter_kinds import AUTO, KINDS, drafter_named
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.rng import Role
from outrider.drafters.catalog import BuildContext, LoadedModels
from outrider.kernels.reference.pointwise import argmax
from outrider.lab.scripted import ScriptedLM
from outrider.proof.algebra import DEFECTS
from outrider.proof.check import Check
from outrider.proof.distributions import EveryBranch, Tokens, runs
from outrider.proof.ensemble import DRAFT, TARGET

MakeDrafter = Callable[[], Drafter]
# Temperature and filters, so that a drafter which shapes its distribution does.
SAMPLED = SamplingParams(temperature=1.3, top_k=4, seed=2)
_DEPTH = 2
# Distributions are float32.
_ROUNDING = 1e-5
_OWN_ROLES = frozenset({Role.DRAFT, Role.RACE})
# In the last one more than one token follows the token at the end.
TEXTS: tuple[Tokens, ...] = ((1, 2, 1), (0,), (0, 1, 0, 2, 0, 1, 0))
_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Drawing:
    """Drafted tokens, how likely their draws made them, and how likely the report says that they
    are; None if nothing was reported."""

    tokens: Tokens
    weight: float
    reported: float | None


def drawings(make: MakeDrafter, text: Tokens) -> list[Drawing]:
    """Every draft of two tokens after `text`. Raises AssertionError for a draw with a number that
    is not a drafter's."""
    weights: dict[Tokens, float] = {}
    reports: dict[Tokens, float | None] = {}

    def drafted(rng: EveryBranch) -> Tokens:
        drafter = make()
        drafter.open(0, text)
        draft = drafter.propose([DraftRow(0, list(text), None, Budget(_DEPTH), SAMPLED, rng)])[0]
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
    """What is not drawn as it is reported, a sentence each. With `secret` draws that are not
    reported at all count: they bias nothing, but tell a rule less than is known."""
    for one in found:
        if one.reported is None and not secret:
            continue
        reported = 1.0 if one.reported is None else one.reported
        if abs(one.weight - reported) >= _ROUNDING:
            told = f"after {text} it drafts {one.tokens} with {one.weight:.4f}, and reports"
            yield f"{told} {reported:.4f}"


def own_reports(config: EngineConfig) -> tuple[Check, ...]:
    """Of the drafter that `config` names, if another package brings it."""
    name = config.drafter
    if name == AUTO or name in KINDS:
        return ()
    return (report_check(name, lambda: _over_scripts(name)),)


def report_check(name: str, make: MakeDrafter) -> Check:
    """Where no draft reports anything, all pass, however they were drawn: no rule is misled. Where
    some do, one that reports nothing may be a drawn token that was dropped for what it is."""
    found: list[Drawing] = []
    problems: list[str] = []
    try:
        for text in TEXTS:
            drawn = drawings(make, text)
            draws = any(one.reported is not None for one in drawn)
            problems += misreports(text, drawn, secret=draws)
            found += drawn
    except AssertionError as error:
        problems.append(str(error))
    except (OutriderError, *DEFECTS) as error:
        fails = f"{name} fails over {TARGET.vocab_size} tokens: {type(error).__name__}: {error}"
        return _check(name, None, fails, found)
    told = "some not drawn as reported" if problems else "each drawn as it is reported"
    summary = f"{name}: {len(found)} drafts by enumeration, {told}"
    return _check(name, not problems, summary, found, tuple(problems[:_MAX_SHOWN]))


def _over_scripts(name: str) -> Drafter:
    models = LoadedModels(ScriptedLM(TARGET), ScriptedLM(DRAFT), argmax)
    resolved = models.resolve(EngineConfig(drafter=name, k=_DEPTH))
    return BuildContext(resolved, models, drafter_named(name)).build()


def _check(
    name: str,
    holds: bool | None,
    summary: str,
    found: Sequence[Drawing],
    problems: tuple[str, ...] = (),
) -> Check:
    return Check(
        name="reports",
        title="drafter's report",
        holds=holds,
        summary=summary,
        facts={"drafter": name, "num_drafts": len(found), "texts": [list(t) for t in TEXTS]},
        problems=problems,
    )
