"""MTP blocks: a decoder layer over the target's embedding, hidden states and output head.

    x = W_eh [norm_e(embedding of the token), norm_h(state of the token before)]
    h = layer(x)        one decoder layer, with keys and values of its own
    logits = head(norm(h))

The state h, before the norm, is what the block reads when it drafts on. DeepSeek-V3 (arXiv
2412.19437), 2.2, equations 21 to 23; plugins/heads/hidden.py runs blocks and drafts with them.
Published tensors have names of three schemes:

    our folders, DeepSeek-V3          Qwen3-Next, Qwen3.5          speculators, MiMo: mtp_layers.N.
    model.layers.N.enorm              mtp.pre_fc_norm_embedding    token_layernorm
    model.layers.N.hnorm              mtp.pre_fc_norm_hidden       hidden_layernorm
    model.layers.N.eh_proj            mtp.fc                       input_proj
    model.layers.N.*, a layer         mtp.layers.N.*               *
    model.layers.N.shared_head.norm   mtp.norm                     final_layernorm

A folder of the speculators library has the block of a Qwen3, or that of Qwen3-Next or Qwen3.5.
MiMo's checkpoint has the block of a Qwen2, which reads the residual of the target, joins the state
before the token, and goes on from its own normed state, as its makers' code for vLLM does. That
code takes zeros for the embedding of a text's second token, which no training did; here it is read.
Qwen's blocks share everything but the layer, and their norms store the difference from 1. The
decoder layer within a block is that of the target's family, of the Llama line or with latent
attention, or a hybrid's attention layer, whose heads are scaled by a gate. The feed-forward net may
be a mixture of experts.

Shapes:  D = hidden size, N = packed tokens, A = heads x head size, T = positions, H = half of a
         head.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError, ContractError
from outrider.core.protocols import CausalLM, StepRow
from outrider.core.spec import ModelSpec
from outrider.drafters.common.growth import DraftSampler
from outrider.kernels.native.forward import Entrance
from outrider.kernels.operators import own_kernels
from outrider.kernels.plan import PackedLinear
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.configs import HybridConfig, LlamaConfig
from outrider.models.decoder import ModelCapacity
from outrider.models.families import (
    DELTA_FAMILIES,
    LLAMA_FAMILIES,
    MIMO,
    MIMO_BLOCKS,
    NUMBERED_MTP,
    parse_layered,
    parse_llama,
)
from outrider.models.heads import HeadsToLoad, layer_part
from outrider.models.json_object import JsonObject
from outrider.models.llama import LayerOperators
from outrider.models.llama_weights import read_layer, read_norm
from outrider.models.rope import Turns, turns_of
from outrider.models.weights import DERIVED, EVERYTHING, TextNames, WeightReader, Weights
from outrider.plugins.heads.hidden import (
    BlockLayer,
    EntranceNet,
    HeadBlock,
    HeadLimits,
    HiddenDrafter,
    TargetStates,
    entrance_buffers,
)
from outrider.plugins.heads.passes import fused_head_drafts
from outrider.plugins.heads.target import (
    NormedTarget,
    check_finite,
    draft_head,
    normed_target,
    placement_of,
)

_log = logging.getLogger(__name__)

MODEL_TYPE = "outrider_mtp"
_DEPTH = "num_nextn_predict_layers"
_HYBRID_DEPTH = "mtp_num_hidden_layers"
_MAX_DEPTH = 8
_TRAIN = "choose a block that was trained for this very target, or train one: `outrider train mtp`"


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """Sizes of `block.num_layers` MTP blocks; the first is layer `first_layer` of the files.

    A folder of its own has `model_type` outrider_mtp, the block's sizes under the keys of a Llama
    config, `num_hidden_layers` as the number of blocks, and `block_type`, the block's family.
    Within a target's checkpoint the blocks lie after the last layer, as in DeepSeek-V3
    (`num_nextn_predict_layers`), or next to the model, as in Qwen3-Next and Qwen3.5
    (`mtp_num_hidden_layers`, 1 by default). Embedding and output head are the target's.

    With `reads_normed` a block reads the target's state after the target's last norm, as published
    checkpoints were trained to; without it, the residual. With `gives_normed` a block goes on from
    its own state after its last norm, without it from its residual. It reads a text
    from token `first` on. With `state_first` the stored matrix joins the state before the token.
    """

    block: LlamaConfig | HybridConfig
    first_layer: int = 0
    reads_normed: bool = False
    gives_normed: bool = False
    first: int = 0
    state_first: bool = False

    @property
    def depth(self) -> int:
        return self.block.num_layers


def read_mtp_config(folder: Path, target: ModelSpec) -> MtpConfig:
    """Read a folder's config. Raises CheckpointError for a file that is wrong, that has no MTP
    block, or whose block is another target's."""
    raw = open_checkpoint(folder).document(CONFIG)
    family = raw.text("model_type", "")
    if family == MODEL_TYPE:
        config = _own(raw)
    elif raw.has(_SPECULATORS):
        config = _of_speculators(raw)
    elif family in DELTA_FAMILIES:
        config = _next_to_hybrid(raw)
    else:
        config = _after_layers(raw)
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
    of_block = JsonObject(raw.where, {**raw.values, "model_type": family})
    if family in DELTA_FAMILIES:
        return _next_to_hybrid(of_block)
    if family not in LLAMA_FAMILIES:
        raise CheckpointError(
            f"{raw.where}: block_type {family!r} is not known; "
            f"it can be {', '.join((*LLAMA_FAMILIES, *DELTA_FAMILIES))}.",
            hint=_TRAIN,
        )
    block = parse_llama(of_block)
    return MtpConfig(block=block, reads_normed=raw.flag("reads_normed", default=False))


def _of_speculators(raw: JsonObject) -> MtpConfig:
    """Return the config of a block that was taken out of a target, or trained like those."""
    layer = layer_part(raw)
    of_block = JsonObject(raw.where, {**layer.values, "num_nextn_predict_layers": 1})
    if layer.text("model_type") in DELTA_FAMILIES:
        return replace(_next_to_hybrid(of_block), first=1)
    block = replace(parse_llama(of_block), num_layers=1, layers=())
    return MtpConfig(block=block, reads_normed=True, gives_normed=True, first=1)


def _after_layers(raw: JsonObject) -> MtpConfig:
    if raw.text("model_type") not in NUMBERED_MTP or not raw.has(_DEPTH):
        raise CheckpointError(
            f"{raw.where} names no MTP block: it has no {_DEPTH}.",
            hint="name a folder of heads with --draft, or train a block: `outrider train mtp`",
        )
    layers = parse_llama(raw)
    # The window is that of the model's layers; the block sees all tokens of a text.
    block = replace(layers, num_layers=raw.integer(_DEPTH), layers=(), sparse_layers=())
    if layers.family == MIMO:
        return MtpConfig(block=block, gives_normed=True, first=1, state_first=True)
    return MtpConfig(block=block, first_layer=layers.num_layers, reads_normed=True)


def _next_to_hybrid(raw: JsonObject) -> MtpConfig:
    text = raw.child("text_config") or raw
    depth = text.integer(_HYBRID_DEPTH, text.integer(_DEPTH, 1))
    block = replace(cast("HybridConfig", parse_layered(raw)), num_layers=depth)
    return MtpConfig(block=block, reads_normed=True, gives_normed=True)


def config_values(config: MtpConfig) -> dict[str, object]:
    """Return the `config.json` of a block's own folder, if its positions are not stretched."""
    block = config.block
    if not isinstance(block, LlamaConfig):
        raise ContractError("block is no LlamaConfig")
    if block.rope.kind != "default":
        raise CheckpointError(
            f"an MTP block of positions stretched by {block.rope.kind!r} cannot be a folder.",
            hint="train it for a target whose rope_scaling is the default",
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


@dataclass(frozen=True, slots=True)
class _BlockNames(TextNames):
    """Names that begin with `stem`, of speculators or MiMo, for those of both other schemes."""

    stem: str = ""

    def stored(self, name: str) -> str:
        found = _SCHEMES.match(name)
        if found is None:
            return name
        part = name.removeprefix(found[0])
        for plain, own in _PARTS:
            if part.startswith(plain):
                part = own + part.removeprefix(plain)
        return f"{self.stem}{found[1] or found[2] or 0}.{part}"


_SPECULATORS = "speculators_model_type"
_OWN_BLOCKS = "mtp_layers."
_SCHEMES = re.compile(r"(?:model\.layers\.(\d+)|mtp(?:\.layers\.(\d+))?)\.")
_PARTS = (
    ("enorm.", "token_layernorm."),
    ("hnorm.", "hidden_layernorm."),
    ("eh_proj.", "input_proj."),
    ("shared_head.norm.", "final_layernorm."),
    ("pre_fc_norm_embedding.", "token_layernorm."),
    ("pre_fc_norm_hidden.", "hidden_layernorm."),
    ("fc.", "input_proj."),
    ("norm.", "final_layernorm."),
)
# Copies of the target's tables, which some checkpoints hold.
_COPIES = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")


# A block's layer, the matrix that joins token and state, the norms of a token, of a state and at
# the end.
_Part = tuple[BlockLayer, PackedLinear, tuple[Tensor, Tensor, Tensor]]


def read_blocks(
    folder: Path,
    config: MtpConfig,
    target: NormedTarget,
    capacity: ModelCapacity,
    num_ids: int = 0,
) -> list[HeadBlock]:
    """Read the blocks, which draft the first `num_ids` ids (0: all). Raises CheckpointError for
    tensors that are missing or of another shape."""
    num_positions = capacity.num_positions(config.block.max_tokens)
    turns = turns_of(config.block, num_positions, placement_of(target).device)
    with Weights.at(folder) as weights:
        is_folder = f"{_OWN_BLOCKS}0.input_proj.weight" in weights
        is_mimo = not is_folder and config.state_first
        stem = MIMO_BLOCKS if is_mimo else _OWN_BLOCKS if is_folder else ""
        names = _BlockNames(stem=stem) if stem else None
        kernels = own_kernels(target.kernels)
        reader = WeightReader(weights, kernels, placement_of(target), text=names)
        if isinstance(config.block, HybridConfig):
            parts = _gated_parts(folder, reader, config.block, turns)
        else:
            first, last_D = config.first_layer, target.tables.norm_D
            indices = range(first, first + config.depth)
            sparse = [n for n in indices if f"model.layers.{n}.mlp.gate.weight" in reader]
            block = replace(config.block, sparse_layers=tuple(sparse))
            operators = LayerOperators(block, turns)
            order = _joining_order(config)
            parts = [_llama_part(reader, operators, index, last_D, order) for index in indices]
        is_hybrid = isinstance(config.block, HybridConfig)
        if is_folder or not (is_hybrid or is_mimo or config.first_layer):
            weights.check_all_taken(ignored=(*DERIVED, *_COPIES))
    return [_block(part, config, target, capacity, num_ids) for part in parts]


def _block(
    part: _Part,
    config: MtpConfig,
    target: NormedTarget,
    capacity: ModelCapacity,
    num_ids: int,
) -> HeadBlock:
    layer, join, (token_norm_D, state_norm_D, norm_D) = part
    tables, size = target.tables, config.block.hidden_size
    head, ids_W = draft_head(target, num_ids)
    return HeadBlock(
        config=config.block,
        layers=(layer,),
        entrance=Entrance(
            token_norm_D=token_norm_D,
            state_norm_D=state_norm_D,
            join=join,
            gives_normed=config.gives_normed,
            **entrance_buffers(capacity, size, placement_of(target).device),
        ),
        states=TargetStates(
            layers=(target.spec.num_layers,),
            norms=(tables.norm_D,) if config.reads_normed else (),
            eps=target.config.rms_norm_eps,
        ),
        embedding_VD=tables.embedding,
        head=head,
        norm_D=norm_D,
        ids_W=ids_W,
    )


def _joining_order(config: MtpConfig) -> slice | Tensor:
    """Return the columns of the stored joining matrix, those of the token first."""
    size = config.block.hidden_size
    return torch.arange(2 * size).roll(size) if config.state_first else EVERYTHING


def _llama_part(
    reader: WeightReader,
    operators: LayerOperators,
    index: int,
    last_D: Tensor,
    order: slice | Tensor,
) -> _Part:
    """Read a block, whose joining matrix has its columns in this order. GGUF files with latents may
    lack its last norm; then it is the target's."""
    config, prefix = operators.config, f"model.layers.{index}."
    enorm, hnorm = (
        reader.vector(f"{prefix}{name}.weight", config.hidden_size) for name in ("enorm", "hnorm")
    )
    own = f"{prefix}shared_head.norm.weight"
    shared = config.latent is not None and own not in reader
    norm = last_D if shared else reader.vector(own, config.hidden_size)
    size = config.hidden_size
    join = reader.linear({f"{prefix}eh_proj": size}, 2 * size, columns=order)
    return BlockLayer(operators, read_layer(reader, config, index)), join, (enorm, hnorm, norm)


def _gated_parts(
    folder: Path, reader: WeightReader, config: HybridConfig, turns: Turns
) -> list[_Part]:
    """Read blocks that share all but the layer. Raises CheckpointError if there are none."""
    if "mtp.fc.weight" not in reader:
        raise CheckpointError(
            f"{folder}: this hybrid has no MTP block: the files have no mtp.fc.weight.",
            hint="conversions often leave it out, and the original repository may have it; "
            "--drafter ngram needs none",
        )
    layers = tuple(range(config.num_layers))
    sparse = tuple(n for n in layers if f"mtp.layers.{n}.mlp.gate.weight" in reader)
    config = replace(config, attention_layers=layers, sparse_layers=sparse)
    size = config.hidden_size
    join = reader.linear({"mtp.fc": size}, 2 * size)
    enorm, hnorm, norm = (
        read_norm(reader, config, f"mtp.{name}", size)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    )
    operators = LayerOperators(config, turns)
    read = [read_layer(reader, config, index, stem="mtp.") for index in layers]
    return [(BlockLayer(operators, layer), join, (enorm, hnorm, norm)) for layer in read]


def load_mtp(
    folder: Path,
    config: MtpConfig,
    target: NormedTarget,
    capacity: ModelCapacity,
    num_ids: int = 0,
) -> tuple[EntranceNet, ...]:
    """Load the blocks, each with memory of its own, which draft the first `num_ids` ids (0: all).
    Raises CheckpointError for tensors that are missing, of another shape or not numbers."""
    place = placement_of(target)
    blocks = read_blocks(folder, config, target, capacity, num_ids)
    nets = tuple(
        EntranceNet(block, own_kernels(target.kernels), place, capacity) for block in blocks
    )
    check_finite(folder, torch.stack([_probe(net, target) for net in nets]), "MTP block")
    return nets


def _probe(net: EntranceNet, target: NormedTarget) -> Tensor:
    """Return logits after two tokens, of shape V: they depend on every weight."""
    states_PD = torch.ones(2, target.spec.hidden_size, device=placement_of(target).device)
    net.state.open(0, ())
    try:
        row = StepRow.chain(0, (0, 0), logits_from=1)
        return net.step([row], states_PD).logits_MV[0].clone()
    finally:
        net.state.close(0)


def mtp_drafter(
    heads: HeadsToLoad,
    target: CausalLM,
    sampler: DraftSampler,
    *,
    chunk: int,
    batch_size: int,
    num_ids: int = 0,
) -> HiddenDrafter:
    """Return a drafter with MTP blocks, of the first `num_ids` ids (0: all); it drafts trees only
    with a single block.

    Raises CheckpointError for a block that is damaged or another target's, ConfigError for a target
    that shares no tables.
    """
    host = normed_target(target)
    config = read_mtp_config(heads.folder, target.spec)
    nets = load_mtp(heads.folder, config, host, heads.capacity, num_ids)
    window, wanted = config.block.max_tokens, target.spec.max_tokens
    if window < wanted:
        _log.warning(
            "The MTP block has %d positions and the target %d: nothing is drafted beyond.",
            window,
            wanted,
        )
    limits = HeadLimits(
        chunk=min(chunk, heads.capacity.max_rows),
        reach=max(heads.capacity.max_rows // batch_size, 1),
        window=min(window, wanted),
        first=config.first,
    )
    fused = None
    if len(nets) == 1:
        fused = fused_head_drafts(nets[0].native, nets[0].fuse, sampler, batch_size=batch_size)
    elif sampler.branches:
        _log.warning("%d MTP blocks take turns in a path: chains are drafted, no trees.", len(nets))
        sampler = replace(sampler, branches=False)
    return HiddenDrafter("mtp", nets, sampler, limits, fused)
