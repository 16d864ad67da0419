"""Block net: drafts several positions in one pass, each with a confidence; its config and tensors.

The input is the last C tokens, each as the target's states with the token that follows it (for the
last, the pending token). One query a position attends to them and to all queries:

    c_j = fuse [norm(h_j), norm(e_(j+1))] + distance_j         h_j: all captured layers, one by one
    x_k = query_k + c_last
    per layer:  x += out(attention(q(norm(x)), kv([c, norm(x)])));  x += down(silu(gate) * up)
    logits_k = target's head of norm(x_k);  confidence_k = sigmoid(w norm(x_k) + b)

The norms of h, e and c have no weights. Confidence k is the probability that position k is right if
all before it were. Positions do not see each other's tokens, so a distribution is the same on every
path. Cost: one pass of B times K rows over a few layers, and of C rows over `fuse` and keys. The
context is read anew each round, so there is no memory to roll back.

Shapes:  B = sequences, C = context tokens, K = positions, L = captured layers, D = hidden size,
         V = vocabulary, H = heads, E = head size, T = keys (C + K), R = rows, F = FFN size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.clock import host_floats
from outrider.core.errors import CheckpointError, ContractError, given
from outrider.core.protocols import DraftRow
from outrider.core.spec import ModelSpec
from outrider.kernels.operators import Kernels, own_kernels
from outrider.kernels.plan import PackedLinear
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.weights import WeightReader, Weights
from outrider.plugins.heads.medusa import ParallelDrafter, ParallelHeadSampler
from outrider.plugins.heads.target import NormedTarget, check_finite, placement_of

MODEL_TYPE = "outrider_block"


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Sizes of a block net. `num_places` positions are predicted in one pass, from the states of
    `hidden_layers` of the last `num_context` tokens. Hidden size and vocabulary are the target's.

    A folder has `config.json` with `model_type` outrider_block and these sizes, and
    `model.safetensors` with the tensors that `load_block` names. The format is Outrider's own.
    """

    num_places: int
    num_context: int
    num_layers: int
    num_heads: int
    ffn_size: int
    hidden_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_places <= 0:
            raise ContractError("a block drafts one token or more")
        if self.num_context <= 0:
            raise ContractError("a block reads one token or more")


def read_block_config(folder: Path, target: ModelSpec) -> BlockConfig:
    """Read a folder's config. Raises CheckpointError for a wrong file or another target's."""
    values = open_checkpoint(folder).document(CONFIG)
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if values.integer(key) != size:
            raise CheckpointError(
                f"{values.where}: the net has {key} {values.integer(key)}, the target {size}.",
                hint="a block net shares tables with the one target that it was trained for",
            )
    config = BlockConfig(
        num_places=values.integer("num_places"),
        num_context=values.integer("num_context"),
        num_layers=values.integer("num_layers"),
        num_heads=values.integer("num_heads"),
        ffn_size=values.integer("ffn_size"),
        hidden_layers=values.integers("hidden_layers") or (target.num_layers,),
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
    )
    if target.hidden_size % config.num_heads:
        raise CheckpointError(
            f"{values.where}: {target.hidden_size} channels cannot be shared among "
            f"num_heads={config.num_heads}."
        )
    return config


def config_values(config: BlockConfig, target: ModelSpec) -> dict[str, object]:
    """Return the contents of `config.json`."""
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    return {"model_type": MODEL_TYPE, **sizes, **asdict(config)}


@dataclass(frozen=True, slots=True)
class BlockContext:
    """Input of one sequence's prediction: states of its last tokens, at most C, and the token that
    follows each, the pending one last."""

    hidden_CLD: Tensor
    next_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Guess:
    logits_BKV: Tensor
    confidence_BK: Tensor


@dataclass(frozen=True, slots=True)
class _BlockLayer:
    attention_norm_D: Tensor
    q: PackedLinear
    kv: PackedLinear
    out: PackedLinear
    ffn_norm_D: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class _Parts:
    fuse: PackedLinear
    distances_CD: Tensor
    queries_KD: Tensor
    layers: tuple[_BlockLayer, ...]
    norm_D: Tensor
    confidence_D: Tensor
    confidence_bias: Tensor


class BlockNet:
    """A block net with its target, whose embedding and output matrix it shares."""

    def __init__(
        self, target: NormedTarget, config: BlockConfig, parts: _Parts, kernels: Kernels
    ) -> None:
        self.config, self.hidden_layers = config, config.hidden_layers
        self._target, self._parts, self._kernels = target, parts, kernels
        self._ones_D = torch.ones_like(parts.norm_D)

    @property
    def num_context(self) -> int:
        return self.config.num_context

    @property
    def num_places(self) -> int:
        return self.config.num_places

    @torch.inference_mode()
    def guess(self, contexts: list[BlockContext], num_places: int) -> Guess:
        """Predict the first `num_places` positions; all attend to each other."""
        context_BCD, absent_BC = self._contexts(contexts)
        x_BKD = self._parts.queries_KD + context_BCD[:, -1:]
        keys_BCD = self._normed(context_BCD, self._ones_D)
        for layer in self._parts.layers:
            x_BKD = self._attend(layer, x_BKD, keys_BCD, absent_BC)
            x_BKD = self._feed(layer, x_BKD)
        x_BKD = self._normed(x_BKD[:, :num_places], self._parts.norm_D)
        confidence_BK = (x_BKD * self._parts.confidence_D).sum(-1) + self._parts.confidence_bias
        logits_BKV = self._linear(x_BKD, self._target.tables.head)
        return Guess(logits_BKV, confidence_BK.sigmoid())

    def _contexts(self, contexts: list[BlockContext]) -> tuple[Tensor, Tensor]:
        """Return what the queries read, the last token last, and its padding."""
        size = self.config.num_context
        embedding_VD = self._target.tables.embeddings
        fused_BCD: list[Tensor] = []
        absent_BC = torch.zeros(len(contexts), size, dtype=torch.bool, device=embedding_VD.device)
        for index, context in enumerate(contexts):
            ids = torch.tensor(context.next_ids, device=embedding_VD.device)
            read_CLD = torch.cat(
                [context.hidden_CLD.float(), embedding_VD[ids].float()[:, None]], dim=1
            )
            fused_CD = self._linear(
                self._normed(read_CLD, self._ones_D).flatten(1), self._parts.fuse
            )
            missing = size - len(fused_CD)
            absent_BC[index, :missing] = True
            fused_CD = fused_CD + self._parts.distances_CD[missing:]
            fused_BCD.append(functional.pad(fused_CD, (0, 0, missing, 0)))
        return torch.stack(fused_BCD), absent_BC

    def _attend(
        self, layer: _BlockLayer, x_BKD: Tensor, keys_BCD: Tensor, absent_BC: Tensor
    ) -> Tensor:
        y_BKD = self._normed(x_BKD, layer.attention_norm_D)
        q_BKD = self._linear(y_BKD, layer.q)
        kv_BTD2 = self._linear(torch.cat([keys_BCD, y_BKD], dim=1), layer.kv)
        k_BTD, v_BTD = (part.contiguous() for part in torch.chunk(kv_BTD2, 2, dim=-1))
        seen_BT = functional.pad(~absent_BC, (0, x_BKD.shape[1]), value=True)
        attended_BHKE = functional.scaled_dot_product_attention(
            self._heads(q_BKD), self._heads(k_BTD), self._heads(v_BTD), seen_BT[:, None, None]
        )
        merged_BKD = attended_BHKE.transpose(1, 2).flatten(2)
        return x_BKD + self._linear(merged_BKD, layer.out)

    def _feed(self, layer: _BlockLayer, x_BKD: Tensor) -> Tensor:
        y_BKD = self._normed(x_BKD, layer.ffn_norm_D)
        gate_BKF, up_BKF = torch.chunk(self._linear(y_BKD, layer.gate_up), 2, dim=-1)
        return x_BKD + self._linear(functional.silu(gate_BKF) * up_BKF, layer.down)

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:-1], self.config.num_heads, -1).transpose(1, 2)

    def _normed(self, x: Tensor, weight_D: Tensor) -> Tensor:
        """Normalise rows of any leading shape."""
        rows_RD = x.flatten(0, -2).contiguous()
        out_RD = torch.empty_like(rows_RD)
        self._kernels.rms_norm(rows_RD, weight_D, self.config.rms_norm_eps, out_RD)
        return out_RD.view(x.shape)

    def _linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Multiply rows of any leading shape."""
        rows = x.flatten(0, -2).contiguous()
        out = rows.new_empty(len(rows), packed.num_out)
        self._kernels.linear(rows, packed, out)
        return out.view(*x.shape[:-1], packed.num_out)


def load_block(folder: Path, config: BlockConfig, target: NormedTarget) -> BlockNet:
    """Load a net. Raises CheckpointError for tensors that are missing, misshapen or not numbers."""
    kernels, hidden = own_kernels(target.kernels), target.spec.hidden_size
    with Weights.at(folder) as weights:
        reader = WeightReader(weights, kernels, placement_of(target))
        num_read = (len(config.hidden_layers) + 1) * hidden
        parts = _Parts(
            fuse=reader.linear({"fuse": hidden}, num_read),
            distances_CD=reader.vector("distances.weight", config.num_context, hidden),
            queries_KD=reader.vector("queries.weight", config.num_places, hidden),
            layers=tuple(
                _read_layer(reader, f"layers.{index}.", config, hidden)
                for index in range(config.num_layers)
            ),
            norm_D=reader.vector("norm.weight", hidden),
            confidence_D=reader.vector("confidence.weight", 1, hidden)[0],
            confidence_bias=reader.vector("confidence.bias", 1),
        )
        weights.check_all_taken()
    net = BlockNet(target, config, parts, kernels)
    probe_CLD = torch.ones(1, len(config.hidden_layers), hidden, device=parts.norm_D.device)
    guess = net.guess([BlockContext(probe_CLD, (0,))], config.num_places)
    answers_KV = torch.cat([guess.logits_BKV[0], guess.confidence_BK[0, :, None]], dim=-1)
    check_finite(folder, answers_KV, "position")
    return net


def _read_layer(reader: WeightReader, prefix: str, config: BlockConfig, hidden: int) -> _BlockLayer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return _BlockLayer(
        attention_norm_D=reader.vector(f"{prefix}input_layernorm.weight", hidden),
        q=reader.linear({f"{attention}q_proj": hidden}, hidden),
        kv=reader.linear({f"{attention}k_proj": hidden, f"{attention}v_proj": hidden}, hidden),
        out=reader.linear({f"{attention}o_proj": hidden}, hidden),
        ffn_norm_D=reader.vector(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(
            {f"{mlp}gate_proj": config.ffn_size, f"{mlp}up_proj": config.ffn_size}, hidden
        ),
        down=reader.linear({f"{mlp}down_proj": hidden}, config.ffn_size),
    )


class Block(Protocol):
    """A net that predicts positions from the states of a few tokens."""

    @property
    def num_places(self) -> int: ...
    @property
    def num_context(self) -> int: ...
    @property
    def hidden_layers(self) -> tuple[int, ...]: ...
    def guess(self, contexts: list[BlockContext], num_places: int) -> Guess: ...


class BlockDrafter(ParallelDrafter):
    """A drafter with a block net. A chain is as long as the product of confidences stays above the
    threshold `least`; 0 never ends a draft early. Distributions and confidences are known before
    the first token is drawn, so the end of a draft is independent of the drawn tokens."""

    name = "block"

    def __init__(self, net: Block, sampler: ParallelHeadSampler, *, least: float = 0.0) -> None:
        super().__init__(sampler, net.num_places, net.hidden_layers)
        self._net, self._least = net, least

    def _guesses(self, rows: Sequence[DraftRow], depths: Sequence[int]) -> list[Tensor]:
        guess = self._net.guess([self._context(row) for row in rows], max(depths))
        sure = [
            num_sure(host_floats(confidence_K[:depth]), self._least)
            for confidence_K, depth in zip(guess.confidence_BK, depths, strict=True)
        ]
        return [logits_KV[:n] for logits_KV, n in zip(guess.logits_BKV, sure, strict=True)]

    def _context(self, row: DraftRow) -> BlockContext:
        end = len(row.tokens) - 1
        start = max(end - self._net.num_context, 0)
        following = tuple(row.tokens[start + 1 : end + 1])
        return BlockContext(given(row.hidden, "hidden state").read(start, end), following)


def num_sure(confidences: Sequence[float], least: float) -> int:
    """Return the number of positions before the product of confidences falls below `least`."""
    product = 1.0
    for count, confidence in enumerate(confidences):
        product *= confidence
        if product < least:
            return count
    return len(confidences)
