"""EAGLE draft heads: a layer that predicts the target's next state, from published folders.

Heads declare themselves a Llama of one layer, so the sizes of the layer are read as a Llama's; the
`speculators` library puts them into `transformer_layer_config`. EAGLE 3 adds `draft_vocab_size`,
and some trainers norms and layers (`EagleConfig`). Tensors have the names of the EAGLE project:
`fc`, `layers.0` (1 and 2) or `midlayer` (3), `norm`, `lm_head`, `d2t`. Files without an embedding
use the target's. V = vocabulary, W = drafted ids, D = size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.clock import host_ints
from outrider.core.errors import CheckpointError, VocabularyError
from outrider.core.spec import ModelSpec
from outrider.kernels.native.forward import Attends, Entrance, LayerWeights
from outrider.kernels.operators import for_kinds, own_kernels
from outrider.kernels.plan import AttentionKind, PackedLinear
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.configs import LlamaConfig
from outrider.models.families import parse_llama
from outrider.models.heads import HeadsToLoad, check_numbers, is_eagle3, layer_part
from outrider.models.json_object import JsonObject
from outrider.models.llama import LayerOperators
from outrider.models.rope import turns_of
from outrider.models.weights import DERIVED, WeightReader, Weights
from outrider.plugins.heads.hidden import (
    BlockLayer,
    EntranceNet,
    HeadBlock,
    TargetStates,
    entrance_buffers,
)
from outrider.plugins.heads.target import HeadTarget, NormedTarget, placement_of

_OTHER_TARGET = (
    "choose heads that were trained for this very target, or train some: `outrider train eagle`"
)


# More layers than any head has.
_MAX_LAYERS = 16
_NORMS = ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes of EAGLE heads. `layer` has those of each layer, and the window of the training.

    `fused` heads (EAGLE 3) read several layers of the target and have a vocabulary of
    `draft_vocab_size`; others read what the target's output head reads, and use that head.
    `norm_before_residual` says that the residual starts from the normed state. At position p the
    layer reads the token there, e, and the target's state at the token before it, h.

    EAGLE 1 and 2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858): h is the input of the target's
    output head, after the last norm. The layer runs on fc(e, h) and has no norm before its
    attention; its output is read by the target's output head, and as h at the next position.

    EAGLE 3 (Li et al. 2025, arXiv 2503.01840): h is fc of three layers of the target, low, middle
    and high, concatenated. Attention reads norm(e) and norm(h), concatenated; h is the residual.
    The output is h at the next position and, after a norm, gives the logits of an output head of
    its own, which may know fewer ids than the target: draft id i is the target's i + d2t[i].

    Heads of the speculators library may have further layers behind that one, plain ones, and norms
    of query and key heads (Qwen3); layer i sees the last `windows[i]` tokens, all if that is 0 or
    there are none. `fc_norm` norms each of the three states, `norm_before_fc` all of them as one,
    before fc; with `norm_output` the state that is read as h at the next position is normed.
    """

    layer: LlamaConfig
    fused: bool
    draft_vocab_size: int
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    windows: tuple[int, ...] = ()

    def attention(self, index: int) -> AttentionKind | None:
        """Return the attention of layer `index`, if it has a window."""
        window = self.windows[index] if self.windows else 0
        return AttentionKind(self.layer.scale, window) if window else None


def read_eagle_config(folder: Path, target: ModelSpec) -> EagleConfig:
    """Read a folder's config. Raises CheckpointError for a file that is wrong or belongs to another
    target, and VocabularyError if its ids mean other text."""
    raw = open_checkpoint(folder).document(CONFIG)
    described = as_llama(raw)
    layer = parse_llama(described)
    fused = is_eagle3(raw)
    check_sizes(raw.where, layer, target)
    if layer.num_layers > (_MAX_LAYERS if fused else 1):
        most = f"at most {_MAX_LAYERS} layers" if fused else "one layer"
        raise CheckpointError(
            f"{raw.where}: num_hidden_layers is {layer.num_layers}; EAGLE heads have {most}.",
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
        windows=_windows(described, layer.num_layers),
        **{name: raw.flag(name, default=False) for name in _NORMS},
    )


def config_values(config: EagleConfig, hidden_layers: tuple[int, ...]) -> dict[str, object]:
    """Return the contents of `config.json` for heads that were trained here."""
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


def as_llama(raw: JsonObject) -> JsonObject:
    """Return the config as a Llama's, whatever the heads call themselves."""
    described = layer_part(raw)
    return JsonObject(raw.where, {**raw.values, **described.values, "model_type": "llama"})


def _windows(described: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Return the windows of the sliding layers, as far as they are listed; some folders list the
    target's layers."""
    window = described.integer("sliding_window", 0, least=0)
    listed = described.texts("layer_types")[:num_layers]
    found = [window if kind == "sliding_attention" else 0 for kind in listed]
    return (*found, *([0] * (num_layers - len(found))))


def check_sizes(where: str, layer: LlamaConfig, target: ModelSpec) -> None:
    """Raise CheckpointError or VocabularyError unless the heads have the target's sizes."""
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
# Tensors that follow from d2t, and the target's own.
FROM_TARGET = (*DERIVED, "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def load_eagle(
    heads: HeadsToLoad, target: NormedTarget, *, unread: tuple[str, ...] = ()
) -> EntranceNet:
    """Load heads, all tensors but `unread`. Raises CheckpointError, naming file and tensor, for
    heads that are incomplete, not of this target or not all numbers."""
    config = read_eagle_config(heads.folder, target.spec)
    place, kernels = placement_of(target), own_kernels(target.kernels)
    if any(config.windows):
        kernels = for_kinds(kernels)
    with Weights.at(heads.folder) as weights:
        check_numbers(weights)
        block = _read_block(WeightReader(weights, kernels, place), weights, config, heads, target)
        weights.check_all_taken(ignored=FROM_TARGET, unread=unread)
    return EntranceNet(block, kernels, place, heads.capacity)


def _read_block(
    reader: WeightReader,
    weights: Weights,
    config: EagleConfig,
    heads: HeadsToLoad,
    target: NormedTarget,
) -> HeadBlock:
    sizes, fused, capacity = config.layer, config.fused, heads.capacity
    hidden, layers = sizes.hidden_size, capacity.hidden_layers
    prefixes = [f"layers.{index}." for index in range(sizes.num_layers)]
    if "midlayer.self_attn.q_proj.weight" in reader:
        prefixes[0] = "midlayer."
    device = placement_of(target).device
    fc = reader.linear({"fc": hidden}, (len(layers) if fused else 2) * hidden)
    bias_D = reader.bias({"fc": hidden}, present="fc.bias" in reader)
    turns = turns_of(sizes, capacity.num_positions(target.spec.max_tokens), device)
    # EAGLE 3 uses fc for the target's states, before the entrance.
    if fused:
        norms = _norms_before_fc(reader, config, len(layers))
        eps = sizes.rms_norm_eps
        states = TargetStates(layers=layers, norms=norms, eps=eps, join=fc, join_bias_D=bias_D)
    else:
        eps = target.config.rms_norm_eps
        states = TargetStates(layers=layers, norms=(target.tables.norm_D,), eps=eps)
    entering = {"token_norm_D": "input_layernorm", "state_norm_D": "hidden_norm"}
    operators = LayerOperators(sizes, turns)
    head, ids_W = target.tables.head, None
    if fused:
        head, ids_W = output_head(reader, weights, config.draft_vocab_size, target)
    return HeadBlock(
        config=sizes,
        layers=tuple(
            BlockLayer(operators, _layer(reader, config, prefix, index))
            for index, prefix in enumerate(prefixes)
        ),
        entrance=Entrance(
            **{
                name: reader.vector(f"{prefixes[0]}{stored}.weight", hidden) if fused else None
                for name, stored in entering.items()
            },
            join=None if fused else fc,
            join_bias_D=None if fused else bias_D,
            attends=Attends.PAIR if fused else Attends.RESIDUAL,
            keeps_norm=config.norm_before_residual,
            gives_normed=fused and config.norm_output,
            **entrance_buffers(capacity, hidden, device),
        ),
        states=states,
        embedding_VD=embedding_of(reader, target),
        head=head,
        norm_D=reader.vector("norm.weight", hidden) if fused else None,
        ids_W=ids_W,
    )


def _norms_before_fc(
    reader: WeightReader, config: EagleConfig, num_layers: int
) -> tuple[Tensor, ...]:
    """Return norms of each state, or one norm of all of them concatenated."""
    size = config.layer.hidden_size
    if config.fc_norm:
        return tuple(reader.vector(f"fc_norm.{i}.weight", size) for i in range(num_layers))
    if config.norm_before_fc:
        return (reader.vector("input_norm.weight", num_layers * size),)
    return ()


def _layer(reader: WeightReader, config: EagleConfig, prefix: str, index: int) -> LayerWeights:
    """Read a layer. The first one reads token and state concatenated, and has no norm of its own:
    the entrance defines what attention reads. Head norms and biases are optional."""
    sizes, first = config.layer, index == 0
    hidden, ffn = sizes.hidden_size, sizes.ffn_size
    attended, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    outputs = {"q_proj": attended, "k_proj": kv, "v_proj": kv}
    qkv = {f"{prefix}self_attn.{name}": size for name, size in outputs.items()}
    gate_up = {f"{prefix}mlp.{name}": ffn for name in ("gate_proj", "up_proj")}
    out, down = {f"{prefix}self_attn.o_proj": hidden}, {f"{prefix}mlp.down_proj": hidden}

    def bias(outputs: Mapping[str, int]) -> Tensor | None:
        return reader.bias(outputs, present=f"{next(iter(outputs))}.bias" in reader)

    def head_norm(name: str) -> Tensor | None:
        stored = f"{prefix}self_attn.{name}.weight"
        return reader.vector(stored, sizes.head_dim) if stored in reader else None

    norm = f"{prefix}input_layernorm.weight"
    return LayerWeights(
        attention_norm_D=torch.empty(0) if first else reader.vector(norm, hidden),
        qkv=reader.linear(qkv, (2 if first and config.fused else 1) * hidden),
        qkv_bias_E=bias(qkv),
        q_norm_H=head_norm("q_norm"),
        k_norm_H=head_norm("k_norm"),
        out=reader.linear(out, attended),
        out_bias_D=bias(out),
        ffn_norm_D=reader.vector(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(gate_up, hidden),
        gate_up_bias_2F=bias(gate_up),
        down=reader.linear(down, ffn),
        down_bias_D=bias(down),
        attention=config.attention(index),
    )


def output_head(
    reader: WeightReader, weights: Weights, size: int, target: HeadTarget
) -> tuple[PackedLinear, Tensor | None]:
    """Return the output head of `size` drafted ids, and these ids, None for all of the target's.
    Raises CheckpointError if the files do not say which ids a smaller head knows."""
    head: PackedLinear = target.tables.head
    if "lm_head.weight" in reader or size < target.spec.vocab_size:
        head = reader.linear({"lm_head": size}, target.spec.hidden_size)
    ids_W = _drafted_ids(weights, size, target) if "d2t" in weights else None
    if ids_W is None and size < target.spec.vocab_size:
        raise CheckpointError(
            f"{weights.checkpoint.path}: these heads draft {size} of the target's "
            f"{target.spec.vocab_size} ids, and the tensor d2t, which says which, is missing.",
            hint="is the download complete?",
        )
    return head, ids_W


def _drafted_ids(weights: Weights, size: int, target: HeadTarget) -> Tensor:
    ids_W = weights.take_integers("d2t", size)
    if not weights.checkpoint.is_gguf:
        # Folders have the distances of ids, GGUF files the ids.
        ids_W = ids_W + torch.arange(size)
    if int(ids_W.min()) < 0 or int(ids_W.max()) >= target.spec.vocab_size:
        raise VocabularyError(
            f"{weights.checkpoint.path}: d2t names ids outside the target's vocabulary of "
            f"{target.spec.vocab_size}.",
            hint="choose heads that were trained for this very target",
        )
    if len(set(host_ints(ids_W))) < size:
        raise VocabularyError(
            f"{weights.checkpoint.path}: d2t names an id of the target twice.",
            hint="compare the file with the original and download it again",
        )
    return ids_W.to(placement_of(target).device)


def embedding_of(reader: WeightReader, target: HeadTarget) -> Tensor:
    """Return the target's table, unless the files hold one that differs."""
    table_VD = target.tables.embeddings
    name = f"{EMBEDDING}.weight"
    if name not in reader:
        return table_VD
    own_VD = reader.table(name, *table_VD.shape)
    return table_VD if torch.equal(own_VD, table_VD) else own_VD
