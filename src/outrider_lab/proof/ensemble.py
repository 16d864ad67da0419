"""Part two: texts of every exact sampler against the target's distribution, by chi-square.

Enumeration cannot see how numbers are made and keyed, so here they are drawn. Each of six pairs of
distributions is drawn from in two ways under each sampler: walked, by the functions and keys that
the engine uses, and by the hundred thousand on tensors (`MANY`). The walked texts must be the first
of the texts on tensors, token for token. The races of the coupled sampler are tested alone, against
the joint distribution of both winners. Last, the whole engine writes texts with scripted models.

Shapes:  V = vocabulary, B = texts, T = tokens kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from outrider.core.clock import host_ints, host_rows
from outrider.core.config import EngineConfig
from outrider.core.draft import Draft, Outcome
from outrider.core.params import SamplingParams
from outrider.core.protocols import VerifyRow
from outrider.core.rng import KeyedRng, Rng
from outrider.core.sampling import Distributions
from outrider.drafters.common.context import LoadedModels
from outrider.engine.build import build_engine
from outrider.engine.round import LiveSequence
from outrider.kernels.reference.pointwise import argmax
from outrider.plugins.proof.algebra import DEFECTS
from outrider.plugins.proof.cases import (
    LENGTH,
    PAIRS,
    START,
    TEXTS,
    VOCAB,
    Text,
    WeightPair,
    rotated,
)
from outrider.plugins.proof.check import Check, Effort, Part
from outrider.plugins.proof.distributions import (
    Sampler,
    exact_samplers,
    joint_winner,
    plain_distribution,
)
from outrider_lab.models.scripted import Script, ScriptedLM
from outrider_lab.proof.chisquare import FAMILY_LEVEL, MANY, K, p_value, threshold

# Texts are made in portions, which bounds memory.
_DRAWS_PORTION = 100_000


@dataclass(frozen=True, slots=True)
class ChiSquareTrial:
    """One chi-square test: its name, the number of draws, and its p-value.

    `defect` is the error that stopped the drawing, None if there was none.
    """

    name: str
    num_draws: int
    p_value: float
    defect: str | None = None


@dataclass(slots=True)
class Desk:
    """A writer of texts of one pair under one sampler, which caches drafts and distributions.

    A text is several rounds long, so that a number used twice, in one round or in the next, shows
    in the joint distribution although every single distribution is right.
    """

    sampler: Sampler
    p_VV: Tensor
    q_VV: Tensor
    _offers: dict[Text, tuple[Draft, Distributions]] = field(
        default_factory=dict[Text, tuple[Draft, Distributions]]
    )

    @classmethod
    def of(cls, sampler: Sampler, pair: WeightPair) -> Desk:
        return cls(sampler, *pair.tables())

    def text(self, seed: int, sample: int) -> Text:
        """Return the first LENGTH tokens that rounds of K drafts emit after START."""
        params = SamplingParams(temperature=1.0, seed=seed)
        seq = LiveSequence(0, [START], 1, params, limit=LENGTH, sample=sample)
        while seq.num_emitted < LENGTH:
            rng = seq.rng
            draft, distributions = self._offer(seq.tokens[-1], rng)
            verdict = self.sampler.rule([VerifyRow(draft, distributions, rng)])[0]
            seq.tokens += Outcome(0, draft, verdict).tokens
        return tuple(seq.tokens[1 : 1 + LENGTH])

    def _offer(self, last: int, rng: Rng) -> tuple[Draft, Distributions]:
        tokens = [last]
        for node in range(K):
            tokens.append(self.sampler.draw(self.q_VV[tokens[-1]], rng, node, node))
        context = tuple(tokens)
        if context not in self._offers:
            draft = Draft.chain(context[1:], self.q_VV[tokens[:-1]])
            self._offers[context] = (draft, Distributions(probs_NV=self.p_VV[tokens]))
        return self._offers[context]


@dataclass(frozen=True, slots=True)
class PairTrials:
    """Trials of one sampler on one pair, and how many walked texts equal those on tensors."""

    trials: tuple[ChiSquareTrial, ...]
    num_walked: int
    num_same: int


def pair_trials(
    sampler: Sampler, pair: WeightPair, *, seed: int, num_walked: int, num_texts: int
) -> PairTrials:
    """Test walked texts, and `num_texts` on tensors if the rule is also written on tensors."""
    walked: list[Text] = []
    trial = walked_trial(sampler, pair, seed=seed, num_texts=num_walked, keep=walked)
    if sampler.name not in MANY:
        return PairTrials((trial,), 0, 0)
    counts, first = _many(sampler.name, pair, seed=seed, num_texts=num_texts, keep=len(walked))
    name = f"{sampler.name}, {pair.name}, on tensors"
    many = ChiSquareTrial(name, num_texts, p_value(counts, pair.text_distribution()))
    num_same = sum(a == b for a, b in zip(walked, first, strict=True))
    return PairTrials((trial, many), len(walked), num_same)


def walked_trial(
    sampler: Sampler, pair: WeightPair, *, seed: int, num_texts: int, keep: list[Text] | None = None
) -> ChiSquareTrial:
    """Test texts drawn one by one; they are appended to `keep`."""
    desk = Desk.of(sampler, pair)
    texts = [] if keep is None else keep

    def draws() -> Iterator[Text]:
        for sample in range(num_texts):
            texts.append(desk.text(seed, sample))
            yield texts[-1]

    distribution = dict(zip(TEXTS, pair.text_distribution(), strict=True))
    return count_trial(f"{sampler.name}, {pair.name}", draws(), distribution)


def _many(
    name: str, pair: WeightPair, *, seed: int, num_texts: int, keep: int
) -> tuple[Sequence[int], list[Text]]:
    """Return how often each of TEXTS came, and the first `keep` texts."""
    weight_T = torch.tensor([VOCAB**power for power in reversed(range(LENGTH))])
    counts = torch.zeros(len(TEXTS), dtype=torch.int64)
    first: list[Text] = []
    for start in range(0, num_texts, _DRAWS_PORTION):
        samples = np.arange(start, min(start + _DRAWS_PORTION, num_texts), dtype=np.uint64)
        text_BT = MANY[name](pair, seed, samples)
        first += [tuple(row) for row in host_rows(text_BT[: max(keep - start, 0)])]
        counts += torch.bincount((text_BT * weight_T).sum(-1), minlength=len(TEXTS))
    return host_ints(counts), first


def race_trial(pair: WeightPair, *, seed: int, num_races: int) -> ChiSquareTrial:
    """Test both winners of races over shared numbers against their closed joint distribution."""
    p, q = rotated(pair.target, START), rotated(pair.proposal, START)
    p_V, q_V = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    joint = {(i, j): joint_winner(p, q, i, j) for i in range(VOCAB) for j in range(VOCAB)}

    def winners() -> Iterator[Text]:
        for sample in range(num_races):
            rng = KeyedRng(seed, sample, start=1)
            yield rng.race_at(p_V, 0), rng.race_at(q_V, 0)

    return count_trial(f"shared races, {pair.name}", winners(), joint)


def count_trial(
    name: str, draws: Iterable[Text], distribution: Mapping[Text, float]
) -> ChiSquareTrial:
    """Test draws against their distribution; a value outside of it is impossible."""
    try:
        counts = Counter(draws)
    except DEFECTS as error:
        return ChiSquareTrial(name, 0, 0.0, f"{type(error).__name__}: {error}")
    num_draws = sum(counts.values())
    if counts.keys() - distribution.keys():
        return ChiSquareTrial(name, num_draws, 0.0, "a text that cannot be")
    return ChiSquareTrial(
        name,
        num_draws,
        p_value([counts[text] for text in distribution], list(distribution.values())),
    )


TEXT_VOCAB = 4
TEXT_LENGTH = 3
PROMPT = (2, 0, 3)
TARGET = Script(vocab_size=TEXT_VOCAB, seed=5, order=2, gap=0.4, spread=2.0)
DRAFT = Script(vocab_size=TEXT_VOCAB, seed=5, order=2, gap=1.2, spread=1.0, agreement=0.6)
_BATCH = 16


def text_distribution() -> dict[Text, float]:
    """Return the probability of each text of LENGTH tokens after PROMPT, in plain floats."""
    distribution: dict[Text, float] = {}
    for text in product(range(TEXT_VOCAB), repeat=TEXT_LENGTH):
        whole, chance = (*PROMPT, *text), 1.0
        for at, token in enumerate(text, start=len(PROMPT)):
            chance *= _next_distribution(whole[at - TARGET.order : at])[token]
        distribution[text] = chance
    return distribution


def engine_texts(sampler: str, *, seed: int, num_texts: int) -> Iterator[Text]:
    """Yield one text for each sample number, written by the engine in a batch of others.

    No part of a round is left out: draft model, target pass, processing, rule, clamp, commit and
    the keys of each round are wired by `engine/build.py`. Only the weights are missing: both
    models' distributions are hashes of the last tokens, so that of a whole text is known.
    """
    config = EngineConfig(drafter="model", k=2, sampler=sampler, batch_size=_BATCH)
    parts = LoadedModels(ScriptedLM(TARGET), ScriptedLM(DRAFT), argmax)
    engine = build_engine(
        parts.resolve(config), parts, num_slots=TARGET.num_slots, sink=lambda _: None
    )
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=TEXT_LENGTH)
    for first in range(0, num_texts, _BATCH):
        batch = [_sequence(params, i) for i in range(first, min(first + _BATCH, num_texts))]
        for seq in batch:
            engine.submit(seq)
        while engine.has_work:
            engine.step()
        for seq in batch:
            yield tuple(seq.tokens[len(PROMPT) :])


def _sequence(params: SamplingParams, sample: int) -> LiveSequence:
    return LiveSequence(
        seq_id=sample,
        tokens=list(PROMPT),
        prompt_length=len(PROMPT),
        params=params,
        limit=params.max_tokens,
        sample=sample,
    )


@cache
def _next_distribution(context: Text) -> list[float]:
    logits = [float(logit) for logit in TARGET.logits(context)]
    return plain_distribution(logits, SamplingParams(temperature=1.0))


@dataclass(frozen=True, slots=True)
class Family:
    """The trials of one certificate, judged together."""

    trials: tuple[ChiSquareTrial, ...]

    @property
    def threshold(self) -> float:
        return threshold(len(self.trials))

    @property
    def smallest(self) -> ChiSquareTrial:
        return min(self.trials, key=lambda trial: trial.p_value)

    @property
    def failed(self) -> list[ChiSquareTrial]:
        return [t for t in self.trials if t.defect is not None or t.p_value < self.threshold]


def ensemble(effort: Effort, *, seed: int, own: str) -> Part:
    """Run part two. `own` is the user's sampler, which is walked more often than others."""
    drawn: list[PairTrials] = []
    trials: list[ChiSquareTrial] = []
    for sampler in exact_samplers(own):
        num_walked = effort.num_walked_own if sampler.name == own else effort.num_walked
        for pair in PAIRS:
            yield f"{sampler.name}: {pair.name}"
            counts = {"num_walked": num_walked, "num_texts": effort.num_texts}
            drawn.append(pair_trials(sampler, pair, seed=seed, **counts))
        yield f"{sampler.name}: the engine's texts"
        texts = engine_texts(sampler.name, seed=seed, num_texts=effort.num_engine)
        trials.append(count_trial(f"{sampler.name}, whole engine", texts, text_distribution()))
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
