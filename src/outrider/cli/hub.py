"""Models that are on this machine, and the folder of one, without reading any weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from outrider.core.errors import CheckpointError
from outrider.models.json_object import JsonObject
from outrider.models.loading import ALIASES, resolve


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
