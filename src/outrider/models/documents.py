"""JSON documents of a model: files of its folder, or those that its GGUF file stands for."""

from __future__ import annotations

from pathlib import Path

from outrider.models.json_object import JsonObject, is_in_gguf


def read_document(path: Path) -> JsonObject:
    """`path` may lead into a GGUF file as if it were the folder. Raises CheckpointError."""
    if not is_in_gguf(path):
        return JsonObject.read(path)
    # Imported here: it reads tensors too, and whoever reads folders needs none.
    from outrider.models.gguf.folder import document

    return JsonObject(str(path.parent), document(path))
