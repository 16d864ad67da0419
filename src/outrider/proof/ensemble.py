"""Part two: texts of every exact sampler against the target's law, by chi-square.

Enumeration cannot see how numbers are made and keyed, so here they are drawn. Each of six pairs of
laws is drawn from in two ways under each sampler: walked, by the functions and keys that the engine
uses, and by the hundred thousand on tensors (`many.py`); the walked texts must be the first of the
many, token for token. The races of the coupled sampler are tried alone, against the joint law of
both winners, and last the whole engine writes texts with scripted models.

Shapes:  S = seeds, P = pairs, B = draws, V = vocabulary, K = drafted tokens, W = K + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proof.check import Check, Effort, Part
from outrider.proof.chisquare import FAMILY_LEVEL, threshold
from outrider.proof.draws import PairTrials, Trial, count_trial, pair_trials, race_trial
from outrider.proof.engine_texts import engine_texts, text_law
from outrider.proof.pairs import PAIRS
from outrider.proof.samplers import exact_samplers


@dataclass(frozen=True, slots=True)
class Family:
    """All trials of one certificate, judged together."""

    trials: tuple[Trial, ...]

    @property
    def threshold(self) -> float:
        return threshold(len(self.trials))

    @property
    def smallest(self) -> Trial:
        return min(self.trials, key=lambda trial: trial.p_value)

    @property
    def failed(self) -> list[Trial]:
        return [t for t in self.trials if t.defect is not None or t.p_value < self.threshold]


def ensemble(effort: Effort, *, seed: int, own: str) -> Part:
    """`own` is the sampler that the user chose; it is walked more often than the others."""
    drawn: list[PairTrials] = []
    trials: list[Trial] = []
    for sampler in exact_samplers():
        num_walked = effort.num_walked_own if sampler.name == own else effort.num_walked
        for pair in PAIRS:
            yield f"{sampler.name}: {pair.name}"
            counts = {"num_walked": num_walked, "num_texts": effort.num_texts}
            drawn.append(pair_trials(sampler, pair, seed=seed, **counts))
        yield f"{sampler.name}: the engine's texts"
        texts = engine_texts(sampler.name, seed=seed, num_texts=effort.num_engine)
        trials.append(count_trial(f"{sampler.name}, whole engine", texts, text_law()))
    for pair in PAIRS:
        yield f"shared races: {pair.name}"
        trials.append(race_trial(pair, seed=seed, num_races=effort.num_races))
    family = Family((*(trial for pair in drawn for trial in pair.trials), *trials))
    return (_check(family, drawn, effort),)


def _check(family: Family, drawn: list[PairTrials], effort: Effort) -> Check:
    num_draws = sum(trial.num_draws for trial in family.trials)
    num_walked = sum(pair.num_walked for pair in drawn)
    num_same = sum(pair.num_same for pair in drawn)
    problems = [
        f"{trial.name}: {trial.defect or f'p = {trial.p_value:.1e}'}" for trial in family.failed
    ]
    if num_same < num_walked:
        problems.append(f"{num_walked - num_same} walked texts differ from those on tensors")
    return Check(
        name="ensemble",
        title="chi-square ensemble",
        holds=not problems,
        summary=f"{len(family.trials)} tests, {num_draws:,} draws; smallest p "
        f"{family.smallest.p_value:.2g}, alarm below {family.threshold:.0e}",
        facts={
            "num_tests": len(family.trials),
            "num_draws": num_draws,
            "texts_per_pair": effort.num_texts,
            "num_walked": num_walked,
            "num_walked_alike": num_same,
            "smallest_p_value": family.smallest.p_value,
            "smallest_p_value_of": family.smallest.name,
            "threshold": family.threshold,
            "family_level": FAMILY_LEVEL,
        },
        problems=tuple(problems),
    )
