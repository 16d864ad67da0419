"""Models that are on this machine: in the cache of the Hugging Face hub, Ollama's and LM Studio's.

The hub's cache has a folder `models--ORG--NAME/` for each model: `refs/main` names the commit of
the branch `main`, and `snapshots/COMMIT/` has its files. Ollama has a manifest for each name and
tag, `manifests/HOST/OWNER/NAME/TAG`, whose layer of type `model` names a file of `blobs/` by its
hash. LM Studio has `PUBLISHER/REPOSITORY/FILE.gguf`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from outrider.core.env import ollama_models
from outrider.core.errors import CheckpointError
from outrider.core.files import FileKind, read_json, read_text
from outrider.models.gguf.reader import parts_of

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model's hub id and the folder of its newest commit, if any; files may be missing."""

    name: str
    snapshot: Path | None


def cached_models() -> list[CachedModel]:
    """The models in the cache, sorted by name."""
    # Imported here: a local model needs no hub client.
    from huggingface_hub import constants

    stores = sorted(Path(constants.HF_HUB_CACHE).expanduser().glob(f"{_PREFIX}*/"))
    return [
        CachedModel(store.name.removeprefix(_PREFIX).replace("--", "/", 1), _newest(store))
        for store in stores
    ]


def _newest(store: Path) -> Path | None:
    """The folder of the commit of `main`, or else of any commit."""
    snapshots = store / "snapshots"
    try:
        return snapshots / read_text(store / "refs" / "main", FileKind.SYSTEM).strip()
    except (OSError, ValueError):
        return next(iter(sorted(snapshots.glob("*/"))), None)


_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_OLLAMA = (".ollama/models", "/usr/share/ollama/.ollama/models")
_LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")
# Limit for one store, so that a link to a whole disk does not delay a command.
_MOST = 1000


def stored_models() -> list[tuple[Path, str]]:
    """The first file of each model, with its name; an unreadable store counts as empty."""
    try:
        home = Path.home()
    except RuntimeError:
        return []
    own = ollama_models()
    found: dict[Path, str] = {}
    with suppress(OSError):
        for store in (Path(own),) if own else tuple(home / name for name in _OLLAMA):
            found |= islice(_of_ollama(store), _MOST)
        for name in _LM_STUDIO:
            found |= islice(_of_lm_studio(home / name), _MOST)
    return sorted(found.items(), key=lambda item: item[1])


def _of_ollama(store: Path) -> Iterator[tuple[Path, str]]:
    for manifest in sorted(islice((store / "manifests").glob("*/*/*/*"), _MOST)):
        *_, owner, name, tag = manifest.parts
        for digest in _model_layers(manifest):
            blob = store / "blobs" / f"sha256-{digest}"
            if blob.is_file():
                known = name if owner == "library" else f"{owner}/{name}"
                yield blob, f"{known}:{tag} of Ollama"


def _model_layers(manifest: Path) -> Iterator[str]:
    try:
        loaded = read_json(manifest, FileKind.CONFIG)
    except (OSError, ValueError):
        return
    layers = cast("dict[str, Any]", loaded).get("layers") if isinstance(loaded, dict) else None
    for layer in cast("list[Any]", layers) if isinstance(layers, list) else []:
        entry = cast("dict[str, Any]", layer) if isinstance(layer, dict) else {}
        digest = _DIGEST.fullmatch(str(entry.get("digest")))
        if entry.get("mediaType") == _MODEL_LAYER and digest:
            yield digest[1]


def _of_lm_studio(store: Path) -> Iterator[tuple[Path, str]]:
    for file in sorted(islice(store.glob("*/*/*.gguf"), _MOST)):
        if not file.name.startswith("mmproj"):
            with suppress(CheckpointError):
                yield parts_of(file)[0], f"{file.parent.name}/{file.name} of LM Studio"
