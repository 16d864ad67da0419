"""Medusa heads for a frozen target: the recipe of `outrider train medusa`.

Head i sees the target's state of the token at p and is to say what the target says of the token at
p + 2 + i, having read the text up to there. The heads do not see the tokens between, so what they
learn is the mean of those distributions over how texts go on (Cai et al. 2024, arXiv 2401.10774,
2.2.1).

The folder also says at which ranks the target's greedy text was found on the held-out prompts:
calibrated trees are shaped by that.

Shapes:  B = windows of a batch, T = tokens, D = hidden size, V = vocabulary, P = places, R = ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.clock import host_ints
from outrider.core.tree import Chances, Shape, best_shape, falling
from outrider.plugins.heads.medusa import MedusaConfig, config_values
from outrider_lab.train.loop import Batch
from outrider_lab.train.losses import distillation, faded_mean, top_distributions
from outrider_lab.train.recipe import DrafterRecipe, of_session
from outrider_lab.train.session import Session

HeadInit = Literal["tie", "copy", "random"]

# Neighbouring places teach much the same, and a distribution over the vocabulary is most of the
# work: a head learns from every so many of a step's places, from others at the next step.
_STRIDE = 4
# Ids that are kept of a target's distribution, and ranks that are counted.
_NUM_KEPT = 16
_NUM_RANKS = 8
# Drafts of the tree that figures are of; with the pending token they fill a tile of rows.
_TREE_NODES = 15


class RankTally:
    """Counts at which rank among a drafter's candidates the text's own token stood.

    A place counts only where the text's tokens before it were candidates, so that products of
    chances are chances of paths.
    """

    def __init__(self, num_places: int, num_ranks: int) -> None:
        self._hits = [[0] * num_ranks for _ in range(num_places)]
        self._seen = [0] * num_places

    def note(self, ranks: Sequence[int | None]) -> None:
        """The ranks at places 0, 1, ... after one position of a text; None is none of those
        counted, and nothing behind it counts."""
        for place, rank in enumerate(ranks[: len(self._seen)]):
            self._seen[place] += 1
            if rank is None or rank >= len(self._hits[place]):
                return
            self._hits[place][rank] += 1

    def chances(self) -> Chances:
        """Shares, made not to rise with the rank: a few counts more of a later one are noise."""
        return [
            falling([hit / max(seen, 1) for hit in hits])
            for hits, seen in zip(self._hits, self._seen, strict=True)
        ]


class ResBlock(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Its state has the names and shapes of the published files. A head without a matrix of its
    own ends in the target's."""

    def __init__(self, config: MedusaConfig, last_VD: Tensor | None, hidden_size: int) -> None:
        super().__init__()
        for _ in range(config.num_heads):
            parts: list[nn.Module] = [ResBlock(hidden_size) for _ in range(config.num_layers)]
            if last_VD is not None:
                last = nn.Linear(hidden_size, len(last_VD), bias=False)
                with torch.no_grad():
                    last.weight.copy_(last_VD)
                parts.append(last)
            self.append(nn.Sequential(*parts))
        self._has_last = last_VD is not None

    def logits(self, head: int, x: Tensor, shared_VD: Tensor) -> Tensor:
        """Of head `head`, from normed states of any leading shape."""
        out = cast("Tensor", self[head](x))
        return out if self._has_last else functional.linear(out, shared_VD)


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaRecipe(DrafterRecipe[MedusaHeads]):
    name: str = field(default="medusa", init=False)
    config: MedusaConfig
    init: HeadInit = "tie"

    @property
    def choices(self) -> Mapping[str, object]:
        return {"heads": self.config.num_heads, "blocks": self.config.num_layers, "init": self.init}

    def build(self, generator: torch.Generator) -> MedusaHeads:
        last_VD = None
        if self.init == "copy":
            last_VD = self.target.head.float().cpu()
        elif self.init == "random":
            shape = (self.spec.vocab_size, self.spec.hidden_size)
            last_VD = torch.randn(shape, generator=generator) / self.spec.hidden_size**0.5
        return MedusaHeads(self.config, last_VD, self.spec.hidden_size)

    def loss(self, module: MedusaHeads, batch: Batch) -> Tensor:
        ids_BT = batch.ids_BT
        last_BTD = self.target.read(ids_BT).last_BTD
        distributions = top_distributions(self.target.logits(last_BTD).flatten(0, 1), _NUM_KEPT)
        normed_BTD, head_VD = self._normed(last_BTD), self.target.head.float()

        def divergence(head: int) -> Tensor:
            """The distribution after token p + 1 + i is that of the token behind it."""
            ahead, first = head + 1, (batch.step + head) % _STRIDE
            wanted = distributions.at(len(ids_BT), slice(ahead + first, None, _STRIDE))
            x_PD = normed_BTD[:, :-ahead][:, first::_STRIDE].flatten(0, 1)
            return distillation(module.logits(head, x_PD, head_VD), wanted)

        return faded_mean(map(divergence, range(self.config.num_heads)))

    def measure(self, module: MedusaHeads) -> Mapping[str, float]:
        """Of a chain, and of the best tree by the ranks that are seen here."""
        shape = best_shape(self.chances(module), _TREE_NODES)

        def in_tree(ids_T: Tensor, k: int) -> Tensor:
            del k
            return _accepted(self._ranks(module, ids_T), _paths(shape))

        chains = DrafterRecipe[MedusaHeads].measure(self, module)
        return {**chains, "tokens_per_round_of_trees": self.exam.tokens_per_round(in_tree)}

    def accepted(self, module: MedusaHeads, ids_T: Tensor, k: int) -> Tensor:
        """Of chains."""
        deepest = min(k, self.config.num_heads)
        return _accepted(self._ranks(module, ids_T), _chain_paths(deepest))

    def chances(self, module: MedusaHeads) -> Chances:
        """At which ranks the target's greedy text stands, on the held-out prompts."""
        tally = RankTally(self.config.num_heads, _NUM_RANKS)
        for text in self.exam.texts:
            ids_T = torch.tensor(text.ids, device=self.exam.device)
            for ranks in self._ranks(module, ids_T)[text.num_prompt - 1 :]:
                if ranks:
                    tally.note(ranks)
        return tally.chances()

    def values(self, module: MedusaHeads) -> Mapping[str, object]:
        with torch.no_grad():
            chances = self.chances(module)
        counted = MedusaConfig(self.config.num_heads, self.config.num_layers, chances)
        return config_values(counted, self.spec)

    def _ranks(self, module: MedusaHeads, ids_T: Tensor) -> list[list[int | None]]:
        """For each pending place, the rank of every token behind it among its head's candidates,
        to the end of the text; None is none of them."""
        normed_TD = self._normed(self.target.read(ids_T[None]).last_BTD)[0]
        by_head: list[list[int | None]] = []
        for head in range(self.config.num_heads):
            # Where token p is pending, the state is that of the token before it.
            wanted_P = ids_T[2 + head :]
            logits_PV = module.logits(head, normed_TD[: len(wanted_P)], self.target.head.float())
            best_PR = logits_PV.topk(_NUM_RANKS).indices
            by_head.append(_places(best_PR == wanted_P[:, None]))
        behind = [
            [ranks[place] for ranks in by_head if place < len(ranks)]
            for place in range(len(ids_T) - 1)
        ]
        return [[], *behind]

    def _normed(self, last_BTD: Tensor) -> Tensor:
        norm_D, eps = self.target.norm.float(), self.target.config.rms_norm_eps
        return functional.rms_norm(last_BTD.float(), norm_D.shape, norm_D, eps)


def _places(hit_PR: Tensor) -> list[int | None]:
    """Where each row is true, None if nowhere."""
    places_P = torch.where(hit_PR.any(-1), hit_PR.int().argmax(-1), -1)
    return [None if place < 0 else place for place in host_ints(places_P)]


def _chain_paths(depth: int) -> frozenset[tuple[int, ...]]:
    return frozenset((0,) * length for length in range(1, depth + 1))


def _paths(shape: Shape) -> frozenset[tuple[int, ...]]:
    """The ranks along the path to every node."""
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return frozenset(paths)


def _accepted(ranks: Sequence[Sequence[int | None]], paths: frozenset[tuple[int, ...]]) -> Tensor:
    """accepted_T: how far the text at each place runs through a tree of these `paths`."""
    accepted: list[int] = []
    for places in ranks:
        length = 0
        while length < len(places) and tuple(places[: length + 1]) in paths:
            length += 1
        accepted.append(length)
    return torch.tensor(accepted)


def medusa_recipe(
    session: Session, *, num_heads: int, num_layers: int, init: HeadInit, dtype: str
) -> MedusaRecipe:
    return MedusaRecipe(
        **of_session(session, dtype), config=MedusaConfig(num_heads, num_layers), init=init
    )
