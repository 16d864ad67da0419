"""MTP blocks for a frozen target: the recipe of `outrider train mtp`.

What a block does in the engine it does here, for all places of a window at once. Draft number s of
a round whose pending token is at p comes from block min(s, n - 1) at place p + s. Up to the last
block's turn a block reads the whole text alike, causally. Beyond it the last block goes on by
itself: at place e it has text up to e - r, read as ever, and r places that were read with its own
states. So in its r-th turn a query sees the keys of its first turn up to e - r, and one key of each
later turn: what EAGLE-3 calls training-time test (Li et al. 2025, arXiv 2503.01840, 3.2).

The loss is the divergence of all turns' distributions from the target's. Distributions are compared
over the ids that make up most of the text, since the output head is most of the arithmetic.
Embedding and output head are the target's and stay as they are. Blocks begin as the target's last
layer where they have its shapes. A hybrid's one block is a layer that attends, reads what the
target's last norm gives, and begins as the block in the target's files if they have one.

Shapes:  B = windows of a batch, T = tokens, D = hidden size, V = vocabulary, G = heads,
         H = head size, W = ids that are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import ConfigError
from outrider.models.configs import HybridConfig, LlamaConfig
from outrider.models.weights import Weights
from outrider.plugins.heads.mtp import MODEL_TYPE, MtpConfig, config_values
from outrider_lab.train.hybrid_module import MtpBlock
from outrider_lab.train.llama_module import (
    Heads,
    RotaryTables,
    TrainedLlamaLayer,
    divergence,
    initialise,
    later,
    take_all,
)
from outrider_lab.train.loop import Batch
from outrider_lab.train.recipe import DrafterRecipe, M, of_session
from outrider_lab.train.session import Session
from outrider_lab.train.shapes import attending_sizes, config_json, plain_layers
from outrider_lab.train.target import FrozenTarget, accepted_drafts
from outrider_lab.train.tokens import Windows, covering_ids, digest_of_ids

# Batches that a fit reads, at most.
_FITTED = 32
# Of the text's tokens, those whose ids are compared.
_COVERED = 0.97
# Of the mean square of what is read: keeps the fit steady where inputs say the same.
_RIDGE = 1e-3


class SharedHead(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class MtpLayer(TrainedLlamaLayer):
    """A decoder layer behind the matrix that joins token and state; names as in checkpoints."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.enorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = SharedHead(config)

    def pair(self, embedded_BTD: Tensor, states_BTD: Tensor) -> Tensor:
        return torch.cat([self.enorm(embedded_BTD), self.hnorm(states_BTD)], dim=-1)

    def turn(
        self, embedded_BTD: Tensor, states_BTD: Tensor, turns: RotaryTables, kept: list[Heads]
    ) -> Tensor:
        """The block's states in its next turn; `kept` has keys and values of its turns so far."""
        return self(self.eh_proj(self.pair(embedded_BTD, states_BTD)), turns, kept)


class TrainedMtpBlocks(nn.Module):
    def __init__(self, config: LlamaConfig, num_positions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MtpLayer(config) for _ in range(config.num_layers))
        self.turns = RotaryTables(config, num_positions)


class Mtp(nn.Module):
    """All blocks. Its state has the names and shapes of the files that drafter mtp reads."""

    def __init__(self, config: LlamaConfig, num_positions: int) -> None:
        super().__init__()
        self.model = TrainedMtpBlocks(config, num_positions)

    def forward(self, embedded_BTD: Tensor, last_BTD: Tensor, num_turns: int) -> list[Tensor]:
        """What the output head reads in each turn. `last_BTD` are the target's residuals."""
        layers = cast("Sequence[MtpLayer]", self.model.layers)
        states_BTD, kept = last_BTD, list[Heads]()
        found: list[Tensor] = []
        for number in range(num_turns):
            layer = layers[min(number, len(layers) - 1)]
            if number < len(layers):
                kept = []
            states_BTD = layer.turn(embedded_BTD, later(states_BTD, 1), self.model.turns, kept)
            found.append(layer.shared_head.norm(states_BTD))
        return found


class GatedMtp(nn.Module):
    """A hybrid's block. Its state has the names and shapes of the files that drafter mtp reads."""

    def __init__(self, config: HybridConfig, num_positions: int) -> None:
        super().__init__()
        self.mtp = MtpBlock(config)
        self.turns = RotaryTables(attending_sizes(config), num_positions)

    def forward(self, embedded_BTD: Tensor, states_BTD: Tensor, num_turns: int) -> list[Tensor]:
        """As `Mtp`; `states_BTD` are what the target's last norm gives."""
        return self.mtp(embedded_BTD, states_BTD, self.turns, num_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsRecipe(DrafterRecipe[M]):
    """Each place is learned in `num_turns` turns. Distributions are compared over `ids_W`, in
    rising order; None is all ids. `block` has the sizes."""

    name: str = field(default="mtp", init=False)
    block: LlamaConfig | HybridConfig
    num_turns: int
    ids_W: Tensor | None = None

    @property
    def choices(self) -> Mapping[str, object]:
        block = self.block
        return {
            "sizes": [block.hidden_size, block.ffn_size, block.num_heads, block.num_layers],
            "turns": self.num_turns,
            "ids": None if self.ids_W is None else digest_of_ids(self.ids_W),
        }

    def loss(self, module: M, batch: Batch) -> Tensor:
        last_BTD = self.target.read(batch.ids_BT).last_BTD
        wanted_BTW = self.target.logits(last_BTD, self.ids_W)
        head_WD = self.target.head_of(self.ids_W)
        found = self._turns(module, batch.ids_BT, last_BTD, self.num_turns)
        return divergence((functional.linear(own_BTD, head_WD) for own_BTD in found), wanted_BTW)

    def accepted(self, module: M, ids_T: Tensor, k: int) -> Tensor:
        found = self._turns(module, ids_T[None], self.target.read(ids_T[None]).last_BTD, k)
        head_VD = self.target.head
        chosen = (functional.linear(own_1TD[0], head_VD).argmax(-1) for own_1TD in found)
        return accepted_drafts(ids_T, chosen)

    def read_of(self, last_BTD: Tensor) -> Tensor:
        """What blocks read of the target's last residuals."""
        return last_BTD

    def _turns(self, module: M, ids_BT: Tensor, last_BTD: Tensor, count: int) -> list[Tensor]:
        embedded_BTD = functional.embedding(ids_BT, self.target.embedding)
        return module(embedded_BTD.float(), self.read_of(last_BTD).float(), count)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpRecipe(TurnsRecipe[Mtp]):
    """`block.num_layers` blocks, with a turn for each at least. Of `text` the first windows are
    what blocks begin with; without it they begin as noise."""

    block: LlamaConfig
    text: Windows | None = None

    def build(self, generator: torch.Generator) -> Mtp:
        net = Mtp(self.block, self.longest)
        initialise(net, generator, num_layers=self.block.num_layers)
        if self.text is not None:
            self._begin(net, self.text)
        return net

    def values(self, module: Mtp) -> Mapping[str, object]:
        del module
        return config_values(MtpConfig(block=self.block))

    def _begin(self, net: Mtp, text: Windows) -> None:
        """All blocks alike: the states that the first hands on are what it was fitted to read."""
        # No window is read twice.
        steps = range(max(1, min(_FITTED, text.num_windows // text.batch_size)))
        for layer in cast("Sequence[MtpLayer]", net.model.layers):
            if fits_last_layer(layer, self.target):
                batches = (text.batch(step, self.target.device).ids_BT for step in steps)
                begin_as_last_layer(layer, self.target, batches)
                with torch.no_grad():
                    layer.shared_head.norm.weight.copy_(self.target.norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMtpRecipe(TurnsRecipe[GatedMtp]):
    block: HybridConfig

    def build(self, generator: torch.Generator) -> GatedMtp:
        net = GatedMtp(self.block, self.longest)
        initialise(net, generator, num_layers=1)
        with Weights.at(self.target.folder) as weights:
            if "mtp.fc.weight" in weights:
                take_all(net, weights)
        return net

    def read_of(self, last_BTD: Tensor) -> Tensor:
        return self.target.normed(last_BTD)

    def values(self, module: GatedMtp) -> Mapping[str, object]:
        del module
        sizes = config_json(self.block, self.dtype)
        return {**sizes, "model_type": MODEL_TYPE, "block_type": sizes["model_type"]}


def fits_last_layer(layer: MtpLayer, target: FrozenTarget) -> bool:
    """Whether the layer has all weights of the target's last one, in its shapes."""
    own = {name: parameter.shape for name, parameter in layer.named_parameters()}
    return all(own.get(name) == one.shape for name, one in _last_layer(target).named_parameters())


def begin_as_last_layer(layer: MtpLayer, target: FrozenTarget, batches: Iterable[Tensor]) -> None:
    """Sets all but the layer's own norms; each of `batches` is ids_BT that the fit reads.

    What a target's last layer reads at a token is largely a linear function of what a block reads
    there: the token's embedding, and the target's last residual of the token before. Least squares
    find that function. Behind it the last layer does what it does in the target, and the block's
    states are close to the target's residuals, which is what it reads where it drafts on by itself.
    """
    with torch.no_grad():
        layer.eh_proj.weight.copy_(_joined(layer, target, batches))
        own = dict(layer.named_parameters())
        for name, parameter in _last_layer(target).named_parameters():
            own[name].copy_(parameter)


def _joined(layer: MtpLayer, target: FrozenTarget, batches: Iterable[Tensor]) -> Tensor:
    """The matrix whose products are closest to the residuals that the last layer reads."""
    num_out, num_in = layer.eh_proj.weight.shape
    square = torch.zeros(num_in, num_in, dtype=torch.float64)
    cross = torch.zeros(num_in, num_out, dtype=torch.float64)
    for ids_BT in batches:
        reading = target.read(ids_BT, (target.config.num_layers - 1,))
        embedded_BTD = functional.embedding(ids_BT.to(target.device), target.embedding)
        pair_BTE = layer.pair(embedded_BTD[:, 1:].float(), reading.last_BTD[:, :-1].float())
        read_PE = pair_BTE.flatten(0, 1).double().cpu()
        square += read_PE.T @ read_PE
        cross += read_PE.T @ reading.hidden_BTKD[:, 1:, 0].flatten(0, 1).double().cpu()
    ridge = torch.eye(num_in, dtype=torch.float64) * square.diagonal().mean() * _RIDGE
    linalg = cast("Any", torch.linalg)
    found: Tensor = linalg.solve(square + ridge, cross)
    return found.T.to(layer.eh_proj.weight)


def _last_layer(target: FrozenTarget) -> nn.Module:
    return target.net.model.layers[-1]


def mtp_recipe(
    session: Session, *, num_blocks: int, num_turns: int, dtype: str
) -> TurnsRecipe[Any]:
    """Blocks with the sizes of the target's layers. Raises ConfigError if a block has no turn, for
    more than one block of a hybrid, and for one whose positions are stretched."""
    if num_turns < num_blocks:
        raise ConfigError(
            f"{num_blocks} blocks cannot learn in {num_turns} turns: each has one of its own.",
            hint=f"use --turns {num_blocks} or more",
        )
    target = session.target.config
    windows = session.text.windows()
    ids_W = covering_ids(windows.ids, target, _COVERED).to(session.target.device)
    common: dict[str, Any] = {**of_session(session, dtype), "num_turns": num_turns, "ids_W": ids_W}
    if isinstance(target, HybridConfig):
        return GatedMtpRecipe(**common, block=block_beside(target, num_blocks))
    return MtpRecipe(**common, block=plain_layers(target, num_blocks), text=windows)


def block_beside(target: HybridConfig, num_blocks: int) -> HybridConfig:
    if num_blocks > 1:
        raise ConfigError(
            "the block of a hybrid is one layer, which goes on from its own states.",
            hint="leave --blocks at 1",
        )
    if target.rope.kind != "default":
        raise ConfigError(
            f"an MTP block of positions stretched by {target.rope.kind!r} cannot be a folder.",
            hint="train it beside a target whose rope_scaling is the default",
        )
    delta = replace(target.delta, num_layers=0)
    return replace(target, num_layers=1, attention_layers=(0,), delta=delta)
