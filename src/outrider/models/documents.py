"""JSON documents of a model: files of its folder, or those that its GGUF file stands for."""

from __future__ import annotations

from pathlib import Path

from outrider.models.json_object import JsonObject, is_in_gguf


def read_document(path: Path) -> JsonObject:
    """Read `path`, which may lead into a GGUF file as if into a folder. Raises CheckpointError."""
    if not is_in_gguf(path):
        return JsonObject.read(path)
    # Imported here: it reads tensors too, which the readers of folders do not need.
    from outrider.models.gguf.folder import document

    return JsonObject(str(path.parent), document(path))
