"""A model's source: a Hugging Face folder or a GGUF file, by its documents, weight files and notes.

`open_checkpoint` tells the two formats apart, once, where a path is read; all readers of models
take a `Checkpoint`. Opening one reads nothing yet. No tensors: weights.py reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.params import ADVISED, params_for_one
from outrider.models.json_object import JsonObject

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outrider.kernels.plan import BlockRows

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Medusa and Hydra heads are published under these names.
MEDUSA_WEIGHTS, HYDRA_WEIGHTS = "medusa_lm_head.safetensors", "hydra_lm_head.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class TensorFile(Protocol):
    """An open file of tensors. Methods raise CheckpointError if it is damaged.

    `max_read` are bytes that may be read before pages, which count as this process's memory, are to
    be released by `let_go`."""

    @property
    def max_read(self) -> int: ...
    @property
    def num_values(self) -> int:
        """Most numbers that the file can hold, one in a byte if it does not list them."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of all tensors in memory where kernels run on their blocks; 0 without blocks."""
        ...

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of the tensor that `get_tensor` returns."""
        ...

    def blocks(self, name: str) -> Sequence[BlockRows]:
        """The stored rows of a matrix, or of each matrix of a stack. Empty for a tensor that is not
        quantised or has another layout in checkpoints."""
        ...

    def let_go(self) -> None:
        """Release the pages that were read; a later read takes them from the file again."""
        ...


class Checkpoint(Protocol):
    """A model, or draft heads, on this machine. Methods raise CheckpointError."""

    is_gguf: ClassVar[bool]

    @property
    def path(self) -> Path:
        """The folder, or the first file of a GGUF model."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on settings of the source that are not read."""
        ...

    @property
    def tokenizer_notes(self) -> tuple[str, ...]:
        """Notes on parts of the tokenizer that are left out."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight files that are there; 0 for a folder without any."""
        ...

    def has(self, name: str) -> bool:
        """True if there is a document of this name, such as `config.json`."""
        ...

    def file(self, name: str) -> Path | None:
        """The file of the document `name`; None if it is made from the header of a GGUF file."""
        ...

    def document(self, name: str) -> JsonObject:
        """Read a JSON document. Raises CheckpointError unless it is there with one JSON object."""
        ...

    def files(self) -> tuple[Path, ...]:
        """The weight files. Raises CheckpointError for a missing or unsupported one."""
        ...

    def tensors(self, file: Path) -> TensorFile | None:
        """Open one of `files`; None if it holds safetensors (weights.py)."""
        ...

    def contradiction(self, num_weights: int, most_values: int) -> CheckpointError:
        """The error for a config of `num_weights` weights if files hold `most_values` at most."""
        ...


@dataclass(frozen=True, slots=True)
class FolderCheckpoint:
    """A folder with `config.json`, tokenizer and safetensors. Pickles, which could run code, are
    refused."""

    path: Path
    is_gguf: ClassVar[bool] = False

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def tokenizer_notes(self) -> tuple[str, ...]:
        return ()

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def file(self, name: str) -> Path:
        return self.path / name

    def document(self, name: str) -> JsonObject:
        return JsonObject.read(self.path / name)

    def files(self) -> tuple[Path, ...]:
        for name in (WEIGHTS, MEDUSA_WEIGHTS, HYDRA_WEIGHTS):
            if self.has(name):
                return (self.path / name,)
        if self.has(INDEX):
            return self._shards()
        pickles = sorted(path.name for path in self.path.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise CheckpointError(
                f"{self.path} has its weights only as {pickles[0]}, a format that can run code "
                "when it is read; Outrider reads only safetensors.",
                hint="convert it where you trust it: transformers' "
                "from_pretrained(folder) and then save_pretrained(new_folder)",
            )
        raise CheckpointError(
            f"{self.path} has neither {WEIGHTS} nor {INDEX}.",
            hint="is the download complete? Pickle files (.bin) are never fetched from the hub",
        )

    def _shards(self) -> tuple[Path, ...]:
        index = self.document(INDEX)
        weight_map = index.child("weight_map")
        if not weight_map or not weight_map.values:
            raise CheckpointError(f"{index.where}: weight_map is missing or empty.")
        names = sorted({weight_map.text(name) for name in weight_map.values})
        for name in names:
            # A shard is in the folder of its index; a name with a separator could be any file.
            if not name.endswith(".safetensors") or set(name) & set("/\\:\0"):
                raise CheckpointError(
                    f"{weight_map.where} names {name!r}, which is not a safetensors file of this "
                    "folder."
                )
            if not self.has(name):
                raise CheckpointError(
                    f"{self.path / name} is missing, though {INDEX} names it.",
                    hint="download the missing shard",
                )
        return tuple(self.path / name for name in names)

    def tensors(self, file: Path) -> None:
        del file

    def contradiction(self, num_weights: int, most_values: int) -> CheckpointError:
        del most_values
        num_bytes = sum(file.stat().st_size for file in self.files())
        return CheckpointError(
            f"{self.path}: config.json implies {num_weights} weights, and the files have "
            f"{num_bytes} bytes.",
            hint="config.json and the weights belong to different models, or the download is "
            "incomplete",
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """The model in a folder, or in a GGUF file. Nothing is read: errors come with the first use."""
    if not path.is_file():
        return FolderCheckpoint(path)
    # Imported here: it computes rotary frequencies with PyTorch, which folders do not need.
    from outrider.models.gguf.checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)


def config_document(checkpoint: Checkpoint, hint: str) -> JsonObject:
    """The `config.json` of a checkpoint. Raises CheckpointError with `hint` for a folder without
    one; an adapter (LoRA) is named as such."""
    if checkpoint.has(CONFIG):
        return checkpoint.document(CONFIG)
    if not checkpoint.has("adapter_config.json"):
        raise CheckpointError(f"{checkpoint.path} has no config.json.", hint=hint)
    adapter = checkpoint.document("adapter_config.json")
    base = adapter.text("base_model_name_or_path", "its base model")
    raise CheckpointError(
        f"{checkpoint.path} holds an adapter (LoRA) of {base}, and no model.",
        hint="merge it with its library, peft: AutoPeftModelForCausalLM.from_pretrained("
        "folder).merge_and_unload().save_pretrained(new_folder)",
    )


def read_sampling(path: Path) -> dict[str, float]:
    """The sampling that a checkpoint recommends, as fields of SamplingParams. Empty if it names
    none, or greedy decoding. Values that SamplingParams would refuse are left out."""
    checkpoint = open_checkpoint(path)
    generation = checkpoint.document(GENERATION) if checkpoint.has(GENERATION) else None
    values: Mapping[str, object] = {} if generation is None else generation.values
    if values.get("do_sample") is False:
        return {}
    found = dict[str, float]()
    for name in ADVISED:
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = max(int(value), 0) if name == "top_k" else float(value)
            with suppress(ConfigError):
                params_for_one(None, {name: number})
                found[name] = number
    if values.get("do_sample") is True or found.keys() & {"top_k", "top_p", "min_p"}:
        found.setdefault("temperature", 1.0)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The quantisation of a folder. Codes have one of the numbers of `bits`. `group_size` inputs
    share a scale (0: all of them), if the shapes of a layout do not show it. `zero_offset` is added
    to stored zeros (GPTQ's first version). `block` has the numbers of outputs and inputs that share
    a scale; None for other methods. With `has_blocks`, kernels may run on the codes
    (`Codes.blocks`): integers or floats, with inputs in order. `modules` are the modes and
    groups of MLX by module; "" is any other. `has_4_bit_floats`: some packed codes are floats."""

    where: str
    method: str
    bits: tuple[int, ...]
    group_size: int = 0
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    has_blocks: bool = False
    has_4_bit_floats: bool = False
    modules: Mapping[str, Grouping] = field(default_factory=dict[str, "Grouping"])


@dataclass(frozen=True, slots=True)
class Grouping:
    """A module's quantisation in MLX: `mode` is affine, mxfp4, mxfp8 or nvfp4."""

    mode: str
    group_size: int
