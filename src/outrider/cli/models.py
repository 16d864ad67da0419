"""`outrider models`: lists models and shows their sizes.

`load`, `ollama` and `ping`, which test a model or a server, and `inflate` and `export`, which write
models, are in the lab. Sizes come from config.json alone, without reading weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.api.found import num_weight_bytes
from outrider.cache.pages import free_bytes
from outrider.cli.call import Call, needed
from outrider.cli.options import JsonOption
from outrider.cli.output import answer, screen_table
from outrider.core.errors import CheckpointError
from outrider.core.fields import size
from outrider.core.spec import ModelSpec
from outrider.kernels.operators import DTYPES
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.families import read_config
from outrider.models.gguf.reader import gguf_in
from outrider.models.loading import ALIASES, HEAD_ALIASES, made_models, resolve, shipped_models
from outrider.models.stores import cached_models, stored_models
from outrider.models.weights import stored_in


def list_models(call: Call[JsonOption]) -> int:
    found = local_models()
    records = [asdict(model) | {"folder": str(model.folder)} for model in found]
    toys = dict.fromkeys(ALIASES, "ready (a toy)")
    rows = [
        (m.name, m.family, size(m.num_bytes), m.refusal or toys.get(m.name, _ready(m)))
        for m in found
    ]
    answer(
        call.options, records, screen_table(rows, header=("model", "family", "weights", "state"))
    )
    return 0


def _ready(model: LocalModel) -> str:
    return f"ready; {model.where}" if model.where else "ready"


def inspect_model(call: Call[JsonOption]) -> int:
    name = needed(call, "MODEL")
    facts, notes = describe(read_spec(name)), read_notes(name)
    rows = [
        (key.replace("_", " "), size(value) if key.endswith("_bytes") else value)
        for key, value in facts.items()
    ]
    lines = [screen_table(rows), *(f"note: {note}" for note in notes)]
    answer(call.options, facts | {"notes": notes}, "\n".join(lines))
    return 0


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be loaded without the network, or the reason why it cannot. `where` is the
    model's name in the program that stores it."""

    name: str
    folder: Path
    num_bytes: int
    family: str
    refusal: str | None
    where: str = ""


def local_models() -> list[LocalModel]:
    """Return embedded models, then the hub cache's, then those made here, then others' GGUF."""
    embedded = [_inspect(name, resolve(name)) for name in shipped_models()]
    made = [_inspect(str(folder), folder, folder.name) for folder in made_models()]
    stored = [_inspect(str(file), file, where) for file, where in stored_models()]
    cached = [
        _inspect(one.name, one.snapshot) for one in cached_models() if one.snapshot is not None
    ]
    return [*embedded, *cached, *made, *stored]


def _inspect(name: str, found: Path, where: str = "") -> LocalModel:
    try:
        folder = gguf_in(found) or found
        num_bytes = num_weight_bytes(folder)
    except CheckpointError as error:
        return LocalModel(name, found, 0, "?", str(error), where)
    refusal: str | None = None if num_bytes else "no safetensors weights"
    family = "?"
    try:
        family = open_checkpoint(folder).document(CONFIG).text("model_type")
        read_config(folder)
    except CheckpointError as error:
        refusal = str(error)
    return LocalModel(name, folder, num_bytes, family, refusal, where)


def read_spec(name: str, dtype: str = "auto", *, on_cpu: bool = True) -> ModelSpec:
    """Return the sizes of a model by name; of a hub model, only small files are fetched."""
    folder = small_files(name)
    config = read_config(folder)
    kind = DTYPES.get(config.dtype if dtype == "auto" else dtype, torch.float32)
    spec = config.spec(name, bytes_per_weight=kind.itemsize, bytes_per_kv=kind.itemsize)
    # On CPUs, native kernels compute with the blocks of a GGUF file as they are.
    if dtype != "auto" or not open_checkpoint(folder).is_gguf or not on_cpu:
        return spec
    return replace(spec, stored_bytes=stored_in(folder).held_bytes)


def read_notes(name: str) -> tuple[str, ...]:
    """Return the notes that the model's loader would show."""
    return read_config(small_files(name)).notes


def small_files(name: str, *patterns: str) -> Path:
    """Return the folder of a model with its configuration and the files of `patterns`. For a hub
    model that is not cached, no weights are downloaded. Raises CheckpointError."""
    if name in (*ALIASES, *HEAD_ALIASES) or "/" not in name or Path(name).exists():
        return resolve(name)
    # As a snapshot: without a network, the client retries a single uncached file for half a minute.
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HFValidationError

    repo, _, revision = name.partition("@")
    wanted = ["config.json", *patterns]
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=wanted))
    except (OSError, HFValidationError) as error:
        reason = (str(error) or "no reason given").splitlines()[0]
        raise CheckpointError(
            f"no model {name!r}: no such folder, and its {wanted[-1]} cannot be fetched from the "
            f"hub ({reason})",
            hint="`outrider models list` shows what is on this machine",
        ) from None


def describe(spec: ModelSpec) -> dict[str, Any]:
    """Return the spec and the sizes that follow from it."""
    return asdict(spec) | {
        "weights_bytes": spec.weight_bytes,
        "kv_per_1000_tokens_bytes": 1000 * spec.kv_bytes_per_token,
    }


def memory_fit(spec: ModelSpec, device: torch.device) -> Mapping[str, Any]:
    """Return how many KV tokens, in all layers, and how many texts as long as the window fit into
    the free memory with the weights. On a CPU, local layers only store their own window."""
    free = free_bytes(device)
    left = max(0, free - spec.weight_bytes)
    local = spec.window if spec.local_layers and device.type == "cpu" else spec.max_tokens
    return {
        "model": spec.name,
        "weights_bytes": spec.weight_bytes,
        "kv_per_1000_tokens_bytes": 1000 * spec.kv_bytes_per_token,
        "free_bytes": free,
        "num_tokens_that_fit": left // spec.kv_bytes_per_token,
        "num_windows_that_fit": left // spec.arena_bytes(spec.max_tokens, local),
    }
