"""Part four: the certificate can fail. Bugs that others have shipped, one line each, are planted in
the functions that just passed, and the checks of the parts before must catch every one.

What a round decides goes to the algebra, how its numbers are keyed to the chi-square test of walked
texts, and what the engine does around it to parity, on the embedded pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.proof.algebra import DEFECTS, prove_rule
from outrider.proof.case_table import FIXED
from outrider.proof.check import Check, Part
from outrider.proof.chisquare import threshold
from outrider.proof.draws import walked_trial
from outrider.proof.mutant_table import DECISIONS, KEYS, ROUNDS
from outrider.proof.pairs import PAIRS
from outrider.proof.planting import CannotPlantError, Mutant, planted
from outrider.proof.prompts import PROMPTS
from outrider.proof.samplers import exact_samplers

# The part that failed and what it found; (None, "") if none did.
Caught: TypeAlias = tuple[str | None, str]

_NUM_WALKED = 1_000
_NUM_PROMPTS = 3
_NUM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Attempt:
    """One planted bug: which part caught it and how, `caught_by` None if none did. `obstacle` is
    why it could not be planted."""

    mutant: Mutant
    caught_by: str | None
    finding: str
    obstacle: str | None = None


def mutants(*, seed: int) -> Part:
    """Plant every bug in turn. The process does nothing else meanwhile."""
    attempts: list[Attempt] = []
    for mutant in DECISIONS:
        yield mutant.name
        attempts.append(attempt(mutant, catch_by_algebra))
    for mutant in KEYS:
        yield mutant.name
        attempts.append(attempt(mutant, lambda: catch_by_chi_square(seed)))
    yield "the embedded pair's own text"
    wanted = embedded_texts("none")
    for mutant in ROUNDS:
        yield mutant.name
        attempts.append(attempt(mutant, lambda: catch_by_parity(wanted)))
    return (_check(attempts),)


def attempt(mutant: Mutant, catch: Callable[[], Caught]) -> Attempt:
    """What `catch` (part and finding) says with the bug in."""
    try:
        with planted(mutant):
            return Attempt(mutant, *catch())
    except CannotPlantError as error:
        return Attempt(mutant, None, "", obstacle=str(error))


def catch_by_algebra() -> Caught:
    samplers = exact_samplers()
    for case in FIXED:
        for sampler in samplers:
            proof = prove_rule(sampler, [case])
            if not proof.holds:
                return "algebra", f"{sampler.name}, {proof.finding}"
    return None, ""


def catch_by_chi_square(seed: int) -> Caught:
    for pair in PAIRS:
        for sampler in exact_samplers():
            trial = walked_trial(sampler, pair, seed=seed, num_texts=_NUM_WALKED)
            if trial.defect or trial.p_value < threshold(100):
                return "chi-square", f"{trial.name}: {trial.defect or f'p = {trial.p_value:.0e}'}"
    return None, ""


def catch_by_parity(wanted: list[tuple[int, ...]]) -> Caught:
    """On the embedded pair, on a CPU, whose kernels are row-invariant."""
    try:
        texts = embedded_texts("model")
    except (OutriderError, *DEFECTS) as error:
        return "parity", f"{type(error).__name__} {error}".strip()
    if texts == wanted:
        return None, ""
    num_different = sum(a != b for a, b in zip(texts, wanted, strict=True))
    return "parity", f"{num_different} of {len(wanted)} texts differ"


def embedded_texts(drafter: str) -> list[tuple[int, ...]]:
    # Bugs are planted in Python, so rounds must go through it.
    config = EngineConfig(drafter=drafter, batch_size=_NUM_PROMPTS, device="cpu", fused_round=False)
    llm = LLM(config=config)
    params = SamplingParams(max_tokens=_NUM_TOKENS)
    return [result.token_ids for result in llm.generate(PROMPTS[:_NUM_PROMPTS], params)]


def _check(attempts: list[Attempt]) -> Check:
    planted_ones = [a for a in attempts if a.obstacle is None]
    missed = [a for a in planted_ones if a.caught_by is None]
    unplanted = [a for a in attempts if a.obstacle is not None]
    holds: bool | None = not missed
    if holds and unplanted:
        holds = None
    parts = [a.caught_by for a in planted_ones if a.caught_by]
    shares = ", ".join(f"{parts.count(part)} by {part}" for part in dict.fromkeys(parts))
    summary = f"{len(parts)} of {len(attempts)} caught" + (f": {shares}" if shares else "")
    return Check(
        name="mutants",
        title="planted bugs",
        holds=holds,
        summary=summary,
        facts={
            "num_planted": len(planted_ones),
            "num_caught": len(parts),
            "mutants": [
                {
                    "name": a.mutant.name,
                    "module": a.mutant.module,
                    "caught_by": a.caught_by,
                    "finding": a.finding,
                    "obstacle": a.obstacle,
                }
                for a in attempts
            ],
        },
        problems=tuple(f"{a.mutant.name} ({a.mutant.module}): not caught" for a in missed),
        warnings=tuple(f"{a.mutant.name}: not checked, {a.obstacle}" for a in unplanted[:3]),
    )
