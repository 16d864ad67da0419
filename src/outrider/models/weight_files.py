"""The files that hold a folder's weights, found by name. What could run code is refused."""

from __future__ import annotations

from pathlib import Path

from outrider.core.errors import CheckpointError
from outrider.models.gguf.folder import parts_of
from outrider.models.json_object import JsonObject

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Medusa heads are published under this name.
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def weight_files(folder: Path) -> list[Path]:
    """The files with weights of `folder`, or an error that says what is there instead."""
    if folder.is_file():
        return list(parts_of(folder))
    for name in (WEIGHTS, MEDUSA_WEIGHTS):
        if (folder / name).exists():
            return [folder / name]
    if (folder / INDEX).exists():
        return _shards(folder)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only as {pickles[0]}, a format that can run code when it "
            "is read; Outrider reads safetensors alone.",
            hint="convert it where you trust it: transformers' "
            "from_pretrained(folder) and then save_pretrained(new_folder)",
        )
    raise CheckpointError(
        f"{folder} has neither {WEIGHTS} nor {INDEX}.",
        hint="is the download complete? Pickle files (.bin) are never fetched from the hub",
    )


def _shards(folder: Path) -> list[Path]:
    index = JsonObject.read(folder / INDEX)
    places = index.child("weight_map")
    if not places or not places.values:
        raise CheckpointError(f"{index.where}: weight_map is missing or empty.")
    names = sorted({places.text(name) for name in places.values})
    for name in names:
        # A shard lies beside its index; anything with a separator could name any file.
        if not name.endswith(".safetensors") or set(name) & set("/\\:\0"):
            raise CheckpointError(
                f"{places.where} names {name!r}, which is not a safetensors file of this folder."
            )
    return [folder / name for name in names]
