"""Medusa heads: several tokens guessed independently from one hidden state of the target.

Head i, from 0, reads the state of the last token that the target has read and predicts the token i
+ 2 positions after it. The token one position after it is the pending one, so head 0 predicts the
first token of a draft:

    x = norm(h);  x += silu(W_j x + b_j) for each of its blocks j;  logits = head_i x

The norm is the target's last one. A head without a matrix of its own uses the target's. Cai et al.
2024, "Medusa" (arXiv 2401.10774), sections 2.1 and 2.2. Cost: one pass of B rows over the blocks,
and one of B times the number of heads over each last matrix. There is no memory to roll back.

Shapes:  B = sequences, H = heads, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.errors import CheckpointError
from outrider.core.spec import ModelSpec
from outrider.core.tree import Chances
from outrider.drafters.heads import NormedTarget, check_finite, own_kernels, placement_of
from outrider.kernels.plan import PackedLinear
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.json_object import JsonObject
from outrider.models.weights import WeightReader, Weights

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


HeadInit = Literal["tie", "copy", "random"]
_PREFIXES = ("", "medusa_head.")


@dataclass(frozen=True, slots=True)
class _Block:
    linear: PackedLinear
    bias_D: Tensor | None


@dataclass(frozen=True, slots=True)
class _Head:
    """One head. Without `last` it ends in the target's output matrix."""

    blocks: tuple[_Block, ...]
    last: PackedLinear | None


class MedusaNet:
    """Heads with their target, whose embedding-sized tables they share."""

    def __init__(self, target: NormedTarget, heads: tuple[_Head, ...]) -> None:
        self._target = target
        self._kernels = own_kernels(target)
        self._heads = heads
        self.num_heads = len(heads)
        self.hidden_layers = (target.spec.num_layers,)

    @torch.inference_mode()
    def logits(self, hidden_BD: Tensor, num_heads: int) -> Tensor:
        """Return float32 logits_HBV of the first heads, from the target's last residual."""
        heads = self._heads[:num_heads]
        x_BD = self._normed(hidden_BD.float().contiguous())
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

    def _normed(self, hidden_BD: Tensor) -> Tensor:
        out_BD = torch.empty_like(hidden_BD)
        eps = self._target.config.rms_norm_eps
        self._kernels.rms_norm(hidden_BD, self._target.tables.norm_D, eps, out_BD)
        return out_BD

    def _blocks(self, head: _Head, x_BD: Tensor) -> Tensor:
        for block in head.blocks:
            inner_BD = torch.empty_like(x_BD)
            self._kernels.linear(x_BD, block.linear, inner_BD)
            if block.bias_D is not None:
                inner_BD += block.bias_D
            x_BD = x_BD + functional.silu(inner_BD)
        return x_BD


def load_medusa(folder: Path, config: MedusaConfig, target: NormedTarget) -> MedusaNet:
    """Load heads. Raises CheckpointError for tensors that are missing, misshapen or no numbers."""
    with Weights.at(folder) as weights:
        reader = WeightReader(weights, own_kernels(target), placement_of(target))
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
) -> _Head:
    hidden, last = target.spec.hidden_size, f"{prefix}{config.num_layers}"
    blocks: list[_Block] = []
    for layer in range(config.num_layers):
        linear = {f"{prefix}{layer}.linear": hidden}
        has_bias = f"{prefix}{layer}.linear.bias" in reader
        blocks.append(_Block(reader.linear(linear, hidden), reader.bias(linear, present=has_bias)))
    own = f"{last}.weight" in reader
    matrix = reader.linear({last: target.spec.vocab_size}, hidden) if own else None
    return _Head(tuple(blocks), matrix)


def lite_heads(target: NormedTarget, *, num_heads: int = 2, init: HeadInit = "tie") -> MedusaNet:
    """Return untrained heads. A tied head repeats the target's guess of the pending token, so it is
    right where a token is repeated; random ones show the cost of useless heads. A copy only differs
    from a tie once it is trained.

    The lite heads need no training and no folder: their last matrix is the target's (tie), a copy
    of it (copy) or random, and they have no blocks.
    """
    if init != "random":
        return MedusaNet(target, (_Head((), None),) * num_heads)
    rng = torch.Generator().manual_seed(0)
    placement, pack = placement_of(target), own_kernels(target).pack
    shape = (target.spec.vocab_size, target.spec.hidden_size)
    heads: list[_Head] = []
    for _ in range(num_heads):
        matrix_VD = torch.randn(shape, generator=rng) / target.spec.hidden_size**0.5
        heads.append(_Head((), pack(matrix_VD.to(device=placement.device, dtype=placement.dtype))))
    return MedusaNet(target, tuple(heads))
