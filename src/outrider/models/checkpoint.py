"""A model's source: a Hugging Face folder or a GGUF file, by its documents, weight files and notes.

`open_checkpoint` tells the two formats apart, once, where a path is read; all readers of models
take a `Checkpoint`. Opening one reads nothing yet. No tensors: weights.py reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from outrider.core.errors import CheckpointError, ConfigError, given
from outrider.core.params import ADVISED, params_for_one
from outrider.core.spec import Scheme
from outrider.models.json_object import JsonObject

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outrider.kernels.plan import BlockRows
    from outrider.plugins.published.tensors import Quantised

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


_SCHEME_KEY = "quantization_config"
# MLX has a key of its own.
_MLX_KEY = "quantization"
# Old folders of GPTQ have a file of its own for the config.
_GPTQ_FILE = "quantize_config.json"
# ModelOpt's file, which newer versions repeat in config.json.
_MODELOPT_FILE = "hf_quant_config.json"


def scheme_of(raw: JsonObject) -> Scheme | None:
    """The scheme of a config.json's weights; None if they are not quantised.

    Raises CheckpointError for an unsupported method or setting.
    """
    text = raw.child("text_config")
    mlx = raw.values.get(_MLX_KEY)
    if isinstance(mlx, dict) and "bits" in mlx:
        return _read_method(given(raw.child(_MLX_KEY), "settings of MLX"), "mlx")
    found = raw.child(_SCHEME_KEY) or (text.child(_SCHEME_KEY) if text else None)
    return None if found is None else _read_method(found)


def scheme_in(checkpoint: Checkpoint) -> Scheme | None:
    """The scheme of a model or of heads; None for a GGUF file, whose blocks are no such method."""
    if checkpoint.is_gguf or not checkpoint.has(CONFIG):
        return None
    config = checkpoint.document(CONFIG)
    if not config.has(_SCHEME_KEY) and checkpoint.has(_GPTQ_FILE):
        return _read_method(checkpoint.document(_GPTQ_FILE), "gptq")
    if not config.has(_SCHEME_KEY) and checkpoint.has(_MODELOPT_FILE):
        own = checkpoint.document(_MODELOPT_FILE).child("quantization")
        return None if own is None else _read_method(own, "modelopt")
    return scheme_of(config)


def _read_method(raw: JsonObject, method: str = "") -> Scheme:
    from outrider.plugins.published.methods import read_method

    return read_method(raw, method)


def quantised_in(
    checkpoint: Checkpoint, stored: Collection[str], read: Callable[[str], Tensor]
) -> Quantised | None:
    """The quantised matrices of a checkpoint; None if it has no scheme. `stored` are the names of
    its tensors, and `read` returns a tensor by its name."""
    scheme = scheme_in(checkpoint)
    if scheme is None:
        return None
    from outrider.plugins.published.tensors import Quantised

    return Quantised(scheme, stored, read)
