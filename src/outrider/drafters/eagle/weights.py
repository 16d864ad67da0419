"""Tensors of published EAGLE heads, packed as the layer multiplies by them.

The names are those of the EAGLE project: `fc`, `layers.0` (1 and 2) or `midlayer` (3), `norm`,
`lm_head`, `d2t`. Some files leave out the embedding, which is then the target's. Drafts are made by
the loop that EAGLE and MTP share (drafters/hidden.py).

Shapes:  V = vocabulary, W = ids that are drafted, D = hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.core.errors import CheckpointError, VocabularyError
from outrider.drafters.eagle.config import EagleConfig, read_eagle_config
from outrider.drafters.eagle.net import EagleHead, EagleLayer, EagleNet, EagleParts, native_pass
from outrider.drafters.heads import NormedTarget, own_kernels, placement_of
from outrider.kernels.plan import PackedLinear
from outrider.models.heads import Heads, HeadTarget, head_memory
from outrider.models.rope import rope_tables
from outrider.models.weights import DERIVED, WeightReader, Weights

EMBEDDING = "embed_tokens"
# What follows from d2t.
_DERIVED = (*DERIVED, "t2d")


def load_eagle(heads: Heads, target: NormedTarget) -> EagleNet:
    """Raises CheckpointError, naming file and tensor, for heads that are incomplete, not of this
    target or not all numbers."""
    config = read_eagle_config(heads.folder, target.spec)
    place, kernels = placement_of(target), own_kernels(target)
    with Weights(heads.folder) as weights:
        _check_numbers(weights)
        reader = WeightReader(weights, kernels, place)
        num_states = len(heads.room.hidden_layers)
        layer = _layer(reader, config, num_states)
        head = _head(reader, weights, config, target)
        embedding_VD = _embedding(reader, target)
        weights.check_all_taken(ignored=_DERIVED)
    num_positions = heads.room.num_positions(target.spec.max_tokens)
    cos_TH, sin_TH = rope_tables(
        config.layer.rope, head_dim=config.layer.head_dim, num_positions=num_positions
    )
    parts = EagleParts(
        embedding_VD=embedding_VD,
        layer=layer,
        head=head,
        cos_TH=cos_TH.to(place.device),
        sin_TH=sin_TH.to(place.device),
        target_norm_D=target.tables.norm_D,
        target_eps=target.config.rms_norm_eps,
    )
    memory = head_memory(place.spec(config.layer), place, heads.room)
    return EagleNet(
        config,
        parts,
        kernels,
        memory,
        hidden_layers=heads.room.hidden_layers,
        native=native_pass(config, parts, kernels, memory, heads.room),
    )


def _layer(reader: WeightReader, config: EagleConfig, num_states: int) -> EagleLayer:
    sizes, fused = config.layer, config.fused
    hidden, ffn = sizes.hidden_size, sizes.ffn_size
    prefix = "midlayer." if "midlayer.self_attn.q_proj.weight" in reader else "layers.0."
    attended = sizes.num_heads * sizes.head_dim
    kv = sizes.num_kv_heads * sizes.head_dim
    outputs = {"q_proj": attended, "k_proj": kv, "v_proj": kv}
    qkv = {f"{prefix}self_attn.{name}": size for name, size in outputs.items()}
    gate_up = {f"{prefix}mlp.{name}": ffn for name in ("gate_proj", "up_proj")}

    def norm(name: str) -> Tensor:
        return reader.vector(f"{prefix}{name}.weight", hidden)

    return EagleLayer(
        fc=reader.linear({"fc": hidden}, (num_states if fused else 2) * hidden),
        fc_bias_D=reader.bias({"fc": hidden}, present="fc.bias" in reader),
        token_norm_D=norm("input_layernorm") if fused else None,
        state_norm_D=norm("hidden_norm") if fused else None,
        qkv=reader.linear(qkv, (2 if fused else 1) * hidden),
        out=reader.linear({f"{prefix}self_attn.o_proj": hidden}, attended),
        ffn_norm_D=norm("post_attention_layernorm"),
        gate_up=reader.linear(gate_up, hidden),
        down=reader.linear({f"{prefix}mlp.down_proj": hidden}, ffn),
    )


def _head(
    reader: WeightReader, weights: Weights, config: EagleConfig, target: HeadTarget
) -> EagleHead:
    if not config.fused:
        return EagleHead(target.tables.head)
    hidden, size = config.layer.hidden_size, config.draft_vocab_size
    weight: PackedLinear = target.tables.head
    if "lm_head.weight" in reader or size < target.spec.vocab_size:
        weight = reader.linear({"lm_head": size}, hidden)
    ids_W = _drafted_ids(weights, size, target) if "d2t" in weights else None
    if ids_W is None and size < target.spec.vocab_size:
        raise CheckpointError(
            f"{weights.folder}: these heads draft {size} of the target's {target.spec.vocab_size} "
            "ids, and the tensor d2t, which says which, is missing.",
            hint="is the download complete?",
        )
    return EagleHead(weight, reader.vector("norm.weight", hidden), ids_W)


def _drafted_ids(weights: Weights, size: int, target: HeadTarget) -> Tensor:
    ids_W = weights.take_integers("d2t", size) + torch.arange(size)
    if int(ids_W.min()) < 0 or int(ids_W.max()) >= target.spec.vocab_size:
        raise VocabularyError(
            f"{weights.folder}: d2t names ids outside the target's vocabulary of "
            f"{target.spec.vocab_size}.",
            hint="choose heads that were trained for this very target",
        )
    if len(set(host_ints(ids_W))) < size:
        raise VocabularyError(
            f"{weights.folder}: d2t names an id of the target twice.",
            hint="compare the file with the original and download it again",
        )
    return ids_W.to(target.tables.embedding_VD.device)


def _embedding(reader: WeightReader, target: HeadTarget) -> Tensor:
    """The target's table, unless the files hold one that differs."""
    table_VD = target.tables.embedding_VD
    name = f"{EMBEDDING}.weight"
    if name not in reader:
        return table_VD
    own_VD = reader.table(name, *table_VD.shape)
    return table_VD if torch.equal(own_VD, table_VD) else own_VD


def _check_numbers(weights: Weights) -> None:
    """A trained head that diverged would draft without ever being accepted; it is refused."""
    for name, tensor in weights.each():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{weights.folder}: the tensor {name} holds numbers that are none (NaN or "
                "infinity).",
                hint="take an earlier checkpoint, or train it anew with a lower learning rate",
            )
