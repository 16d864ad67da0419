"""Writes a checkpoint of the Llama family as one GGUF file, tensor by tensor.

Sizes are known from config.json, so the head of the file is written before any weight is read, and
no more than one tensor and a part of it in the new format are in memory. The file appears under its
name when it is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    MachineError,
    did_you_mean,
)
from outrider.core.files import replacing
from outrider.models.configs import LlamaConfig
from outrider.models.families import read_native_config
from outrider.models.weights import Weights
from outrider_lab.models.gguf import (
    FORMATS,
    Exportable,
    Format,
    Value,
    encoded,
    head_of,
    metadata_of,
    padded,
    tensors_of,
)
from outrider_lab.models.gguf_vocabulary import Vocabulary, read_vocabulary

_QUANTISATION_VERSION = 2


@dataclass(frozen=True, slots=True)
class Exported:
    """What is written so far; the last of a run is the whole. `notes` are for the user."""

    num_tensors: int
    num_tensors_in_all: int
    num_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GgufOptions:
    """`form` is a name of FORMATS, `pre_tokenizer` one of PRE_TOKENIZERS; `name` is what the file
    calls the model. `force` replaces a file that is there."""

    form: str = "bf16"
    pre_tokenizer: str = "auto"
    name: str = ""
    force: bool = False


def export(source: Path, path: Path, wish: GgufOptions) -> Generator[Exported]:
    """Write the checkpoint in folder `source` to `path`, yielding after each tensor.

    Raises ConfigError for a bad wish or a file that is there, CheckpointError for a model or a
    tokenizer that the format cannot express, MachineError if the disk is too small.
    """
    if wish.form not in FORMATS:
        raise ConfigError(f"no format {wish.form!r}.", hint=did_you_mean(wish.form, FORMATS))
    _check_place(path, force=wish.force)
    config = read_native_config(source)
    if not isinstance(config, LlamaConfig):
        raise CheckpointError(
            f"a {config.family} model cannot be exported to GGUF.",
            hint="choose a checkpoint of the Llama family",
        )
    metadata = metadata_of(config, wish.name or source.resolve().name)
    vocabulary = read_vocabulary(
        source,
        vocab_size=config.vocab_size,
        stop_ids=config.stop_ids,
        pre_tokenizer=wish.pre_tokenizer,
    )
    with replacing(path) as part, Weights.at(source) as weights:
        tensors = tensors_of(config, weights)
        yield from _write(part, metadata, vocabulary, tensors, FORMATS[wish.form])
        weights.check_all_taken()


def _check_place(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder.", hint="name a file, such as model.gguf")
    if path.exists() and not force:
        raise ConfigError(
            f"{path} is there already.", hint="name another file, or replace it with --force"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}.", hint=f"mkdir -p {path.parent}")


def _write(
    part: Path,
    metadata: dict[str, Value],
    vocabulary: Vocabulary,
    tensors: list[Exportable],
    form: Format,
) -> Iterator[Exported]:
    listed = [(tensor, _format_of(tensor, form)) for tensor in tensors]
    about: dict[str, Value] = {"general.file_type": form.file_type}
    about["general.quantization_version"] = _QUANTISATION_VERSION
    head = head_of({**metadata, **about, **vocabulary.metadata}, listed)
    total = len(head) + sum(padded(form.num_bytes(tensor.shape)) for tensor, form in listed)
    _check_disk(part.parent, total)
    try:
        with part.open("wb") as file:
            file.write(head)
            for number, (tensor, own) in enumerate(listed, start=1):
                for piece in encoded(tensor.read(), own):
                    file.write(piece)
                file.write(bytes(padded(file.tell()) - file.tell()))
                yield Exported(number, len(tensors), file.tell(), vocabulary.notes)
            num_bytes = file.tell()
    except OSError as error:
        raise MachineError(
            f"{part.parent} cannot be written: {error.strerror or error}.",
            hint="name a file in a folder that you may write, on a disk with room",
        ) from error
    if num_bytes != total:
        raise ContractError("the file has another size than was reckoned")


def _format_of(tensor: Exportable, form: Format) -> Format:
    """Norms, biases and factors are few, and stay exact."""
    if not tensor.is_matrix:
        return FORMATS["f32"]
    if tensor.shape[-1] % form.block:
        raise CheckpointError(
            f"{tensor.name} has rows of {tensor.shape[-1]} numbers, which are no whole blocks of "
            f"{form.block}.",
            hint="use --gguf bf16",
        )
    return form


def _check_disk(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise MachineError(
            f"the file takes {num_bytes / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free.",
            hint="name a file on a larger disk, or a smaller format with --gguf",
        )
