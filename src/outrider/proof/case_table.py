"""The cases of the exact algebra: a fixed table, then as many generated ones as there is time for.

Between them the fixed ones break every wrong rule that we know of: near-uniform and spiky laws,
zeros on either side, disjoint supports, point masses, ties, trees, and everything that shapes a
law.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from outrider.core.params import SamplingParams
from outrider.core.rng import ROOT
from outrider.proof.cases import PLAIN, Case, Text, Weights


def chain(
    name: str,
    targets: Sequence[Weights],
    proposals: Sequence[Weights],
    params: SamplingParams = PLAIN,
) -> Case:
    """One more target law than proposals: the bonus token's."""
    parents = tuple(range(ROOT, len(proposals) - 1))
    return Case(
        name=name,
        parents=parents,
        target=tuple(targets),
        proposal=tuple(proposals),
        params=params,
    )


def siblings(
    name: str, target: Weights, proposals: Sequence[Weights], *, distinct: bool = False
) -> Case:
    """Candidates for one token; the second target law is for what follows."""
    return Case(
        name=name,
        parents=(ROOT,) * len(proposals),
        target=(target, target[1:] + target[:1]),
        proposal=tuple(proposals),
        distinct=distinct,
    )


def _tree(name: str, parents: tuple[int, ...], certain: frozenset[int] = frozenset()) -> Case:
    return Case(
        name=name,
        parents=parents,
        target=((3, 2, 2), (1, 4, 2), (2, 1, 1), (5, 1, 3)),
        proposal=((1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 2, 1))[: len(parents)],
        certain=certain,
    )


def _shaped(name: str, params: SamplingParams, *, bad_words: tuple[Text, ...] = ()) -> Case:
    """A chain of two under `params`; no mass of its laws lies at a filter's edge."""
    return Case(
        name=name,
        parents=(ROOT, 0),
        target=((6, 3, 2, 1), (2, 7, 1, 3), (1, 2, 9, 4)),
        proposal=((2, 5, 2, 3), (4, 1, 3, 3)),
        params=params,
        bad_words=bad_words,
    )


_SPARSE = ((1, 1, 2), (1, 3, 1), (4, 1, 1))
FIXED = (
    chain("one draft", [(5, 3, 2), (2, 2, 1)], [(2, 3, 5)]),
    chain("equal laws", [(4, 3, 1), (1, 2, 2)], [(4, 3, 1)]),
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
            temperature=0.9,
            repetition_penalty=1.4,
            frequency_penalty=0.3,
            presence_penalty=0.5,
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


def generated(seed: int) -> Iterator[Case]:
    """Cases without end: mostly single drafts and short chains, now and then a tree."""
    rng = Random(seed)
    while True:
        for _ in range(12):
            yield _generated_chain(rng, length=1, vocab_size=rng.choice((2, 3, 4, 4)))
        for _ in range(3):
            yield _generated_chain(rng, length=2, vocab_size=3)
        yield _generated_chain(rng, length=3, vocab_size=rng.choice((2, 2, 3)))
        yield _generated_tree(rng)


def _generated_chain(rng: Random, *, length: int, vocab_size: int) -> Case:
    targets = [_weights(rng, vocab_size) for _ in range(length + 1)]
    proposals = [_weights(rng, vocab_size) for _ in range(length)]
    return chain(f"generated chain of {length}", targets, proposals, rng.choice(_PARAMS))


def _generated_tree(rng: Random) -> Case:
    parents = rng.choice(_SHAPES)
    return Case(
        name=f"generated tree {parents}",
        parents=parents,
        target=tuple(_weights(rng, 3) for _ in range(3)),
        proposal=tuple(_weights(rng, 3) for _ in parents),
        params=rng.choice(_PARAMS),
        certain=frozenset(node for node in range(len(parents)) if rng.random() < 0.2),
        distinct=rng.random() < 0.4,
    )


def _weights(rng: Random, vocab_size: int) -> Weights:
    """Small numbers, so that zeros, ties and point masses are common."""
    while True:
        weights = tuple(rng.choice((0, 0, 1, 1, 2, 3, 5, 8)) for _ in range(vocab_size))
        if any(weights):
            return weights
