"""Folders of published EAGLE heads: their config, their tensors, and whether they fit a target.

They call themselves a Llama of one layer, so the sizes of the layer are read as those of a Llama;
the `speculators` library puts them into `transformer_layer_config`. EAGLE 3 adds
`draft_vocab_size`, and some trainers `norm_before_residual`. Tensors have the names of the EAGLE
project: `fc`, `layers.0` (1 and 2) or `midlayer` (3), `norm`, `lm_head`, `d2t`. Some files leave
out the embedding, which is then the target's. V = vocabulary, W = ids that are drafted, D = hidden
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.core.errors import CheckpointError, VocabularyError
from outrider.core.spec import ModelSpec
from outrider.drafters.eagle.net import (
    EagleConfig,
    EagleHead,
    EagleLayer,
    EagleNet,
    EagleParts,
    native_pass,
)
from outrider.drafters.heads import NormedTarget, own_kernels, placement_of
from outrider.kernels.plan import PackedLinear
from outrider.models.families import LlamaConfig, parse_llama
from outrider.models.heads import HeadsToLoad, HeadTarget, head_memory, is_eagle3
from outrider.models.json_object import JsonObject
from outrider.models.rope import rope_tables
from outrider.models.weights import DERIVED, WeightReader, Weights

_OTHER_TARGET = (
    "choose heads that were trained for this very target, or train some: `outrider train eagle`"
)


def read_eagle_config(folder: Path, target: ModelSpec) -> EagleConfig:
    """Raises CheckpointError for a file that is wrong or says it belongs to another target, and
    VocabularyError if its ids mean other text."""
    raw = JsonObject.read(folder / "config.json")
    layer = parse_llama(_as_llama(raw))
    fused = is_eagle3(raw)
    _check_sizes(raw.where, layer, target)
    if layer.num_layers != 1:
        raise CheckpointError(
            f"{raw.where}: num_hidden_layers is {layer.num_layers}; EAGLE heads have one layer.",
            hint="is it a folder of heads? A draft model goes without --drafter eagle",
        )
    draft_vocab_size = raw.integer("draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > target.vocab_size:
        raise VocabularyError(
            f"{raw.where}: draft_vocab_size {draft_vocab_size} is above the target's vocabulary of "
            f"{target.vocab_size}.",
            hint=_OTHER_TARGET,
        )
    return EagleConfig(
        layer=layer,
        fused=fused,
        draft_vocab_size=draft_vocab_size if fused else target.vocab_size,
        norm_before_residual=raw.flag("norm_before_residual", default=False),
    )


def config_values(config: EagleConfig, hidden_layers: tuple[int, ...]) -> dict[str, object]:
    """What `config.json` holds for heads that were trained here."""
    layer = config.layer
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.ffn_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": layer.max_tokens,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope.theta,
        "tie_word_embeddings": False,
        "hidden_layers": list(hidden_layers),
        "eagle_aux_hidden_state_layer_ids": list(hidden_layers),
    }


def _as_llama(raw: JsonObject) -> JsonObject:
    """Its layer is a Llama's, whatever the heads call themselves, and wherever it is described."""
    layer = raw.child("transformer_layer_config")
    described: Mapping[str, object] = layer.values if layer else {}
    return JsonObject(raw.where, {**raw.values, **described, "model_type": "llama"})


def _check_sizes(where: str, layer: LlamaConfig, target: ModelSpec) -> None:
    if layer.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{where}: the heads have hidden_size {layer.hidden_size}, the target "
            f"{target.hidden_size}.",
            hint=_OTHER_TARGET,
        )
    if layer.vocab_size != target.vocab_size:
        raise VocabularyError(
            f"{where}: the heads know {layer.vocab_size} ids and the target {target.vocab_size}.",
            hint=_OTHER_TARGET,
        )


EMBEDDING = "embed_tokens"
# What follows from d2t.
_DERIVED = (*DERIVED, "t2d")


def load_eagle(heads: HeadsToLoad, target: NormedTarget) -> EagleNet:
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
