"""Heads for an inflated target (inflate.py): the same drafts, from states that are wider.

EAGLE heads and MTP blocks read states of the target and rows of its table, both with true channels
first and zeros behind. Their own residual is made so too, so every matrix over it may hold anything
where it meets zeros, and every matrix onto it has zeros in its new rows. Norms are rescaled as the
target's. Feed-forward units, heads and ids that are drafted stay as many as they were.

The layers that are read keep their numbers: the target's new layers come after its own, add
nothing, and so leave the last state what it was.

Shapes:  D = true channels, W = all channels, V = rows of a table, O = outputs, I = inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError
from outrider.core.files import new_folder
from outrider.models.heads import HeadKind, hidden_layers_of, is_eagle3, kind_of
from outrider.models.hf_config import read_native_config
from outrider.models.inflate import Channels, Shape, inflated_config, meaningless
from outrider.models.inflate_files import save_tensors, write_json
from outrider.models.json_object import JsonObject
from outrider.models.llama_config import LlamaConfig, parse_llama
from outrider.models.weights import WEIGHTS, Weights

INFLATABLE: tuple[HeadKind, ...] = ("eagle", "mtp")
# By the last word of a tensor's name before `.weight` or `.bias`.
_READING = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "head")
_WRITING = ("o_proj", "down_proj")
_JOINING = ("fc", "eh_proj")
_TABLES = ("embed_tokens",)
_OF_ONE_HEAD = ("q_norm", "k_norm")
_LAYER_CONFIG = "transformer_layer_config"


def write_inflated_heads(
    source: Path, target: Path, shape: Shape, folder: Path, dtype: torch.dtype
) -> None:
    """Write the heads in `source`, of the small model in `target`, for that model inflated to
    `shape`. The folder must not exist, or be empty; config.json comes last.

    Raises CheckpointError for heads of another kind or target, ConfigError for a folder that is
    taken or a shape that cannot hold the target.
    """
    kind, small = kind_of(source), read_native_config(target)
    if kind not in INFLATABLE or not isinstance(small, LlamaConfig):
        raise CheckpointError(
            f"{source} cannot be inflated: it has no EAGLE heads or MTP blocks for a Llama.",
            hint="train heads for the bigger model: `outrider train eagle`",
        )
    inflated_config(small, shape)
    raw = JsonObject.read(source / "config.json")
    layer = _layer(raw, kind)
    if layer.hidden_size != small.hidden_size:
        raise CheckpointError(
            f"{raw.where}: the heads have hidden_size {layer.hidden_size}, the target "
            f"{small.hidden_size}.",
            hint="name the target that they were trained for",
        )
    growth = _Growth(Channels(small.hidden_size, shape.hidden_size), dtype)
    with new_folder(folder) as files:
        with Weights(source) as weights:
            tensors = {name: growth(name, tensor) for name, tensor in weights.each()}
        files.append(folder / WEIGHTS)
        save_tensors(tensors, files[-1])
        layers = hidden_layers_of(source, kind, small.num_layers)
        files.append(folder / "config.json")
        write_json(files[-1], _config(raw, layer, layers, growth))


@dataclass(frozen=True, slots=True)
class _Growth:
    """Makes of a tensor the bigger one. What is not over the residual stays as it is."""

    channels: Channels
    dtype: torch.dtype

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        *_, part, kind = f".{name}".rsplit(".", 2)
        onto = part in (*_WRITING, *_JOINING)
        if not tensor.is_floating_point():
            return tensor.clone()
        tensor = tensor.to(self.dtype)
        if part in _OF_ONE_HEAD or (kind == "bias" and not onto):
            return tensor.clone()
        if part in _READING or (part in _JOINING and kind == "weight"):
            return self._columns(name, self._rows(tensor) if onto else tensor)
        if onto:
            return self._rows(tensor)
        if part in _TABLES:
            return self._rows(tensor.T).T.contiguous()
        if part.endswith("norm"):
            return self.channels.norm(tensor).to(self.dtype)
        raise CheckpointError(
            f"the heads have a tensor {name} that is not known.", hint="inflate EAGLE or MTP heads"
        )

    def _rows(self, part_DI: Tensor) -> Tensor:
        """Onto the residual: the true channels, as often as they are held, and zeros."""
        copies = self.channels.copies
        rest = part_DI.new_zeros(self.channels.width - self.channels.num_true, *part_DI.shape[1:])
        return torch.cat([*[part_DI] * copies, rest])

    def _columns(self, name: str, part_OD: Tensor) -> Tensor:
        """Over the residual, or over several side by side: the true channels once, then numbers
        that meet zeros."""
        size, width = self.channels.size, self.channels.width
        num_parts = part_OD.shape[1] // size
        big_OW = meaningless(name, (part_OD.shape[0], num_parts * width), self.dtype)
        for part in range(num_parts):
            start = part * width
            big_OW[:, start : start + self.channels.num_true] = 0
            big_OW[:, start : start + size] = part_OD[:, part * size : (part + 1) * size]
        return big_OW


def _layer(raw: JsonObject, kind: HeadKind) -> LlamaConfig:
    """Its sizes, as a Llama's, wherever they are written."""
    described = raw.child(_LAYER_CONFIG)
    values = {**raw.values, **(described.values if described else {})}
    family = raw.text("block_type", "llama") if kind == "mtp" else "llama"
    return parse_llama(JsonObject(raw.where, {**values, "model_type": family}))


def _config(
    raw: JsonObject, layer: LlamaConfig, layers: tuple[int, ...], growth: _Growth
) -> Mapping[str, object]:
    sizes: dict[str, object] = {
        "hidden_size": growth.channels.width,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps * growth.channels.eps_scale,
    }
    changed = {**raw.values, **sizes, "dtype": str(growth.dtype).removeprefix("torch.")}
    if is_eagle3(raw):
        # By name: those that it would read unsaid depend on how many there are.
        changed |= {"hidden_layers": list(layers), "eagle_aux_hidden_state_layer_ids": list(layers)}
    described = raw.child(_LAYER_CONFIG)
    return changed | ({_LAYER_CONFIG: {**described.values, **sizes}} if described else {})
