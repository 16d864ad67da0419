"""Models in the local cache of the Hugging Face hub, read from its documented folders.

`models--ORG--NAME/` has a model: `refs/main` names the commit of the branch `main`, and
`snapshots/COMMIT/` has its files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.core.files import FileKind, read_text

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
