"""Writes an inflated model (inflate.py) as a checkpoint folder, layer by layer, and its heads.

Shapes:  D = true channels, W = all channels, V = rows of a table, O = outputs, I = inputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from outrider.core.errors import CheckpointError, MachineError
from outrider.core.files import new_folder, writing
from outrider.models.checkpoint import CONFIG, INDEX, WEIGHTS, open_checkpoint
from outrider.models.configs import HybridConfig, LlamaConfig
from outrider.models.families import parse_llama, read_native_config
from outrider.models.heads import HeadKind, hidden_layers_of, is_eagle3, kind_of
from outrider.models.json_object import JsonObject
from outrider.models.weights import Weights
from outrider_lab.models.inflate import Channels, Inflation, ModelShape, inflated_config

_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# A file system wants a little more than the tensors.
_DISK_MARGIN = 1.02


@dataclass(frozen=True, slots=True)
class InflatedFiles:
    """What is on disk so far; the last of a run is the whole."""

    num_files: int
    num_files_in_all: int
    num_parameters: int
    num_zeros: int
    num_bytes: int


def write_inflated(
    source: Path, shape: ModelShape, folder: Path, dtype: torch.dtype
) -> Generator[InflatedFiles]:
    """Inflate the checkpoint in `source`, yielding after each file.

    The folder must not exist, or be empty; a failure leaves it so. config.json comes last, so half
    a folder is never taken for a model. Raises ConfigError, CheckpointError, or MachineError if the
    disk is too small.
    """
    small = read_native_config(source)
    if not isinstance(small, LlamaConfig) or small.extras:
        raise CheckpointError(
            f"a {small.family} model cannot be inflated.", hint="inflate outrider/embedded"
        )
    with Weights.at(source) as weights:
        inflation = Inflation(small, weights, shape, dtype)
        num_bytes = inflation.config.num_parameters * dtype.itemsize
        with new_folder(folder) as files:
            _check_disk(folder, num_bytes)
            yield from _write(inflation, folder, files)
            for name in _COPIED:
                if (source / name).exists():
                    files.append(folder / name)
                    shutil.copyfile(source / name, files[-1])
            files.append(folder / "config.json")
            write_json(files[-1], _config(source, inflation.config, dtype))


def _check_disk(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < _DISK_MARGIN * num_bytes:
        raise MachineError(
            f"the model takes {num_bytes / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free.",
            hint="name a folder on a larger disk, or a smaller shape",
        )


def _write(inflation: Inflation, folder: Path, written: list[Path]) -> Iterator[InflatedFiles]:
    files = inflation.config.num_layers + 1
    done = InflatedFiles(0, files, 0, 0, 0)
    for tensors in write_shards(folder, inflation.shards(), files, written):
        done = InflatedFiles(
            done.num_files + 1,
            files,
            done.num_parameters + sum(tensor.numel() for tensor in tensors.values()),
            done.num_zeros + sum(map(_num_zeros, tensors.values())),
            done.num_bytes + sum(tensor.nbytes for tensor in tensors.values()),
        )
        yield done


def write_shards(
    folder: Path, shards: Iterable[Mapping[str, Tensor]], num_files: int, written: list[Path]
) -> Iterator[Mapping[str, Tensor]]:
    """A file for each of `shards`, which is then given back, and at the end the index of all. Each
    file is on the list before it is begun."""
    places: dict[str, str] = {}
    num_bytes = 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{num_files:05}.safetensors"
        written.append(folder / name)
        save_tensors(tensors, written[-1])
        places |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        yield tensors
    written.append(folder / INDEX)
    write_json(written[-1], {"metadata": {"total_size": num_bytes}, "weight_map": places})


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises MachineError where the disk is full or may not be written."""
    with writing(path, SafetensorError):
        save_file(dict(tensors), path, {"format": "pt"})


def _num_zeros(tensor: Tensor) -> int:
    return tensor.numel() - int(tensor.count_nonzero())


def _config(source: Path, config: LlamaConfig, dtype: torch.dtype) -> dict[str, object]:
    """The source's config.json with the sizes of the bigger shape."""
    raw = open_checkpoint(source).document(CONFIG).values
    # Layers for multi-token prediction lie behind those that are inflated.
    kept = {key: value for key, value in raw.items() if key != "num_nextn_predict_layers"}
    return kept | sizes_json(config, dtype)


def sizes_json(config: LlamaConfig | HybridConfig, dtype: torch.dtype) -> dict[str, object]:
    """What a checkpoint's config.json says of the sizes of a decoder."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
    }


def llama_json(config: LlamaConfig, dtype: torch.dtype) -> dict[str, object]:
    """`config.json` of a plain Llama, without what it says of its tokenizer."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.whole_tokens,
        "hidden_act": "silu",
        **sizes_json(config, dtype),
    }


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


INFLATABLE: tuple[HeadKind, ...] = ("eagle", "mtp")
# By the last word of a tensor's name before `.weight` or `.bias`.
_READING = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "head")
_WRITING = ("o_proj", "down_proj")
_JOINING = ("fc", "eh_proj")
_TABLES = ("embed_tokens",)
_OF_ONE_HEAD = ("q_norm", "k_norm")
_LAYER_CONFIG = "transformer_layer_config"


def write_inflated_heads(
    source: Path, target: Path, shape: ModelShape, folder: Path, dtype: torch.dtype
) -> None:
    """Write the heads in `source`, of the small model in `target`, for that model inflated to
    `shape`. The folder must not exist, or be empty; config.json comes last.

    Raises CheckpointError for heads of another kind or target, ConfigError for a folder that is
    taken or a shape that cannot hold the target.

    EAGLE heads and MTP blocks read states of the target and rows of its table, both with true
    channels first and zeros behind. Their own residual is made so too: matrices over it may hold
    anything where they meet zeros, and matrices onto it have zeros in their new rows. Norms are
    rescaled as the target's. Feed-forward units, heads and drafted ids stay as many as they were.

    The layers that are read keep their numbers: the target's new layers come after its own, add
    nothing, and so leave the last state what it was.
    """
    kind, small = kind_of(source), read_native_config(target)
    if kind not in INFLATABLE or not isinstance(small, LlamaConfig):
        raise CheckpointError(
            f"{source} cannot be inflated: it has no EAGLE heads or MTP blocks for a Llama.",
            hint="train heads for the bigger model: `outrider train eagle`",
        )
    inflated_config(small, shape)
    raw = open_checkpoint(source).document(CONFIG)
    layer = _layer(raw, kind)
    if layer.hidden_size != small.hidden_size:
        raise CheckpointError(
            f"{raw.where}: the heads have hidden_size {layer.hidden_size}, the target "
            f"{small.hidden_size}.",
            hint="name the target that they were trained for",
        )
    growth = _Growth(Channels(small.hidden_size, shape.hidden_size), dtype)
    with new_folder(folder) as files:
        with Weights.at(source) as weights:
            tensors = {name: growth(name, tensor) for name, tensor in weights.each()}
        files.append(folder / WEIGHTS)
        save_tensors(tensors, files[-1])
        layers = hidden_layers_of(source, kind, small.num_layers)
        files.append(folder / "config.json")
        write_json(files[-1], _heads_config(raw, layer, layers, growth))


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
            return self.channels.over(name, self.channels.onto(tensor) if onto else tensor)
        if onto:
            return self.channels.onto(tensor)
        if part in _TABLES:
            return self.channels.onto(tensor.T).T.contiguous()
        if part.endswith("norm"):
            return self.channels.norm(tensor).to(self.dtype)
        raise CheckpointError(
            f"the heads have a tensor {name} that is not known.", hint="inflate EAGLE or MTP heads"
        )


def _layer(raw: JsonObject, kind: HeadKind) -> LlamaConfig:
    """Its sizes, as a Llama's, wherever they are written."""
    described = raw.child(_LAYER_CONFIG)
    values = {**raw.values, **(described.values if described else {})}
    family = raw.text("block_type", "llama") if kind == "mtp" else "llama"
    return parse_llama(JsonObject(raw.where, {**values, "model_type": family}))


def _heads_config(
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
