"""Models that are on this machine, and the folder of one, without reading any weights.

What a model needs, from its config.json alone: weights, KV memory, and how much of it fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from outrider.cache.capacity import free_bytes
from outrider.core.errors import CheckpointError
from outrider.core.spec import ModelSpec
from outrider.models.hf_config import read_config
from outrider.models.json_object import JsonObject
from outrider.models.loading import ALIASES, DTYPES, resolve


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that loads without the network, or the sentence that says why it does not."""

    name: str
    folder: Path
    num_bytes: int
    family: str
    refusal: str | None


def local_models() -> list[LocalModel]:
    """The embedded models, then what the hub cache holds."""
    found = [_inspect(name, resolve(name)) for name in ALIASES]
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return found
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        folders = {name: revision for revision in repo.revisions for name in revision.refs}
        newest = folders.get("main") or next(iter(repo.revisions), None)
        if repo.repo_type == "model" and newest is not None:
            found.append(_inspect(repo.repo_id, newest.snapshot_path))
    return found


def _inspect(name: str, folder: Path) -> LocalModel:
    from outrider.models.hf_config import read_config

    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    refusal: str | None = None if num_bytes else "no safetensors weights"
    family = "?"
    try:
        family = JsonObject.read(folder / "config.json").text("model_type")
        read_config(folder)
    except CheckpointError as error:
        refusal = str(error)
    return LocalModel(name, folder, num_bytes, family, refusal)


def read_spec(name: str, dtype: str = "auto") -> ModelSpec:
    """The sizes of a model by name; from the hub, only its small files are fetched."""
    folder = _folder(name)
    config = read_config(folder)
    kind = DTYPES.get(config.dtype if dtype == "auto" else dtype, torch.float32)
    return config.spec(name, bytes_per_weight=kind.itemsize, bytes_per_kv=kind.itemsize)


def read_notes(name: str) -> tuple[str, ...]:
    """What its loader would tell the user."""
    return read_config(_folder(name)).notes


def _folder(name: str) -> Path:
    """A folder with the model's config.json; of a hub model, that one file is all it needs."""
    if name in ALIASES or "/" not in name or Path(name).exists():
        return resolve(name)
    # As a snapshot: a single file that is not in the cache is asked for again and again, for half a
    # minute, where there is no network.
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HFValidationError

    repo, _, revision = name.partition("@")
    try:
        return Path(
            snapshot_download(repo, revision=revision or None, allow_patterns=["config.json"])
        )
    except (OSError, HFValidationError) as error:
        reason = (str(error) or "no reason given").splitlines()[0]
        raise CheckpointError(
            f"no model {name!r}: no such folder, and config.json is not to be had from the hub "
            f"({reason})",
            hint="`outrider models list` shows what is on this machine",
        ) from None


def describe(spec: ModelSpec) -> dict[str, Any]:
    """The spec and what follows from it."""
    return asdict(spec) | {
        "weights_bytes": spec.weight_bytes,
        "kv_per_1000_tokens_bytes": 1000 * spec.kv_bytes_per_token,
    }


def memory_fit(spec: ModelSpec, device: torch.device) -> Mapping[str, Any]:
    """How many KV tokens fit beside the weights in what `device` has free now."""
    free = free_bytes(device)
    left = max(0, free - spec.weight_bytes)
    return {
        "model": spec.name,
        "weights_bytes": spec.weight_bytes,
        "kv_per_1000_tokens_bytes": 1000 * spec.kv_bytes_per_token,
        "free_bytes": free,
        "num_tokens_that_fit": left // spec.kv_bytes_per_token,
        "num_windows_that_fit": left // (spec.kv_bytes_per_token * spec.max_tokens),
    }
