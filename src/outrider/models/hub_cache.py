"""What the local cache of the Hugging Face hub has, read from its documented folders.

`models--ORG--NAME/` has a model: `refs/main` names the commit that the branch means, and
`snapshots/COMMIT/` has its files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.core.files import FileKind, read_text

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model by its hub id, and the folder of its newest commit; None where it has none. Not all
    of its files need be there."""

    name: str
    snapshot: Path | None


def cached_models() -> list[CachedModel]:
    """By their names."""
    # Imported here: a local model needs no hub client.
    from huggingface_hub import constants

    stores = sorted(Path(constants.HF_HUB_CACHE).expanduser().glob(f"{_PREFIX}*/"))
    return [
        CachedModel(store.name.removeprefix(_PREFIX).replace("--", "/", 1), _newest(store))
        for store in stores
    ]


def _newest(store: Path) -> Path | None:
    """What the branch `main` means there, or else any commit."""
    snapshots = store / "snapshots"
    try:
        return snapshots / read_text(store / "refs" / "main", FileKind.SYSTEM).strip()
    except (OSError, ValueError):
        return next(iter(sorted(snapshots.glob("*/"))), None)
