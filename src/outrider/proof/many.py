"""Texts by the hundred thousand: what each exact sampler draws, on tensors.

The block and token rules have twins for packed chains (`verify/batched.py`). Under the match and
coupled rules a text is what plain decoding draws at its positions, whatever was drafted; that is
their claim, so here they just draw. All numbers are those of `KeyedNoise`: text number i is the
text that the walked rule draws for sample i, token for token, and the ensemble checks that it is.

Shapes:  B = texts, K = drafted tokens, W = K + 1, T = tokens kept, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.core.rng import Role, Word, Words, philox_exponentials, philox_uniforms
from outrider.proof.pairs import LENGTH, START, VOCAB, Pair
from outrider.verify.batched import (
    ChainNumbers,
    ChainVerdicts,
    judge_blocks,
    judge_chains,
    keyed_numbers,
    pick,
)

Judge: TypeAlias = Callable[[Tensor, Tensor, Tensor, ChainNumbers], ChainVerdicts]
Many: TypeAlias = Callable[[Pair, int, Words], Tensor]

K = 2


def _rounds(judge: Judge) -> Many:
    """Texts of LENGTH tokens after START, in rounds of K drafts that `judge` decides."""

    def texts(pair: Pair, seed: int, samples: Words) -> Tensor:
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
    """The accepted tokens of each live text, then the target's own."""
    kept_B, at_B = verdict.num_accepted_B, length_B[live_B]
    for node, token_B in enumerate(tokens_BK.unbind(-1)):
        inside_B = kept_B > node
        text_BT[live_B[inside_B], at_B[inside_B] + node] = token_B[inside_B]
    text_BT[live_B, at_B + kept_B] = verdict.next_B
    length_B[live_B] += kept_B + 1


def _plainly(draw: Callable[[Tensor, int, Words, int], Tensor]) -> Many:
    """Texts of LENGTH tokens after START, each drawn from its law with its position's numbers."""

    def texts(pair: Pair, seed: int, samples: Words) -> Tensor:
        p_VV, _ = pair.tables()
        tokens = [torch.full((len(samples),), START)]
        for position in range(1, 1 + LENGTH):
            tokens.append(draw(p_VV[tokens[-1]], seed, samples, position))
        return torch.stack(tokens[1:], -1)

    return texts


def _picked(law_BV: Tensor, seed: int, samples: Words, position: int) -> Tensor:
    return pick(law_BV, _uniforms(seed, (0, position, samples, int(Role.POSITION))))


def _raced(law_BV: Tensor, seed: int, samples: Words, position: int) -> Tensor:
    ids = np.arange(VOCAB, dtype=np.uint64)
    counter = (ids, position, samples[:, None], int(Role.RACE))
    return (torch.as_tensor(philox_exponentials(seed, counter)) / law_BV).argmin(-1)


def _uniforms(seed: int, counter: tuple[Word, Word, Word, Word]) -> Tensor:
    return torch.as_tensor(philox_uniforms(seed, counter))


# By the name of the exact sampler; one that is not here is only walked.
MANY: Mapping[str, Many] = {
    "block": _rounds(judge_blocks),
    "token": _rounds(judge_chains),
    "match": _plainly(_picked),
    "coupled": _plainly(_raced),
}
