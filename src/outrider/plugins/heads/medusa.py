"""Medusa heads: several tokens guessed independently from one hidden state of the target.

Head i, from 0, reads the state of the last token that the target has read and predicts the token i
+ 2 positions after it. The token one position after it is the pending one, so head 0 predicts the
first token of a draft:

    x = norm(h);  x += silu(W_j x + b_j) for each of its blocks j;  logits = head_i x

The norm is the target's last one. A head without a matrix of its own uses the target's. Cai et al.
2024, "Medusa" (arXiv 2401.10774), sections 2.1 and 2.2. Cost: one pass of B rows over the blocks,
and one of B times the number of heads over each last matrix. There is no memory to roll back.

Shapes:  B = sequences, H = heads, K = positions, D = hidden size, V = vocabulary, R = ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from outrider.core.clock import host_floats, host_rows
from outrider.core.draft import Draft
from outrider.core.errors import CheckpointError, NumericsError, blaming
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.core.sampling import processed_probs, sharp_shares
from outrider.core.spec import ModelSpec
from outrider.core.tree import Chances, Shape, best_shape, chain_shape, guessed_chances
from outrider.drafters.common.context import BuildContext, Stateless
from outrider.drafters.common.growth import (
    DraftSampler,
    SampledNodes,
    chosen_tree,
    draft_some,
    drawn_params,
    last_state,
)
from outrider.estimate.cost import worthwhile
from outrider.kernels.operators import normed, own_kernels
from outrider.kernels.plan import PackedLinear
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.json_object import JsonObject
from outrider.models.weights import WeightReader, Weights
from outrider.plugins.heads.native_heads import HeadsShape, HeadWeights, NativeHeads, Step
from outrider.plugins.heads.target import NormedTarget, check_finite, placement_of

MODEL_TYPE = "medusa"
_OTHER_TARGET = "choose heads that were trained for this very target, or train some: "
_TRAIN = "`outrider train medusa`"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of Medusa heads: `num_layers` residual blocks a head. Uncounted `chances` are empty.

    The published form is a `config.json` with `medusa_num_heads` and `medusa_num_layers`, and
    `medusa_lm_head.safetensors` (or `model.safetensors`), with tensors `0.0.linear.weight`,
    `0.0.linear.bias`, `0.1.weight` (head, layer), or the same after the prefix `medusa_head.`.
    Outrider's own folders may leave out a head's last matrix, which is then the target's, and may
    add `tree_chances`: the ranks of text among candidates in training.
    """

    num_heads: int
    num_layers: int = 1
    chances: Chances = ()


def read_medusa_config(folder: Path, target: ModelSpec) -> MedusaConfig:
    """Read a folder's config. Raises CheckpointError for a wrong file or another target's."""
    values = open_checkpoint(folder).document(CONFIG)
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if values.has(key) and values.integer(key) != size:
            raise CheckpointError(
                f"{values.where}: the heads have {key} {values.integer(key)}, the target {size}.",
                hint=f"{_OTHER_TARGET}{_TRAIN}",
            )
    num_heads = values.integer("medusa_num_heads")
    return MedusaConfig(
        num_heads=num_heads,
        num_layers=values.integer("medusa_num_layers", 1),
        chances=_chances(values, num_heads),
    )


def config_values(config: MedusaConfig, target: ModelSpec) -> dict[str, object]:
    """Return the contents of `config.json`; chances are rounded to six digits, and none is 0."""
    return {
        "model_type": MODEL_TYPE,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "tree_chances": {
            str(head): [round(share, 6) for share in shares if share >= 1e-6]
            for head, shares in enumerate(config.chances)
        },
    }


def _chances(values: JsonObject, num_heads: int) -> Chances:
    stored = values.child("tree_chances")
    if stored is None:
        return ()
    chances = [stored.numbers(str(head)) for head in range(num_heads) if stored.has(str(head))]
    for shares in chances:
        if any(a < b for a, b in pairwise(shares)) or sum(shares) > 1.001:
            raise CheckpointError(
                f"{stored.where} must hold shares that do not rise, 1 at most in all.",
                hint="remove tree_chances; trees are then shaped by the heads' own distributions",
            )
    return chances if chances and chances[0] else ()


_PREFIXES = ("", "medusa_head.")


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head. Without `last` it ends in the target's output matrix."""

    blocks: tuple[Step, ...]
    last: PackedLinear | None


class MedusaNet:
    """Heads with their target, whose embedding-sized tables they share."""

    def __init__(self, target: NormedTarget, heads: tuple[MedusaHead, ...]) -> None:
        self._target = target
        self._kernels = own_kernels(target.kernels)
        self._heads = heads
        self.num_heads = len(heads)
        self.hidden_layers = (target.spec.num_layers,)

    @torch.inference_mode()
    def logits(self, hidden_BD: Tensor, num_heads: int) -> Tensor:
        """Return float32 logits_HBV of the first heads, from the target's last residual."""
        heads = self._heads[:num_heads]
        x_BD = self.normed(hidden_BD)
        x_HBD = torch.stack([self._blocks(head, x_BD) for head in heads])
        vocab_size = self._target.spec.vocab_size
        logits_HBV = x_BD.new_empty(len(heads), len(x_BD), vocab_size)
        shared = [index for index, head in enumerate(heads) if head.last is None]
        if len(shared) == len(heads):
            # One product reads the target's matrix once for all heads.
            rows_ND, out_NV = x_HBD.flatten(0, 1), logits_HBV.flatten(0, 1)
            self._kernels.linear(rows_ND, self._target.tables.head, out_NV)
            return logits_HBV
        for index, head in enumerate(heads):
            last = head.last or self._target.tables.head
            self._kernels.linear(x_HBD[index], last, logits_HBV[index])
        return logits_HBV

    def normed(self, hidden_BD: Tensor) -> Tensor:
        """Return the states that heads read."""
        eps = self._target.config.rms_norm_eps
        states_BD = hidden_BD.float().contiguous()
        return normed(self._kernels, states_BD, self._target.tables.norm_D, eps)

    def native(self, sampler: ParallelHeadSampler) -> NativeHeads | None:
        """Return a maker of drafts in one call; None without native kernels."""
        last = self._target.tables.head
        heads = [HeadWeights(head.last or last, steps=head.blocks) for head in self._heads]
        shape = HeadsShape(size=self._target.spec.hidden_size, trees=sampler)
        return NativeHeads.of(self._kernels, heads, shape, sampler.sampler)

    def _blocks(self, head: MedusaHead, x_BD: Tensor) -> Tensor:
        for step in head.blocks:
            x_BD = step.run(self._kernels, x_BD)
        return x_BD


def load_medusa(folder: Path, config: MedusaConfig, target: NormedTarget) -> MedusaNet:
    """Load heads. Raises CheckpointError for tensors that are missing, misshapen or no numbers."""
    with Weights.at(folder) as weights:
        reader = WeightReader(weights, own_kernels(target.kernels), placement_of(target))
        prefix = next((p for p in _PREFIXES if f"{p}0.0.linear.weight" in weights), "")
        num_heads = max(config.num_heads, _num_stored(weights.names, prefix))
        heads = [
            _read_head(reader, f"{prefix}{index}.", config, target) for index in range(num_heads)
        ]
        weights.check_all_taken()
    net = MedusaNet(target, tuple(heads))
    probe_BD = torch.ones(1, target.spec.hidden_size, device=placement_of(target).device)
    check_finite(folder, net.logits(probe_BD, net.num_heads)[:, 0], "head")
    return net


def _num_stored(names: Sequence[str], prefix: str) -> int:
    """Return the number of heads in the files. The first published heads are five, though their
    config.json says two."""
    numbers = {name.removeprefix(prefix).split(".")[0] for name in names}
    return sum(number.isdecimal() for number in numbers)


def _read_head(
    reader: WeightReader, prefix: str, config: MedusaConfig, target: NormedTarget
) -> MedusaHead:
    hidden, last = target.spec.hidden_size, f"{prefix}{config.num_layers}"
    blocks: list[Step] = []
    for layer in range(config.num_layers):
        linear = {f"{prefix}{layer}.linear": hidden}
        has_bias = f"{prefix}{layer}.linear.bias" in reader
        blocks.append(Step(reader.linear(linear, hidden), reader.bias(linear, present=has_bias)))
    own = f"{last}.weight" in reader
    matrix = reader.linear({last: target.spec.vocab_size}, hidden) if own else None
    return MedusaHead(tuple(blocks), matrix)


# Drafts of Medusa heads and block nets, which predict all positions at once and independently.
#
# Each position after the pending token has one distribution, the same below every node of its
# depth. Greedy trees are shaped by these distributions (`confident`) or by counts of how often text
# was found at each rank (`calibrated`). Drawn trees have a shape that was fixed before by these
# counts; siblings are drawn without replacement. A tree ends where nodes are worth too little, but
# fills the rows of a tile that is paid for anyway.
TreeKind = Literal["confident", "calibrated"]

_NUM_RANKS = 16
# A position's distribution is a mean over the unknown tokens before it, so its uncertainty is real:
# on the embedded target trees of 15 nodes have 1.44 tokens accepted a round at 1, 1.36 at 1.5, 1.33
# at 2.
_SHARPNESS = 1.0


@dataclass(frozen=True, slots=True)
class ParallelHeadSampler:
    """A maker of drafts from the logits of several positions, whose tokens `sampler` chooses.
    `chances` are those of calibrated trees; without any they are guessed."""

    sampler: DraftSampler
    trees: TreeKind = "confident"
    chances: Chances = ()

    @classmethod
    def of(
        cls, context: BuildContext, model_name: str, chances: Chances = ()
    ) -> ParallelHeadSampler:
        """Return the sampler of the heads `model_name`, with the tree shape of the settings."""
        trees = cast("TreeKind", context.config.tree_shape)
        return cls(context.sampler(model_name), trees, chances)

    def draft(self, row: DraftRow, logits_KV: Tensor) -> Draft:
        """Return a draft within the positions; the first one's logits are shaped in place.

        Raises NumericsError for logits that are no numbers.
        """
        _shape(row, logits_KV)
        branches = row.budget.size > row.budget.depth
        if row.params.greedy:
            if branches:
                return self._chosen(row, logits_KV)
            return Draft.chain(self.sampler.best(logits_KV.contiguous()))
        shape = self.drawn_shape(row, len(logits_KV))
        probs_KV = processed_probs(logits_KV, drawn_params(row), self.sampler.sampling)
        draw, leftover = self.sampler.draw_for(row.params), self.sampler.sampling.leftover
        nodes = SampledNodes(shape, row.rng, draw, leftover)
        for position in shape.depths:
            nodes.grow(probs_KV[position])
        return nodes.draft()

    def drawn_shape(self, row: DraftRow, num_positions: int) -> Shape:
        """Return the shape of a drawn chain or tree."""
        if row.budget.size <= row.budget.depth:
            return chain_shape(num_positions)
        best = best_shape(self._counted(num_positions), row.budget.size)
        return worthwhile(best, row.budget.price)

    def num_ranks(self, row: DraftRow, num_ids: int) -> int:
        """Return the number of candidates of a position of a greedy tree."""
        return min(_NUM_RANKS, row.budget.size, num_ids)

    def ranked(
        self, row: DraftRow, ids: Sequence[Sequence[int]], shares: Sequence[Sequence[float]]
    ) -> Draft:
        """Return a greedy tree, or chain, of candidates and their probabilities."""
        if row.budget.size <= row.budget.depth:
            return Draft.chain([own[0] for own in ids])
        chances = shares
        if self.trees != "confident":
            # What a mask left no share is not drafted: a call names no tokens for it.
            pairs = zip(self._counted(len(ids)), shares, strict=False)
            chances = [
                [chance if share > 0 else 0.0 for chance, share in zip(own, found, strict=False)]
                for own, found in pairs
            ]
        shape = worthwhile(best_shape(chances, row.budget.size), row.budget.price)
        return chosen_tree(shape, ids)

    def _chosen(self, row: DraftRow, logits_KV: Tensor) -> Draft:
        best_KR, ids_KR = logits_KV.topk(self.num_ranks(row, logits_KV.shape[-1]))
        if bool(best_KR.isnan().any()):
            raise NumericsError(self.sampler.model_name)
        shares_KR = sharp_shares(best_KR, logits_KV, _SHARPNESS)
        shares = [host_floats(shares_R) for shares_R in shares_KR]
        return self.ranked(row, host_rows(ids_KR), shares)

    def _counted(self, num_positions: int) -> Chances:
        """Return chances of as many positions; guessed if none were counted."""
        chances = self.chances or guessed_chances(num_positions)
        return chances[:num_positions]


def _shape(row: DraftRow, logits_KV: Tensor) -> None:
    """Shape the first position's logits as the target's will be there. The tokens before later
    positions are not known yet."""
    if row.shaper is not None:
        with blaming(row.seq_id), torch.inference_mode():
            logits_KV[0].copy_(row.shaper.shape(logits_KV[:1], row.tokens, [()])[0])


class ParallelDrafter(Stateless):
    """A base of drafters that predict all positions at once, `most` of them. They draft nothing
    before the target has read all but the pending token, that is, in a text's first round."""

    def __init__(
        self, sampler: ParallelHeadSampler, most: int, hidden_layers: tuple[int, ...]
    ) -> None:
        self._sampler, self._most = sampler, most
        self.needs = DraftNeeds(hidden_layers=hidden_layers)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return draft_some(rows, [self._depth(row) for row in rows], self._drafts)

    def _depth(self, row: DraftRow) -> int:
        """Return a draft's depth; 0 before the target has read all but the pending token."""
        if row.hidden is None or not 0 < len(row.tokens) - 1 <= row.hidden.length:
            return 0
        return min(row.budget.depth, self._most)

    def _drafts(self, rows: Sequence[DraftRow]) -> Sequence[Draft]:
        depths = [row.budget.depth for row in rows]
        return [
            self._sampler.draft(row, logits_KV) if len(logits_KV) else Draft.empty()
            for row, logits_KV in zip(rows, self._guesses(rows, depths), strict=True)
        ]

    def _guesses(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        """Return logits_KV of each row, at most as deep as its draft."""
        raise NotImplementedError


class Heads(Protocol):
    """Heads that predict several positions at once from one state of the target (medusa.py)."""

    @property
    def num_heads(self) -> int: ...
    @property
    def hidden_layers(self) -> tuple[int, ...]: ...
    def logits(self, hidden_BD: Tensor, num_heads: int) -> Tensor:
        """Return logits_HBV of the first `num_heads` heads."""
        ...


class MedusaDrafter(ParallelDrafter):
    """A drafter with Medusa heads. They read the state of the last token that the target has read,
    so predictions do not depend on the pending token; the more random it is, the worse."""

    def __init__(self, heads: Heads, sampler: ParallelHeadSampler, *, name: str = "medusa") -> None:
        super().__init__(sampler, heads.num_heads, heads.hidden_layers)
        self._heads, self.name = heads, name
        self._native: NativeHeads | None = None
        if isinstance(heads, MedusaNet):
            self._native = heads.native(sampler)

    def _drafts(self, rows: Sequence[DraftRow]) -> Sequence[Draft]:
        made: Sequence[Draft] | None = None
        if self._native is not None and isinstance(self._heads, MedusaNet):
            states_BD = torch.stack([last_state(row) for row in rows])
            made = self._native(rows, self._heads.normed(states_BD))
        return super()._drafts(rows) if made is None else made

    def _guesses(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        states_BD = torch.stack([last_state(row) for row in rows])
        logits_HBV = self._heads.logits(states_BD, max(depths))
        return [logits_HBV[:depth, index] for index, depth in enumerate(depths)]
