"""Writes an inflated model (inflate.py) as a checkpoint folder, one layer a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from outrider.core.errors import CheckpointError, MachineError
from outrider.core.files import new_folder
from outrider.models.hf_config import read_native_config
from outrider.models.inflate import Inflation, Shape
from outrider.models.json_object import JsonObject
from outrider.models.llama_config import LlamaConfig
from outrider.models.weights import INDEX, Weights

_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# A file system wants a little more than the tensors.
_DISK_MARGIN = 1.02


@dataclass(frozen=True, slots=True)
class Written:
    """What is on disk so far; the last of a run is the whole."""

    num_files: int
    num_files_in_all: int
    num_parameters: int
    num_zeros: int
    num_bytes: int


def write_inflated(
    source: Path, shape: Shape, folder: Path, dtype: torch.dtype
) -> Generator[Written]:
    """Inflate the checkpoint in `source`, yielding after each file.

    The folder must not exist, or be empty; a failure leaves it so. config.json comes last, so half
    a folder is never taken for a model. Raises ConfigError, CheckpointError, or MachineError if the
    disk is too small.
    """
    small = read_native_config(source)
    if not isinstance(small, LlamaConfig):
        raise CheckpointError(
            f"a {small.family} model cannot be inflated.", hint="inflate outrider/embedded"
        )
    with Weights(source) as weights:
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


def _write(inflation: Inflation, folder: Path, written: list[Path]) -> Iterator[Written]:
    """Each file is on the list before it is begun."""
    files = inflation.config.num_layers + 1
    places: dict[str, str] = {}
    done = Written(0, files, 0, 0, 0)
    for number, tensors in enumerate(inflation.shards(), start=1):
        name = f"model-{number:05}-of-{files:05}.safetensors"
        written.append(folder / name)
        save_tensors(tensors, written[-1])
        places |= dict.fromkeys(tensors, name)
        done = Written(
            number,
            files,
            done.num_parameters + sum(tensor.numel() for tensor in tensors.values()),
            done.num_zeros + sum(map(_num_zeros, tensors.values())),
            done.num_bytes + sum(tensor.nbytes for tensor in tensors.values()),
        )
        yield done
    total = {"total_size": done.num_bytes}
    written.append(folder / INDEX)
    write_json(written[-1], {"metadata": total, "weight_map": places})


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises MachineError where the disk is full or may not be written."""
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:
        raise MachineError(
            f"{path} cannot be written: {error}.",
            hint="free some space, or name a folder that you may write",
        ) from error


def _num_zeros(tensor: Tensor) -> int:
    return tensor.numel() - int(tensor.count_nonzero())


def _config(source: Path, config: LlamaConfig, dtype: torch.dtype) -> dict[str, object]:
    """The source's config.json with the sizes of the bigger shape."""
    raw = JsonObject.read(source / "config.json").values
    changed = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    # Layers for multi-token prediction lie behind those that are inflated.
    kept = {key: value for key, value in raw.items() if key != "num_nextn_predict_layers"}
    return {**kept, **changed}


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
