"""Config of MTP (multi-token prediction) blocks: where they are published, and how many there are.

A folder of its own has `model_type` outrider_mtp, the block's sizes under the keys of a Llama
config, `num_hidden_layers` as the number of blocks, and `block_type`, the block's family. Within a
target's checkpoint the blocks lie behind the last layer, as in DeepSeek-V3
(`num_nextn_predict_layers`), or beside the model, as in Qwen3-Next and Qwen3.5
(`mtp_num_hidden_layers`, 1 if unsaid). Embedding and output head are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.errors import CheckpointError, ContractError
from outrider.core.spec import ModelSpec
from outrider.models.families import LLAMA_FAMILIES, LlamaConfig, parse_llama
from outrider.models.json_object import JsonObject
from outrider.models.qwen_hybrid_config import (
    HYBRID_FAMILIES,
    QwenHybridConfig,
    parse_qwen_hybrid,
)

MODEL_TYPE = "outrider_mtp"
_DEPTH = "num_nextn_predict_layers"
_HYBRID_DEPTH = "mtp_num_hidden_layers"
_MAX_DEPTH = 8
_TRAIN = "choose a block that was trained for this very target, or train one: `outrider train mtp`"


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """`block.num_layers` is the number of blocks; the first is layer `first_layer` of the files.

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
