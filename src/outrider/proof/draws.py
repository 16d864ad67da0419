"""Chi-square trials of the shipped rules, drawing with the shipped random numbers and their keys.

What is drawn is a whole text, several rounds long, so that a number used twice, in one round or in
the next, shows in the joint law although every single law is right.

Shapes:  V = vocabulary, B = texts, T = tokens kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.core.clock import host_ints, host_rows
from outrider.core.draft import Draft, Outcome
from outrider.core.params import SamplingParams
from outrider.core.protocols import JudgeRow
from outrider.core.rng import KeyedNoise, Noise
from outrider.core.sampling import Laws
from outrider.core.sequence import LiveSequence
from outrider.proof.algebra import DEFECTS
from outrider.proof.cases import Text
from outrider.proof.chisquare import p_value
from outrider.proof.many import MANY, K
from outrider.proof.pairs import LENGTH, START, TEXTS, VOCAB, Pair, turned
from outrider.proof.races import joint_winner
from outrider.proof.samplers import Sampler

# Texts are made in portions, which bounds memory.
_PORTION = 100_000


@dataclass(frozen=True, slots=True)
class Trial:
    """One chi-square test: what was drawn, how often, and its p-value.

    `defect` is how the drawing fell over, None if it did not.
    """

    name: str
    num_draws: int
    p_value: float
    defect: str | None = None


@dataclass(slots=True)
class Desk:
    """Draws texts of one pair under one sampler. Drafts and laws are kept, since few differ."""

    sampler: Sampler
    p_VV: Tensor
    q_VV: Tensor
    _offers: dict[Text, tuple[Draft, Laws]] = field(default_factory=dict[Text, tuple[Draft, Laws]])

    @classmethod
    def of(cls, sampler: Sampler, pair: Pair) -> Desk:
        return cls(sampler, *pair.tables())

    def text(self, seed: int, sample: int) -> Text:
        """The first LENGTH tokens that rounds of K drafts emit after START."""
        params = SamplingParams(temperature=1.0, seed=seed)
        seq = LiveSequence(0, [START], 1, params, limit=LENGTH, sample=sample)
        while seq.num_emitted < LENGTH:
            noise = seq.noise
            draft, laws = self._offer(seq.tokens[-1], noise)
            verdict = self.sampler.rule([JudgeRow(draft, laws, noise)])[0]
            seq.tokens += Outcome(0, draft, verdict).tokens
        return tuple(seq.tokens[1 : 1 + LENGTH])

    def _offer(self, last: int, noise: Noise) -> tuple[Draft, Laws]:
        tokens = [last]
        for node in range(K):
            tokens.append(self.sampler.draw(self.q_VV[tokens[-1]], noise, node))
        context = tuple(tokens)
        if context not in self._offers:
            draft = Draft.chain(context[1:], self.q_VV[tokens[:-1]])
            self._offers[context] = (draft, Laws(probs_NV=self.p_VV[tokens]))
        return self._offers[context]


@dataclass(frozen=True, slots=True)
class PairTrials:
    """One sampler on one pair: its trials, and how many walked texts are those on tensors."""

    trials: tuple[Trial, ...]
    num_walked: int
    num_same: int


def pair_trials(
    sampler: Sampler, pair: Pair, *, seed: int, num_walked: int, num_texts: int
) -> PairTrials:
    """Walked texts, and `num_texts` on tensors if the sampler has such a form (else 0 of them)."""
    walked: list[Text] = []
    trial = walked_trial(sampler, pair, seed=seed, num_texts=num_walked, keep=walked)
    if sampler.name not in MANY:
        return PairTrials((trial,), len(walked), len(walked))
    counts, first = _many(sampler.name, pair, seed=seed, num_texts=num_texts, keep=len(walked))
    name = f"{sampler.name}, {pair.name}, on tensors"
    many = Trial(name, num_texts, p_value(counts, pair.text_law()))
    num_same = sum(a == b for a, b in zip(walked, first, strict=True))
    return PairTrials((trial, many), len(walked), num_same)


def walked_trial(
    sampler: Sampler, pair: Pair, *, seed: int, num_texts: int, keep: list[Text] | None = None
) -> Trial:
    """Texts drawn one by one; they are appended to `keep`."""
    desk = Desk.of(sampler, pair)
    texts = [] if keep is None else keep

    def draws() -> Iterator[Text]:
        for sample in range(num_texts):
            texts.append(desk.text(seed, sample))
            yield texts[-1]

    law = dict(zip(TEXTS, pair.text_law(), strict=True))
    return count_trial(f"{sampler.name}, {pair.name}", draws(), law)


def _many(
    name: str, pair: Pair, *, seed: int, num_texts: int, keep: int
) -> tuple[Sequence[int], list[Text]]:
    """How often each of TEXTS came, and the first `keep` texts."""
    place_T = torch.tensor([VOCAB**place for place in reversed(range(LENGTH))])
    counts = torch.zeros(len(TEXTS), dtype=torch.int64)
    first: list[Text] = []
    for start in range(0, num_texts, _PORTION):
        samples = np.arange(start, min(start + _PORTION, num_texts), dtype=np.uint64)
        text_BT = MANY[name](pair, seed, samples)
        first += [tuple(row) for row in host_rows(text_BT[: max(keep - start, 0)])]
        counts += torch.bincount((text_BT * place_T).sum(-1), minlength=len(TEXTS))
    return host_ints(counts), first


def race_trial(pair: Pair, *, seed: int, num_races: int) -> Trial:
    """Both winners of races over shared numbers, against their closed joint law."""
    p, q = turned(pair.target, START), turned(pair.proposal, START)
    p_V, q_V = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    joint = {(i, j): joint_winner(p, q, i, j) for i in range(VOCAB) for j in range(VOCAB)}

    def winners() -> Iterator[Text]:
        for sample in range(num_races):
            noise = KeyedNoise(seed, sample, start=1)
            yield noise.race_at(p_V, 0), noise.race_at(q_V, 0)

    return count_trial(f"shared races, {pair.name}", winners(), joint)


def count_trial(name: str, draws: Iterable[Text], law: Mapping[Text, float]) -> Trial:
    """Draws by value against their law; a value that `law` does not have cannot be."""
    try:
        counts = Counter(draws)
    except DEFECTS as error:
        return Trial(name, 0, 0.0, f"{type(error).__name__}: {error}")
    num_draws = sum(counts.values())
    if counts.keys() - law.keys():
        return Trial(name, num_draws, 0.0, "a text that cannot be")
    return Trial(name, num_draws, p_value([counts[text] for text in law], list(law.values())))
