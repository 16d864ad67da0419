"""Targets and drafts in small integers: every distribution of a round is known, and rounds are few.

A case has whole-number weights for the target's next token at each depth and for each draft node.
Both are rotated by the tokens before, so every path has distributions of its own. Logits are the
logarithms of the weights; from there on only shipped code runs (`engine/stages.py`), while the
expected result is computed by `plain_distribution`.

Shapes:  N = draft nodes, M = distributions of a round, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import VerifyRow
from outrider.core.rng import DrawNode, Rng, pick_node
from outrider.core.sampling import processed_probs
from outrider.core.tree import ROOT
from outrider.engine.round import LiveSequence
from outrider.engine.stages import read_pass
from outrider.kernels.reference.pointwise import argmax
from outrider.plugins.proof.distributions import plain_distribution

Weights = tuple[int, ...]
Text = tuple[int, ...]

PROMPT = (1, 0)
PLAIN = SamplingParams(temperature=1.0)
_NO_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCase:
    """One case. `target` has weights per depth, `proposal` per node.

    Nodes in `certain` are not drawn: they are their distribution's likeliest token, and the
    reported distribution is a point mass. With `distinct`, siblings are drawn without replacement.
    """

    name: str
    parents: tuple[int, ...]
    target: tuple[Weights, ...]
    proposal: tuple[Weights, ...]
    params: SamplingParams = PLAIN
    bad_words: tuple[Text, ...] = ()
    certain: frozenset[int] = frozenset()
    distinct: bool = False

    @property
    def length(self) -> int:
        """Tokens of the longest path and the token after it."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return 1 + max(depths, default=0)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    def conditional(self, text: Text) -> list[float]:
        """Return the expected distribution after `text`."""
        logits = _logits(_rotated(self.target[len(text)], text))
        bad_words = self.bad_words
        return plain_distribution(
            logits, self.params, prompt=PROMPT, text=text, bad_words=bad_words
        )

    def proposal_distribution(self, node: int, tokens: Sequence[int]) -> Tensor:
        """Return the distribution of `node`, given the tokens of all nodes before it; shape V."""
        weights = _rotated(self.proposal[node], self.text(self.parents[node], tokens))
        logits_V = torch.tensor(_logits(weights), dtype=torch.float64)
        if node in self.certain or self.params.greedy:
            return torch.zeros_like(logits_V).index_fill(0, logits_V.argmax(), 1.0)
        probs_V = processed_probs(logits_V[None], self.params)[0]
        earlier = [n for n in range(node) if self.parents[n] == self.parents[node]]
        left_V = probs_V.clone()
        left_V[[tokens[n] for n in earlier]] = 0
        return left_V / left_V.sum() if self.distinct and left_V.sum() > 0 else probs_V

    def text(self, node: int, tokens: Sequence[int]) -> Text:
        """Return the drafted tokens from the root to `node`, itself included."""
        text: list[int] = []
        while node != ROOT:
            text.append(tokens[node])
            node = self.parents[node]
        return tuple(reversed(text))

    def drawn(
        self, rng: Rng, draw: DrawNode = pick_node, known: dict[Text, Tensor] | None = None
    ) -> Draft:
        """Return a draft. `draw` is for chains, whose nodes know their position, not for trees.

        `known` caches the distribution after each beginning, for callers that draw many drafts.
        """
        draw = draw if self.is_chain else pick_node
        known = {} if known is None else known
        tokens: list[int] = []
        distributions: list[Tensor] = []
        for node in range(len(self.parents)):
            before = tuple(tokens)
            if before not in known:
                known[before] = self.proposal_distribution(node, tokens)
            tokens.append(draw(known[before], rng, node, node))
            distributions.append(known[before])
        sampled = len(self.certain) < len(self.parents) and not self.params.greedy
        return Draft(tuple(tokens), self.parents, torch.stack(distributions) if sampled else None)

    def row(self, draft: Draft, *, exact: bool) -> VerifyRow:
        """Return the rule's input for `draft`: the shipped path from logits on."""
        paths = [self.text(node, draft.tokens) for node in range(ROOT, len(draft))]
        logits = [_logits(_rotated(self.target[len(path)], path)) for path in paths]
        logits_MV = torch.tensor(logits, dtype=torch.float64)
        return read_pass([self._sequence(draft)], logits_MV, argmax, exact=exact)[0].row

    def _sequence(self, draft: Draft) -> LiveSequence:
        shaper = LogitsProcessor(self.params, len(PROMPT), bad_words=self.bad_words)
        return LiveSequence(
            seq_id=0,
            tokens=list(PROMPT),
            prompt_length=len(PROMPT),
            params=self.params,
            limit=_NO_LIMIT,
            shaper=shaper if shaper.active else None,
            draft=draft,
        )


def _logits(weights: Weights) -> list[float]:
    return [math.log(weight) if weight else -math.inf for weight in weights]


def _rotated(weights: Weights, text: Text) -> Weights:
    by = sum((index + 1) * (token + 1) for index, token in enumerate(text)) % len(weights)
    return weights[by:] + weights[:by]


def chain(
    name: str,
    targets: Sequence[Weights],
    proposals: Sequence[Weights],
    params: SamplingParams = PLAIN,
) -> RuleCase:
    """Return a chain. It has one more target distribution than proposals: the bonus token's."""
    parents = tuple(range(ROOT, len(proposals) - 1))
    return RuleCase(
        name=name, parents=parents, target=tuple(targets), proposal=tuple(proposals), params=params
    )


def siblings(
    name: str, target: Weights, proposals: Sequence[Weights], *, distinct: bool = False
) -> RuleCase:
    """Return candidates for one token; the second target distribution is for the token after it."""
    return RuleCase(
        name=name,
        parents=(ROOT,) * len(proposals),
        target=(target, target[1:] + target[:1]),
        proposal=tuple(proposals),
        distinct=distinct,
    )


def _tree(name: str, parents: tuple[int, ...], certain: frozenset[int] = frozenset()) -> RuleCase:
    return RuleCase(
        name=name,
        parents=parents,
        target=((3, 2, 2), (1, 4, 2), (2, 1, 1), (5, 1, 3)),
        proposal=((1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 2, 1))[: len(parents)],
        certain=certain,
    )


def _shaped(name: str, params: SamplingParams, *, bad_words: tuple[Text, ...] = ()) -> RuleCase:
    """Return a chain of two under `params`; no mass lies at a filter's edge."""
    return RuleCase(
        name=name,
        parents=(ROOT, 0),
        target=((6, 3, 2, 1), (2, 7, 1, 3), (1, 2, 9, 4)),
        proposal=((2, 5, 2, 3), (4, 1, 3, 3)),
        params=params,
        bad_words=bad_words,
    )


_SPARSE = ((1, 1, 2), (1, 3, 1), (4, 1, 1))
# Together they break every wrong rule that we know of: near-uniform and spiky distributions, zeros
# on either side, disjoint supports, point masses, ties, trees, and everything that shapes a
# distribution.
FIXED = (
    chain("one draft", [(5, 3, 2), (2, 2, 1)], [(2, 3, 5)]),
    chain("equal distributions", [(4, 3, 1), (1, 2, 2)], [(4, 3, 1)]),
    chain("disjoint supports", [(3, 2, 0, 0), (1, 1, 1, 1)], [(0, 0, 1, 4)]),
    chain("certain target", [(0, 1, 0), (3, 1, 2)], [(2, 1, 4)]),
    chain("certain proposal", [(2, 1, 4), (3, 1, 2)], [(0, 1, 0)]),
    chain("ties and zeros", [(2, 2, 0, 2), (0, 1, 1, 1)], [(0, 3, 3, 3)]),
    chain("chain of two", [(8, 1, 1), (1, 0, 5), (2, 2, 1)], [(3, 3, 1), (2, 2, 2)]),
    chain("chain of three", [(3, 2, 1), (1, 6, 1), (2, 2, 5), (7, 1, 1)], _SPARSE),
    siblings("two siblings", (5, 3, 2), [(1, 1, 1), (1, 1, 1)]),
    siblings("two siblings, distinct", (4, 4, 1), [(0, 0, 1), (4, 4, 1)], distinct=True),
    siblings("three siblings, distinct", (1, 2, 6), [(1, 2, 6)] * 3, distinct=True),
    _tree("looked-up chain", (ROOT, 0, 1), frozenset({0, 1, 2})),
    _shaped("greedy", SamplingParams()),
    _shaped("temperature 0.7", SamplingParams(temperature=0.7)),
    _shaped("temperature 1.6, top-k 2", SamplingParams(temperature=1.6, top_k=2)),
    _shaped("top-p 0.8", SamplingParams(temperature=1.0, top_p=0.8)),
    _shaped("min-p 0.3", SamplingParams(temperature=1.3, min_p=0.3, top_p=0.97)),
    _shaped(
        "penalties",
        SamplingParams(
            temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.5
        ),
    ),
    _shaped(
        "bias and a bad word",
        SamplingParams(temperature=1.0, logit_bias={2: 0.7}, bad_words=("set below",)),
        bad_words=((1, 2), (3,)),
    ),
    _tree("tree", (ROOT, ROOT, 0, 0)),
    _tree("tree, partly certain", (ROOT, 0, ROOT, 2), frozenset({2})),
)

_SHAPES = (
    (ROOT, ROOT),
    (ROOT, ROOT, ROOT),
    (ROOT, ROOT, 0),
    (ROOT, 0, 0),
    (ROOT, ROOT, 1, 1),
    (ROOT, 0, ROOT, 2),
)
_PARAMS = (
    PLAIN,
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=2),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=-0.4),
)


def generated(seed: int) -> Iterator[RuleCase]:
    """Yield endless cases: mostly single drafts and short chains, now and then a tree."""
    rng = Random(seed)
    while True:
        for _ in range(12):
            yield _generated_chain(rng, length=1, vocab_size=rng.choice((2, 3, 4, 4)))
        for _ in range(3):
            yield _generated_chain(rng, length=2, vocab_size=3)
        yield _generated_chain(rng, length=3, vocab_size=rng.choice((2, 2, 3)))
        yield _generated_tree(rng)


def _generated_chain(rng: Random, *, length: int, vocab_size: int) -> RuleCase:
    targets = [_weights(rng, vocab_size) for _ in range(length + 1)]
    proposals = [_weights(rng, vocab_size) for _ in range(length)]
    return chain(f"generated chain of {length}", targets, proposals, rng.choice(_PARAMS))


def _generated_tree(rng: Random) -> RuleCase:
    parents = rng.choice(_SHAPES)
    return RuleCase(
        name=f"generated tree {parents}",
        parents=parents,
        target=tuple(_weights(rng, 3) for _ in range(3)),
        proposal=tuple(_weights(rng, 3) for _ in parents),
        params=rng.choice(_PARAMS),
        certain=frozenset(node for node in range(len(parents)) if rng.random() < 0.2),
        distinct=rng.random() < 0.4,
    )


def _weights(rng: Random, vocab_size: int) -> Weights:
    """Return small numbers, so that zeros, ties and point masses are common."""
    while True:
        weights = tuple(rng.choice((0, 0, 1, 1, 2, 3, 5, 8)) for _ in range(vocab_size))
        if any(weights):
            return weights


VOCAB = 6
LENGTH = 3
START = 0
TEXTS: tuple[Text, ...] = tuple(product(range(VOCAB), repeat=LENGTH))


@dataclass(frozen=True, slots=True)
class WeightPair:
    """Whole-number weights of the next token after token 0: the target's and the drafter's. Both
    are rotated by the last token, so that a text's distribution is that of a Markov chain."""

    name: str
    target: Weights
    proposal: Weights

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return (p_VV, q_VV), distributions after each token by the shipped processing."""
        return _table(self.target), _table(self.proposal)

    def text_distribution(self) -> list[float]:
        """Return the probability of each of TEXTS after START, in plain floats."""
        return [_chance(self.target, text) for text in TEXTS]


# One random pair misses bugs that these find: they are near-uniform, spiky, almost equal, disjoint,
# and certain on either side.
PAIRS = (
    WeightPair("spiky", (90, 4, 2, 2, 1, 1), (50, 20, 10, 10, 5, 5)),
    WeightPair("near-uniform", (17, 16, 18, 15, 16, 18), (16, 18, 15, 17, 18, 16)),
    WeightPair("close", (400, 250, 150, 100, 60, 40), (375, 247, 156, 108, 68, 46)),
    WeightPair("disjoint", (3, 2, 1, 0, 0, 0), (0, 0, 0, 1, 2, 3)),
    WeightPair("certain target", (0, 1, 0, 0, 0, 0), (2, 3, 1, 1, 2, 1)),
    WeightPair("certain draft", (3, 4, 1, 1, 2, 1), (0, 1, 0, 0, 0, 0)),
)


def rotated(weights: Sequence[int], last: int) -> list[int]:
    return [*weights[last:], *weights[:last]]


def _table(weights: Weights) -> Tensor:
    rows = [rotated(weights, last) for last in range(VOCAB)]
    logits_VV = torch.tensor(rows, dtype=torch.float64).log()
    return processed_probs(logits_VV, SamplingParams(temperature=1.0))


def _chance(weights: Weights, text: Text) -> float:
    chance, last = 1.0, START
    for token in text:
        chance *= rotated(weights, last)[token] / sum(weights)
        last = token
    return chance
