"""The lines of a batch: of a file of JSON lines, or the rows of a parquet file as such lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from outrider.api.batch_files import RawLine, raw_line, raw_lines
from outrider.core.errors import ConfigError, MachineError


def lines_of(path: Path) -> Iterator[RawLine]:
    """Raises MachineError for a file that cannot be read."""
    return _rows(path) if path.suffix == ".parquet" else raw_lines(path)


def _rows(path: Path) -> Iterator[RawLine]:
    """A row is a line of its columns; one that is null says nothing."""
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise MachineError(
            f"{path} is a parquet file, and no reader of such (pyarrow) is installed.",
            hint="pip install 'outrider[data]'",
        ) from None
    number = 0
    try:
        for block in parquet.ParquetFile(path).iter_batches(1024):
            for row in block.to_pylist():
                number += 1
                told = {name: value for name, value in row.items() if value is not None}
                yield raw_line(number, json.dumps(told, ensure_ascii=False).encode())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}, row {number}: {error}.", hint="columns as the keys of a line: prompt, seed"
        ) from None
