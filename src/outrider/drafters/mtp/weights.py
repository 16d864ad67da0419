"""The tensors of MTP blocks, under the names of either way to publish them.

    folders of our own, DeepSeek-V3         Qwen3-Next, Qwen3.5
    model.layers.N.enorm                    mtp.pre_fc_norm_embedding
    model.layers.N.hnorm                    mtp.pre_fc_norm_hidden
    model.layers.N.eh_proj                  mtp.fc
    model.layers.N.*, a decoder layer       mtp.layers.N.*
    model.layers.N.shared_head.norm         mtp.norm

Qwen's blocks share all but the layer, and their norms hold the difference from 1.

Shapes:  D = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from outrider.drafters.beside import NormedTarget, own_kernels, placement_of
from outrider.drafters.mtp.config import MtpConfig
from outrider.drafters.mtp.layers import BlockLayer, GatedLayer, LlamaLayer
from outrider.kernels.plan import PackedLinear
from outrider.models.families import LlamaConfig
from outrider.models.llama import read_layer
from outrider.models.qwen_hybrid_config import QwenHybridConfig
from outrider.models.qwen_hybrid_weights import HybridReader
from outrider.models.weights import DERIVED, WeightReader, Weights

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
