"""What tools read: JSON on one line, and files that are whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from outrider.core.errors import MachineError


def json_line(value: object) -> str:
    """ASCII only, so that it survives any terminal and any pipe."""
    return json.dumps(value, allow_nan=False)


def check_writable(path: Path) -> None:
    """Raise MachineError now rather than after the work, if `path` cannot be written."""
    draft = _draft(path)
    try:
        if path.is_dir():
            raise MachineError(f"{path} is a folder.", hint="name a file with --output")
        draft.touch(exist_ok=False)
        draft.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Replace `path` in one step: a reader sees the old file or the new one, never a part. Pieces
    of a text are written as they come."""
    draft = _draft(path)
    try:
        with draft.open("w", encoding="utf-8") as stream:
            stream.writelines([text] if isinstance(text, str) else text)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise _unwritable(path, error) from None


def _draft(path: Path) -> Path:
    return path.parent / f".{path.name}.{os.getpid()}.part"


def _unwritable(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{path} cannot be written: {error.strerror or error}.",
        hint="name a file in a folder that exists and that you may write",
    )


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str] = ()) -> str:
    """Columns as wide as their content, never cut: readable, and easy to search."""
    cells = [[str(cell) for cell in row] for row in ([header, *rows] if header else rows)]
    if not cells:
        return ""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """Decimal units, as model hubs print them."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
