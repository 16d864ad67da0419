"""Config and tensors of published MTP blocks, under both naming schemes.

    folders of our own, DeepSeek-V3         Qwen3-Next, Qwen3.5
    model.layers.N.enorm                    mtp.pre_fc_norm_embedding
    model.layers.N.hnorm                    mtp.pre_fc_norm_hidden
    model.layers.N.eh_proj                  mtp.fc
    model.layers.N.*, a decoder layer       mtp.layers.N.*
    model.layers.N.shared_head.norm         mtp.norm

Qwen's blocks share all but the layer, and their norms hold the difference from 1. The decoder layer
within a block is that of the Llama family, or a hybrid's attending layer, whose heads are scaled by
a gate and whose feed-forward net may be a mixture of experts.

Shapes:  D = hidden size, N = packed tokens, A = heads x head size, T = positions, H = half of a
         head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError, ContractError
from outrider.core.spec import ModelSpec
from outrider.drafters.heads import NormedTarget, own_kernels, placement_of
from outrider.kernels.native.forward import LayerWeights
from outrider.kernels.plan import PackedLinear, PackedPlan
from outrider.kernels.reference.delta import by_row
from outrider.kernels.registry import Kernels
from outrider.models.decoder import Scratch
from outrider.models.families import LLAMA_FAMILIES, LlamaConfig, parse_llama
from outrider.models.json_object import JsonObject
from outrider.models.llama import read_layer
from outrider.models.qwen_hybrid_config import HYBRID_FAMILIES, QwenHybridConfig, parse_qwen_hybrid
from outrider.models.qwen_hybrid_weights import (
    AttentionWeights,
    DenseWeights,
    HybridLayer,
    HybridReader,
    mix,
)
from outrider.models.weights import DERIVED, WeightReader, Weights

MODEL_TYPE = "outrider_mtp"
_DEPTH = "num_nextn_predict_layers"
_HYBRID_DEPTH = "mtp_num_hidden_layers"
_MAX_DEPTH = 8
_TRAIN = "choose a block that was trained for this very target, or train one: `outrider train mtp`"


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """`block.num_layers` is the number of blocks; the first is layer `first_layer` of the files.

    A folder of its own has `model_type` outrider_mtp, the block's sizes under the keys of a Llama
    config, `num_hidden_layers` as the number of blocks, and `block_type`, the block's family.
    Within a target's checkpoint the blocks lie behind the last layer, as in DeepSeek-V3
    (`num_nextn_predict_layers`), or beside the model, as in Qwen3-Next and Qwen3.5
    (`mtp_num_hidden_layers`, 1 if unsaid). Embedding and output head are the target's.

    With `reads_normed` a block reads the target's state after the target's last norm, as published
    checkpoints were trained to; without it, the residual. With `gives_normed` a block goes on from
    its own state after its last norm, without it from its residual.
    """

    block: LlamaConfig | QwenHybridConfig
    first_layer: int = 0
    reads_normed: bool = False
    gives_normed: bool = False

    @property
    def depth(self) -> int:
        return self.block.num_layers


def read_mtp_config(folder: Path, target: ModelSpec) -> MtpConfig:
    """Raises CheckpointError for a file that is wrong, that has no MTP block, or whose block is
    another target's."""
    raw = JsonObject.read(folder / "config.json")
    family = raw.text("model_type")
    if family == MODEL_TYPE:
        config = _own(raw)
    elif family in HYBRID_FAMILIES:
        config = _beside_hybrid(raw)
    else:
        config = _behind_layers(raw)
    if config.depth > _MAX_DEPTH:
        raise CheckpointError(
            f"{raw.where}: {config.depth} MTP blocks are more than the {_MAX_DEPTH} that are "
            "supported.",
            hint=_TRAIN,
        )
    sizes = (
        ("hidden_size", config.block.hidden_size, target.hidden_size),
        ("vocab_size", config.block.vocab_size, target.vocab_size),
    )
    for key, own, wanted in sizes:
        if own != wanted:
            raise CheckpointError(
                f"{raw.where}: the MTP block has {key} {own}, the target {wanted}.", hint=_TRAIN
            )
    return config


def _own(raw: JsonObject) -> MtpConfig:
    family = raw.text("block_type", "llama")
    if family not in LLAMA_FAMILIES:
        raise CheckpointError(
            f"{raw.where}: block_type {family!r} is not known; "
            f"it can be {', '.join(LLAMA_FAMILIES)}.",
            hint=_TRAIN,
        )
    block = parse_llama(JsonObject(raw.where, {**raw.values, "model_type": family}))
    return MtpConfig(block=block, reads_normed=raw.flag("reads_normed", default=False))


def _behind_layers(raw: JsonObject) -> MtpConfig:
    if raw.text("model_type") not in LLAMA_FAMILIES or not raw.has(_DEPTH):
        raise CheckpointError(
            f"{raw.where} names no MTP block: it has no {_DEPTH}.",
            hint="name a folder of heads with --draft, or train a block: `outrider train mtp`",
        )
    layers = parse_llama(raw)
    block = replace(layers, num_layers=raw.integer(_DEPTH))
    return MtpConfig(block=block, first_layer=layers.num_layers, reads_normed=True)


def _beside_hybrid(raw: JsonObject) -> MtpConfig:
    text = raw.child("text_config") or raw
    depth = text.integer(_HYBRID_DEPTH, text.integer(_DEPTH, 1))
    block = replace(parse_qwen_hybrid(raw), num_layers=depth)
    return MtpConfig(block=block, reads_normed=True, gives_normed=True)


def config_values(config: MtpConfig) -> dict[str, object]:
    """The `config.json` of a folder of its own, for a block whose positions are not stretched."""
    block = config.block
    if not isinstance(block, LlamaConfig):
        raise ContractError("block is no LlamaConfig")
    if block.rope.kind != "default":
        raise CheckpointError(
            f"an MTP block of positions stretched by {block.rope.kind!r} cannot be a folder.",
            hint="train it beside a target whose rope_scaling is the default",
        )
    return {
        "model_type": MODEL_TYPE,
        "block_type": block.family,
        "vocab_size": block.vocab_size,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.ffn_size,
        "num_hidden_layers": block.num_layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "max_position_embeddings": block.max_tokens,
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": block.rope.theta,
        "reads_normed": config.reads_normed,
    }


Turns = tuple[Tensor, Tensor]


class BlockLayer(Protocol):
    def run(
        self, kernels: Kernels, turns: Turns, plan: PackedPlan, scratch: Scratch,
        kv: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Add the layer to `scratch.x_ND`; `turns` are the tables (cos_TH, sin_TH)."""
        ...

    @property
    def native(self) -> LayerWeights | None:
        """What a native pass is told of the layer; None if it has no such pass."""
        ...


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """BlockLayer of the Llama family."""

    config: LlamaConfig
    weights: LayerWeights

    @property
    def native(self) -> LayerWeights:
        return self.weights

    def run(
        self, kernels: Kernels, turns: Turns, plan: PackedPlan, scratch: Scratch,
        kv: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        self._attend(kernels, turns, plan, scratch, kv)
        layer, eps = self.weights, self.config.rms_norm_eps
        kernels.rms_norm(scratch.x_ND, layer.ffn_norm_D, eps, scratch.norm_ND)
        kernels.linear(scratch.norm_ND, layer.gate_up, scratch.up_NU)
        _add(scratch.up_NU, layer.gate_up_bias_2F)
        kernels.silu_mul(scratch.up_NU, scratch.activated_NF)
        kernels.linear(scratch.activated_NF, layer.down, scratch.x_ND, accumulate=True)
        _add(scratch.x_ND, layer.down_bias_D)

    def _attend(
        self, kernels: Kernels, turns: Turns, plan: PackedPlan, scratch: Scratch,
        kv: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        config, layer, qkv_NE = self.config, self.weights, scratch.qkv_NE
        kernels.rms_norm(scratch.x_ND, layer.attention_norm_D, config.rms_norm_eps, scratch.norm_ND)
        kernels.linear(scratch.norm_ND, layer.qkv, qkv_NE)
        _add(qkv_NE, layer.qkv_bias_E)
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            kernels.head_norm(
                qkv_NE, layer.q_norm_H, layer.k_norm_H, config.num_kv_heads, config.rms_norm_eps
            )
        kernels.rope_append(qkv_NE, *turns, plan, *kv)
        kernels.attention(qkv_NE, *kv, plan, config.head_dim**-0.5, scratch.attended_NA)
        kernels.linear(scratch.attended_NA, layer.out, scratch.x_ND, accumulate=True)
        _add(scratch.x_ND, layer.out_bias_D)


@dataclass(frozen=True, slots=True)
class GatedLayer:
    """BlockLayer of Qwen3-Next and Qwen3.5."""

    config: QwenHybridConfig
    weights: HybridLayer

    @property
    def native(self) -> None:
        return None

    def run(
        self, kernels: Kernels, turns: Turns, plan: PackedPlan, scratch: Scratch,
        kv: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        eps, feed = self.config.rms_norm_eps, self.weights.ffn
        kernels.rms_norm(scratch.x_ND, self.weights.mixer_norm_D, eps, scratch.norm_ND)
        self._attend(kernels, turns, plan, scratch, kv)
        kernels.rms_norm(scratch.x_ND, self.weights.ffn_norm_D, eps, scratch.norm_ND)
        if not isinstance(feed, DenseWeights):
            scratch.x_ND.add_(mix(kernels, feed, scratch.norm_ND))
            return
        kernels.linear(scratch.norm_ND, feed.gate_up, scratch.up_NU)
        kernels.silu_mul(scratch.up_NU, scratch.activated_NF)
        kernels.linear(scratch.activated_NF, feed.down, scratch.x_ND, accumulate=True)

    def _attend(
        self, kernels: Kernels, turns: Turns, plan: PackedPlan, scratch: Scratch,
        kv: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        config, mixer, qkv_NE = self.config, self.weights.mixer, scratch.qkv_NE
        if not isinstance(mixer, AttentionWeights):
            raise ContractError("mixer is no AttentionWeights")
        gate_NA = torch.empty_like(scratch.attended_NA)
        kernels.linear(scratch.norm_ND, mixer.qkv, qkv_NE)
        kernels.linear(scratch.norm_ND, mixer.gate, gate_NA)
        kernels.head_norm(
            qkv_NE, mixer.q_norm_H, mixer.k_norm_H, config.num_kv_heads, config.rms_norm_eps
        )
        kernels.rope_append(qkv_NE, *turns, plan, *kv)
        kernels.attention(qkv_NE, *kv, plan, config.head_dim**-0.5, scratch.attended_NA)
        scratch.attended_NA.mul_(by_row(torch.sigmoid, gate_NA))
        kernels.linear(scratch.attended_NA, mixer.out, scratch.x_ND, accumulate=True)


def _add(x_NO: Tensor, bias_O: Tensor | None) -> None:
    if bias_O is not None:
        x_NO.add_(bias_O)


# Copies of the target's tables, which some checkpoints hold.
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Norms are float32. `join` goes from embedding and state, side by side, to the residual."""

    token_norm_D: Tensor
    state_norm_D: Tensor
    join: PackedLinear
    layer: BlockLayer
    norm_D: Tensor


def read_blocks(folder: Path, config: MtpConfig, target: NormedTarget) -> Sequence[BlockWeights]:
    """Raises CheckpointError for tensors that are missing or of another shape."""
    with Weights(folder) as weights:
        reader = WeightReader(weights, own_kernels(target), placement_of(target))
        match config.block:
            case QwenHybridConfig():
                return _read_gated(reader, config.block)
            case LlamaConfig():
                indices = range(config.first_layer, config.first_layer + config.depth)
                blocks = [_read_llama(reader, config.block, index) for index in indices]
        if config.first_layer == 0:
            weights.check_all_taken(ignored=(*DERIVED, *_COPIES))
    return blocks


def _read_llama(reader: WeightReader, config: LlamaConfig, index: int) -> BlockWeights:
    prefix, size = f"model.layers.{index}.", config.hidden_size
    return BlockWeights(
        token_norm_D=reader.vector(f"{prefix}enorm.weight", size),
        state_norm_D=reader.vector(f"{prefix}hnorm.weight", size),
        join=reader.linear({f"{prefix}eh_proj": size}, 2 * size),
        layer=LlamaLayer(config, read_layer(reader, config, index)),
        norm_D=reader.vector(f"{prefix}shared_head.norm.weight", size),
    )


def _read_gated(reader: WeightReader, config: QwenHybridConfig) -> list[BlockWeights]:
    layers = tuple(range(config.num_layers))
    sparse = tuple(n for n in layers if f"mtp.layers.{n}.mlp.gate.weight" in reader)
    config = replace(config, attention_layers=layers, sparse_layers=sparse)
    names, size = HybridReader(reader, config, "mtp."), config.hidden_size
    shared = BlockWeights(
        token_norm_D=names.norm("pre_fc_norm_embedding", size),
        state_norm_D=names.norm("pre_fc_norm_hidden", size),
        join=reader.linear({"mtp.fc": size}, 2 * size),
        layer=GatedLayer(config, names.layer(0)),
        norm_D=names.norm("norm", size),
    )
    later = [GatedLayer(config, names.layer(index)) for index in layers[1:]]
    return [shared, *(replace(shared, layer=layer) for layer in later)]
