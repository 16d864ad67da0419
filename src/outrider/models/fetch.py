"""Fetch a model's files into the hub's local cache; a download that was stopped goes on.

Large files come through here, one after the other, so that what has come of them is kept and
compared with their hash. `huggingface_hub` fetches the small ones and enters all into its cache.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import (
    constants,
    hf_hub_url,
    snapshot_download,  # pyright: ignore[reportUnknownVariableType]
)
from huggingface_hub.file_download import http_get  # pyright: ignore[reportUnknownVariableType]
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
)
from huggingface_hub.utils import tqdm as hub_bar

from outrider.core.errors import CheckpointError, MachineError
from outrider.core.files import open_regular
from outrider.models.hub import HubFile, HubModel, explained

Report = Callable[[int], object]
# The hub serves larger files by another protocol only, which its own client speaks.
_MAX_BYTES = 50_000_000_000


def check_room(models: Sequence[HubModel]) -> int:
    """The bytes that are free where `models` go. Raises MachineError if they do not fit."""
    folder = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free, wanted = shutil.disk_usage(there).free, sum(model.bytes_to_fetch() for model in models)
    if wanted > free:
        raise MachineError(
            f"{wanted / 1e9:.1f} GB are to be fetched, and {folder} has {free / 1e9:.1f} GB free.",
            hint="make room (`hf cache ls` shows what is there), or set HF_HOME to a folder on a "
            "larger disk",
        )
    return free


def fetch(model: HubModel, report: Report) -> Path:
    """Fetch what is missing; `report` hears how many bytes came since it last did, and a negative
    number where some have to come again.

    Returns the folder of the model. Raises CheckpointError and MachineError; what has come stays.
    """
    with explained(model.name):
        for file in model.missing():
            if not file.large or file.num_bytes > _MAX_BYTES:
                continue
            if not model.blob(file).exists():
                _fetch_large(model, file, report)
        small = [file for file in model.missing() if not model.blob(file).exists()]
        # By its name, not its commit, so that the cache knows what the name means.
        found = snapshot_download(
            model.name.repo,
            revision=model.name.revision,
            allow_patterns=[file.name for file in model.files],
            tqdm_class=_Hidden,
        )
    folder = Path(found)
    _check_whole(model, folder)
    report(sum(file.num_bytes for file in small))
    return folder


def _check_whole(model: HubModel, folder: Path) -> None:
    """Raises CheckpointError if `folder` is not what was looked up: the name may mean another
    commit by now, and where the hub is not heard of again its client takes what the cache has."""
    if folder.name != model.commit:
        raise CheckpointError(
            f"{model.name} changed on the hub while it was fetched, from commit "
            f"{model.commit[:12]} to {folder.name[:12]}.",
            hint="repeat the command, which goes on with the newer one",
        )
    absent = [file.name for file in model.files if not (folder / file.name).exists()]
    if absent:
        raise CheckpointError(
            f"{model.name} did not come as a whole: {absent[0]} is missing"
            + (f", and {len(absent) - 1} more." if absent[1:] else "."),
            hint="repeat the command, which fetches what is missing",
        )


def _fetch_large(model: HubModel, file: HubFile, report: Report) -> None:
    store, blob, part = model.name.store, model.blob(file), model.part(file)
    part.parent.mkdir(parents=True, exist_ok=True)
    lock = store.parent / ".locks" / store.name / f"{file.blob}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    # The client's own lock: whoever fetches the same file with it waits for us.
    with WeakFileLock(lock):
        if blob.exists():
            return
        if part.exists() and part.stat().st_size > file.num_bytes:
            # Of a server that sent all again and a client that did not notice.
            part.unlink()
        with part.open("ab") as stream:
            http_get(
                hf_hub_url(model.name.repo, file.name, revision=model.commit),
                stream,
                resume_size=stream.tell(),
                headers=build_hf_headers(),
                expected_size=file.num_bytes,
                displayed_filename=file.name,
                _tqdm_bar=cast("Any", _Bytes(report)),
            )
        if _sha256(part) != file.blob:
            part.unlink()
            raise CheckpointError(
                f"{file.name} of {model.name} came damaged: its hash is not the hub's.",
                hint="repeat the command, which fetches that file again",
            )
        part.replace(blob)


def _sha256(path: Path) -> str:
    with open_regular(path) as stream:
        digest = hashlib.sha256()
        while piece := stream.read(2**20):
            digest.update(piece)
        return digest.hexdigest()


class _Hidden(hub_bar):
    """The client's own bars, not drawn."""

    def __init__(self, *args: Any, **options: Any) -> None:
        hidden = options | {"disable": True}
        super().__init__(*args, **hidden)  # pyright: ignore[reportUnknownMemberType]


class _Bytes:
    """What the client takes for a bar, and tells how many bytes came."""

    def __init__(self, report: Report) -> None:
        self.update = report
