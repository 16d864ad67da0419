"""Targets and drafts in small integers: every law of a round is known, and rounds are few.

A case has whole-number weights for the target's next token at each depth and for each draft node.
Both are turned round by the tokens before, so every path has laws of its own. Logits are the
logarithms of the weights; from there on only shipped code runs (`engine/stages.py`), while what
has to come out is computed by `plain_law`.

Shapes:  N = draft nodes, M = laws of a round, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.logits import Shaper
from outrider.core.params import SamplingParams
from outrider.core.protocols import JudgeRow
from outrider.core.rng import ROOT, DrawNode, Noise, pick_node
from outrider.core.sampling import processed_probs
from outrider.core.sequence import LiveSequence
from outrider.engine.stages import read_pass
from outrider.kernels.reference.pointwise import argmax
from outrider.proof.plain_law import plain_law

Weights = tuple[int, ...]
Text = tuple[int, ...]

PROMPT = (1, 0)
PLAIN = SamplingParams(temperature=1.0)
_NO_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`target` has weights per depth, `proposal` per node.

    Nodes in `certain` are not drawn: they are their law's likeliest token, and the reported law is
    a point mass. With `distinct`, siblings are drawn without replacement.
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
        """Tokens that the longest path and the token after it have."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return 1 + max(depths, default=0)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    def conditional(self, text: Text) -> list[float]:
        """The law that has to come out after `text`."""
        logits = _logits(_turned(self.target[len(text)], text))
        bad_words = self.bad_words
        return plain_law(logits, self.params, prompt=PROMPT, text=text, bad_words=bad_words)

    def proposal_law(self, node: int, tokens: Sequence[int]) -> Tensor:
        """The law of `node`, given the tokens of all nodes before it; shape V."""
        weights = _turned(self.proposal[node], self.text(self.parents[node], tokens))
        logits_V = torch.tensor(_logits(weights), dtype=torch.float64)
        if node in self.certain or self.params.greedy:
            return torch.zeros_like(logits_V).index_fill(0, logits_V.argmax(), 1.0)
        law_V = processed_probs(logits_V[None], self.params)[0]
        earlier = [n for n in range(node) if self.parents[n] == self.parents[node]]
        left_V = law_V.clone()
        left_V[[tokens[n] for n in earlier]] = 0
        return left_V / left_V.sum() if self.distinct and left_V.sum() > 0 else law_V

    def text(self, node: int, tokens: Sequence[int]) -> Text:
        """The drafted tokens from the root to `node`, itself included."""
        text: list[int] = []
        while node != ROOT:
            text.append(tokens[node])
            node = self.parents[node]
        return tuple(reversed(text))

    def drawn(
        self, noise: Noise, draw: DrawNode = pick_node, known: dict[Text, Tensor] | None = None
    ) -> Draft:
        """A draft; `draw` is for chains, whose nodes know their place. Trees are always picked.

        `known` keeps the law after each beginning, for callers who draw many.
        """
        draw = draw if self.is_chain else pick_node
        known = {} if known is None else known
        tokens: list[int] = []
        laws: list[Tensor] = []
        for node in range(len(self.parents)):
            before = tuple(tokens)
            if before not in known:
                known[before] = self.proposal_law(node, tokens)
            tokens.append(draw(known[before], noise, node))
            laws.append(known[before])
        sampled = len(self.certain) < len(self.parents) and not self.params.greedy
        return Draft(tuple(tokens), self.parents, torch.stack(laws) if sampled else None)

    def row(self, draft: Draft, *, exact: bool) -> JudgeRow:
        """What the engine would give the rule for `draft`: the shipped path from logits to laws."""
        paths = [self.text(node, draft.tokens) for node in range(ROOT, len(draft))]
        logits = [_logits(_turned(self.target[len(path)], path)) for path in paths]
        logits_MV = torch.tensor(logits, dtype=torch.float64)
        return read_pass([self._sequence(draft)], logits_MV, argmax, exact=exact)[0].row

    def _sequence(self, draft: Draft) -> LiveSequence:
        shaper = Shaper(self.params, len(PROMPT), bad_words=self.bad_words)
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


def _turned(weights: Weights, text: Text) -> Weights:
    by = sum((place + 1) * (token + 1) for place, token in enumerate(text)) % len(weights)
    return weights[by:] + weights[:by]
