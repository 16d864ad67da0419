"""The chi-square test with a stated false-alarm rate.

Counts of cells are compared with the expected counts; cells that expect fewer than five are pooled,
since the statistic follows its limit distribution only above that. The smallest of all p-values of
a certificate is compared with FAMILY_LEVEL divided by their number (Bonferroni), so that the
probability of one false alarm in a whole certificate is below FAMILY_LEVEL.

Pearson 1900; pooling at five is Cochran 1954.

Shapes:  S = samples (runs), C = cells, B = texts, K = drafted tokens, W = K + 1, T = tokens kept,
         V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from outrider.core.philox import Word, Words, philox_exponentials, philox_uniforms
from outrider.core.rng import Role
from outrider.core.tree import ROOT
from outrider.plugins.gpu.rounds.verdicts import (
    ChainNumbers,
    ChainVerdicts,
    judge_blocks,
    judge_chains,
    pick,
)
from outrider.plugins.proof.cases import LENGTH, START, VOCAB, WeightPair

FAMILY_LEVEL = 1e-6
MIN_EXPECTED = 5.0


def keyed_numbers(seed: Word, sample: Word, start: Word, num_tokens: int) -> ChainNumbers:
    """The numbers that `KeyedRng(seed, sample, start)` draws in a round.

    Each of the three is an int or a uint64 array of shape B; at least one is an array.
    """
    accept = [keyed_uniforms(seed, sample, start, node, Role.ACCEPT) for node in range(num_tokens)]
    nodes = range(ROOT, num_tokens)
    following = [keyed_uniforms(seed, sample, start, node, Role.NEXT) for node in nodes]
    accept_BK = torch.stack(accept, -1) if accept else following[0].new_empty(len(following[0]), 0)
    return ChainNumbers(accept_BK, torch.stack(following, -1))


def keyed_uniforms(seed: Word, sample: Word, start: Word, node: int, role: Role) -> Tensor:
    """Numbers of shape B that decide `role` of `node`; arguments as for `keyed_numbers`."""
    return torch.as_tensor(philox_uniforms(seed, (node + 1, start, sample, int(role))))


def p_values(counts_SC: Tensor, probs_C: Tensor) -> Tensor:
    """Return one p-value a run, in float64; all runs drew equally often.

    A hit cell of probability 0 makes its run's p-value 0. If all mass lies in one cell there is
    nothing to test and the p-value is 1.
    """
    counts_SC = counts_SC.double()
    probs_C = probs_C.double()
    num_draws = float(counts_SC[0].sum())
    impossible_S = counts_SC[:, probs_C == 0].sum(-1) > 0
    groups = _groups([float(count) for count in probs_C * num_draws])
    statistic_S = torch.zeros(counts_SC.shape[0], dtype=torch.float64)
    for group in groups:
        expected = float(probs_C[group].sum()) * num_draws
        statistic_S += (counts_SC[:, group].sum(-1) - expected) ** 2 / expected
    if len(groups) < 2:
        values_S = torch.ones_like(statistic_S)
    else:
        freedom_S = torch.full_like(statistic_S, (len(groups) - 1) / 2)
        values_S = _upper_gamma(freedom_S, statistic_S / 2)
    return values_S.masked_fill(impossible_S, 0.0)


def p_value(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Return the p-value of a single run."""
    counts_1C = torch.tensor([counts], dtype=torch.float64)
    return float(p_values(counts_1C, torch.tensor(probs, dtype=torch.float64))[0])


def threshold(num_tests: int) -> float:
    """Return the p-value below which a certificate of so many tests fails."""
    return FAMILY_LEVEL / num_tests


def _upper_gamma(half_freedom_S: Tensor, half_statistic_S: Tensor) -> Tensor:
    """Return the probability of a statistic at least so large."""
    special = cast("Any", torch.special)
    return cast("Tensor", special.gammaincc(half_freedom_S, half_statistic_S))


def _groups(expected: Sequence[float]) -> list[list[int]]:
    """Return cells tested together: each that expects enough alone, the rest as one."""
    alone = [[cell] for cell, count in enumerate(expected) if count >= MIN_EXPECTED]
    pooled = [cell for cell, count in enumerate(expected) if 0 < count < MIN_EXPECTED]
    if not pooled:
        return alone
    if alone and sum(expected[cell] for cell in pooled) < MIN_EXPECTED:
        smallest = min(alone, key=lambda group: expected[group[0]])
        alone.remove(smallest)
        pooled = sorted([*pooled, *smallest])
    return [*alone, pooled]


Judge: TypeAlias = Callable[[Tensor, Tensor, Tensor, ChainNumbers], ChainVerdicts]
Many: TypeAlias = Callable[[WeightPair, int, Words], Tensor]

K = 2


def _rounds(judge: Judge) -> Many:
    """Return a maker of texts of LENGTH tokens after START, in rounds that `judge` decides."""

    def texts(pair: WeightPair, seed: int, samples: Words) -> Tensor:
        p_VV, q_VV = pair.tables()
        text_BT = torch.full((len(samples), 1 + LENGTH + K), START)
        length_B = torch.ones(len(samples), dtype=torch.int64)
        live_B = torch.arange(len(samples))
        while len(live_B):
            starts, names = length_B[live_B].numpy().astype(np.uint64), samples[live_B.numpy()]
            contexts = [text_BT[live_B, length_B[live_B] - 1]]
            for node in range(K):
                counter = (node + 1, starts, names, int(Role.DRAFT))
                contexts.append(pick(q_VV[contexts[-1]], _uniforms(seed, counter)))
            context_BW = torch.stack(contexts, -1)
            tokens_BK = context_BW[:, 1:]
            numbers = keyed_numbers(seed, names, starts, K)
            verdict = judge(tokens_BK, q_VV[context_BW[:, :-1]], p_VV[context_BW], numbers)
            _append(text_BT, length_B, live_B, tokens_BK, verdict)
            live_B = live_B[length_B[live_B] <= LENGTH]
        return text_BT[:, 1 : 1 + LENGTH]

    return texts


def _append(
    text_BT: Tensor, length_B: Tensor, live_B: Tensor, tokens_BK: Tensor, verdict: ChainVerdicts
) -> None:
    """Append the accepted tokens of each running text, then the target's own."""
    kept_B, at_B = verdict.num_accepted_B, length_B[live_B]
    for node, token_B in enumerate(tokens_BK.unbind(-1)):
        inside_B = kept_B > node
        text_BT[live_B[inside_B], at_B[inside_B] + node] = token_B[inside_B]
    text_BT[live_B, at_B + kept_B] = verdict.next_B
    length_B[live_B] += kept_B + 1


def _plainly(draw: Callable[[Tensor, int, Words, int], Tensor]) -> Many:
    """Return a maker of texts of LENGTH tokens after START, each token drawn from its distribution
    with its position's numbers."""

    def texts(pair: WeightPair, seed: int, samples: Words) -> Tensor:
        p_VV, _ = pair.tables()
        tokens = [torch.full((len(samples),), START)]
        for position in range(1, 1 + LENGTH):
            tokens.append(draw(p_VV[tokens[-1]], seed, samples, position))
        return torch.stack(tokens[1:], -1)

    return texts


def _picked(probs_BV: Tensor, seed: int, samples: Words, position: int) -> Tensor:
    return pick(probs_BV, _uniforms(seed, (0, position, samples, int(Role.POSITION))))


def _raced(probs_BV: Tensor, seed: int, samples: Words, position: int) -> Tensor:
    ids = np.arange(VOCAB, dtype=np.uint64)
    counter = (ids, position, samples[:, None], int(Role.RACE))
    return (torch.as_tensor(philox_exponentials(seed, counter)) / probs_BV).argmin(-1)


def _uniforms(seed: int, counter: tuple[Word, Word, Word, Word]) -> Tensor:
    return torch.as_tensor(philox_uniforms(seed, counter))


# Makers of texts by the name of the exact sampler; a sampler without one is only walked. The block
# and token rules have twins for packed chains. Under the other two a text is what plain decoding
# draws at its positions, whatever was drafted; that is their claim, so here they just draw. All
# numbers are those of `KeyedRng`: text number i is the text that the walked rule draws for sample
# i.
MANY: Mapping[str, Many] = {
    "block": _rounds(judge_blocks),
    "token": _rounds(judge_chains),
    "match": _plainly(_picked),
    "coupled": _plainly(_raced),
}
