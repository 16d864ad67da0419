"""A chain that grows by a token a pass: greedy, or drawn from laws that are reported as drawn from.

Shapes:  V = vocabulary, N = nodes of a chain, M = chains that grow together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import NumericsError, blaming
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftRow
from outrider.core.rng import DrawNode, pick_node
from outrider.core.sampling import PLAIN, Sampling, empty_laws, processed_probs

# The highest that a request may ask for.
MAX_TEMPERATURE = 100.0
# (laws_NV, node): change the laws of a chain's node `node` in place; what comes out is reported.
ChangeLaws: TypeAlias = Callable[[Tensor, int], None]


@dataclass(frozen=True, slots=True)
class Growth:
    """How tokens are chosen: `argmax` where decoding is greedy, else `draw` from a law that
    `sampling` makes and `change`, if given, changes. `whose` logits they are is told where those
    are no numbers."""

    argmax: Callable[[Tensor], list[int]]
    whose: str
    draw: DrawNode = pick_node
    sampling: Sampling = PLAIN
    change: ChangeLaws | None = None

    def extend(self, chains: Sequence[GrowingChain], logits_MV: Tensor) -> None:
        """Add to each chain a token by its row of logits, which are shaped in place.

        Raises NumericsError for logits that are no numbers."""
        _shape(chains, logits_MV)
        best = self.argmax(logits_MV)
        if -1 in best:
            raise NumericsError(self.whose)
        for index, chain in enumerate(chains):
            if chain.row.params.greedy:
                chain.tokens.append(best[index])
            else:
                self._draw(chain, logits_MV[index])

    def _draw(self, chain: GrowingChain, logits_V: Tensor) -> None:
        if chain.laws_NV is None:
            chain.laws_NV = empty_laws(chain.depth, logits_V)
        node = len(chain.tokens)
        law_1V = chain.laws_NV[node][None]
        law_V = processed_probs(logits_V[None], chain.row.params, self.sampling, law_1V)[0]
        if self.change is not None:
            self.change(law_1V, node)
        chain.tokens.append(self.draw(law_V, chain.row.noise, node))


@dataclass(slots=True)
class GrowingChain:
    """A draft of `depth` tokens under construction. Laws are made in the place where they are
    reported."""

    row: DraftRow
    depth: int
    tokens: list[int] = field(default_factory=list[int])
    laws_NV: Tensor | None = None

    def __post_init__(self) -> None:
        self.row = _heated(self.row)

    @property
    def complete(self) -> bool:
        return len(self.tokens) >= self.depth

    def draft(self) -> Draft:
        return Draft.chain(self.tokens, self.laws_NV)


def drawn_params(row: DraftRow) -> SamplingParams:
    """The request's, with the temperature that drafts are drawn at."""
    temperature = row.params.temperature * row.budget.temperature
    return replace(row.params, temperature=min(temperature, MAX_TEMPERATURE))


def _heated(row: DraftRow) -> DraftRow:
    """With the temperature that its drafts are drawn at. Greedy drafts are not drawn."""
    if row.budget.temperature == 1 or row.params.greedy:
        return row
    return replace(row, params=drawn_params(row))


def _shape(chains: Sequence[GrowingChain], logits_MV: Tensor) -> None:
    """Shape each chain's logits in place as the target's will be, after the text drafted so far."""
    for chain, logits_V in zip(chains, logits_MV, strict=True):
        row = chain.row
        if row.shaper is not None:
            with blaming(row.seq_id), torch.inference_mode():
                logits_V.copy_(row.shaper.shape(logits_V[None], row.tokens, [chain.tokens])[0])
