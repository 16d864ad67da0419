"""Drafters for tests: scripted trees with honest distributions, and drafters that misbehave.

None has state, so each may be opened, closed and skipped at will.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.core.rng import Role

NO_NEEDS = DraftNeeds()


@dataclass(frozen=True, slots=True)
class RowDrafter:
    """Drafts each row by itself with `draft`; of trees it makes `num_nodes` nodes."""

    draft: Callable[[DraftRow], Draft]
    name: str = "double"
    needs: DraftNeeds = NO_NEEDS
    num_nodes: int = 0

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [self.draft(row) for row in rows]

    def close(self, seq_id: int) -> None: ...


def row_random(row: DraftRow, salt: int = 0) -> random.Random:
    """Choices that depend on the text alone, so a repeated run repeats them."""
    return random.Random(hash((salt, *row.tokens)))


def random_chains(vocab_size: int) -> RowDrafter:
    """Nonsense of any allowed length, declared as chosen deterministically."""

    def draft(row: DraftRow) -> Draft:
        rng = row_random(row)
        depth = rng.randint(0, row.budget.depth)
        return Draft.chain([rng.randrange(vocab_size) for _ in range(depth)])

    return RowDrafter(draft)


def random_trees(vocab_size: int, *, num_nodes: int = 4) -> RowDrafter:
    """Random trees whose nodes are drawn from random soft distributions, which are reported."""

    def draft(row: DraftRow) -> Draft:
        rng = row_random(row)
        parents: list[int] = []
        depths = [0]
        for node in range(num_nodes):
            open_nodes = [n for n in range(-1, node) if depths[n + 1] < row.budget.depth]
            parents.append(rng.choice(open_nodes))
            depths.append(depths[parents[-1] + 1] + 1)
        distributions = [_random_distribution(rng, vocab_size) for _ in parents]
        tokens = [row.rng.pick(probs_V, n, Role.DRAFT) for n, probs_V in enumerate(distributions)]
        return Draft(tuple(tokens), tuple(parents), torch.stack(distributions))

    return RowDrafter(draft, num_nodes=num_nodes)


def _random_distribution(rng: random.Random, vocab_size: int) -> Tensor:
    weights = [rng.choice([0, 1, 2, 5]) for _ in range(vocab_size)]
    weights[rng.randrange(vocab_size)] += 1
    weights_V = torch.tensor(weights, dtype=torch.float64)
    return weights_V / weights_V.sum()


def oracle(
    text: Sequence[int], vocab_size: int, wrong_at: Callable[[int], bool] = lambda place: False
) -> RowDrafter:
    """Knows the whole text; errs at the places (counted from the prompt's start) it is told to."""

    def draft(row: DraftRow) -> Draft:
        start = len(row.tokens)
        places = range(start, min(start + row.budget.depth, len(text)))
        wanted = [(text[p] + wrong_at(p)) % vocab_size for p in places]
        # Past the known end anything goes: the round is about to stop there.
        return Draft.chain(wanted + [0] * (row.budget.depth - len(wanted)))

    return RowDrafter(draft)


EMPTY = RowDrafter(lambda row: Draft.empty())
REPEATS_LAST = RowDrafter(lambda row: Draft.chain([row.tokens[-1]] * row.budget.depth))
# Continues the text as it was some tokens ago, as a drafter that lost count would.
OUT_OF_STEP = RowDrafter(lambda row: Draft.chain(list(row.tokens[-5:][: row.budget.depth])))
OVER_LONG = RowDrafter(lambda row: Draft.chain([0] * (row.budget.depth + 1)))
NEGATIVE_ID = RowDrafter(lambda row: Draft.chain([-1]))


def unknown_id(vocab_size: int) -> RowDrafter:
    return RowDrafter(lambda row: Draft.chain([vocab_size]))


@dataclass(frozen=True, slots=True)
class WrongCount:
    """Returns a draft more, or fewer, than it was asked for."""

    extra: int
    name: str = "double"
    needs: DraftNeeds = NO_NEEDS

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft.empty()] * (len(rows) + self.extra)

    def close(self, seq_id: int) -> None: ...


def foreign_distribution(vocab_size: int) -> RowDrafter:
    """Reports distributions over a vocabulary of another size."""
    return RowDrafter(lambda row: Draft.chain([0], torch.ones(1, vocab_size + 2) / vocab_size))
