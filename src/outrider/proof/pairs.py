"""The six fixed pairs of the chi-square ensemble: laws whose differences break wrong rules.

One random pair misses bugs that these do not: between them they are near-uniform, spiky, almost
equal, disjoint, and certain on either side. Both laws follow the last token only: its weights are
turned round by it, so that a text's law is that of a Markov chain.

Shapes:  V = vocabulary, C = texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.core.sampling import processed_probs
from outrider.proof.cases import Text, Weights

VOCAB = 6
LENGTH = 3
START = 0
TEXTS: tuple[Text, ...] = tuple(product(range(VOCAB), repeat=LENGTH))


@dataclass(frozen=True, slots=True)
class Pair:
    """Whole-number weights of the next token after token 0: the target's and the drafter's."""

    name: str
    target: Weights
    proposal: Weights

    def tables(self) -> tuple[Tensor, Tensor]:
        """(p_VV, q_VV): the laws after each token, through the shipped processing."""
        return _table(self.target), _table(self.proposal)

    def text_law(self) -> list[float]:
        """The probability of each of TEXTS after START, in plain floats."""
        return [_chance(self.target, text) for text in TEXTS]


PAIRS = (
    Pair("spiky", (90, 4, 2, 2, 1, 1), (50, 20, 10, 10, 5, 5)),
    Pair("near-uniform", (17, 16, 18, 15, 16, 18), (16, 18, 15, 17, 18, 16)),
    Pair("close", (400, 250, 150, 100, 60, 40), (375, 247, 156, 108, 68, 46)),
    Pair("disjoint", (3, 2, 1, 0, 0, 0), (0, 0, 0, 1, 2, 3)),
    Pair("certain target", (0, 1, 0, 0, 0, 0), (2, 3, 1, 1, 2, 1)),
    Pair("certain draft", (3, 4, 1, 1, 2, 1), (0, 1, 0, 0, 0, 0)),
)


def turned(weights: Sequence[int], last: int) -> list[int]:
    return [*weights[last:], *weights[:last]]


def _table(weights: Weights) -> Tensor:
    rows = [turned(weights, last) for last in range(VOCAB)]
    logits_VV = torch.tensor(rows, dtype=torch.float64).log()
    return processed_probs(logits_VV, SamplingParams(temperature=1.0))


def _chance(weights: Weights, text: Text) -> float:
    chance, last = 1.0, START
    for token in text:
        chance *= turned(weights, last)[token] / sum(weights)
        last = token
    return chance
