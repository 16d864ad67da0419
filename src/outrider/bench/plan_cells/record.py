"""The file of a study: one JSON line for whatever became known, appended as soon as it did.

The first line is the draw: the seed, and every cell that it gave. Then come lines of kind "run",
for the circumstances and the calibration of what follows, and for each cell a "prediction" before
its "measured". A study that was stopped goes on in its file: half a line at the end is dropped, and
a cell that was measured is not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.plan_cells.draw import Cell
from outrider.bench.records import RecordError, parse
from outrider.core.errors import ConfigError, MachineError

SCHEMA = "outrider-plan-cells/1"
KINDS = ("draw", "run", "prediction", "measured", "ladder")
# What every line of ours begins with.
_START = b'{"record": "'


@dataclass(slots=True)
class Study:
    """What the file at `path` says so far, line by line."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @classmethod
    def open(cls, path: Path) -> Study:
        """Raises ConfigError for a file that is none of ours, MachineError for one that cannot be
        used."""
        study = cls(path)
        if not path.exists():
            return study
        try:
            data = path.read_bytes()
            whole = data.rfind(b"\n") + 1
            study.lines = [parse(line) for line in data[:whole].decode("utf-8").splitlines()]
            if not _is_ours(study.lines, data[whole:]):
                raise _foreign(path)
            # Half a line that a stop left; nothing else is ever cut off.
            if whole < len(data):
                with path.open("r+b") as stream:
                    stream.truncate(whole)
        except OSError as error:
            raise _unusable(path, error) from None
        except (RecordError, UnicodeDecodeError):
            raise _foreign(path) from None
        return study

    def cells_drawn(self, cells: Sequence[Cell], facts: Mapping[str, object]) -> None:
        """Write the draw, or find that the file is of the same one. Raises ConfigError if not."""
        drawn = json.loads(json.dumps({"cells": [asdict(cell) for cell in cells], **facts}))
        if not self.lines:
            self.add("draw", {"schema": SCHEMA, **drawn})
            return
        head = {name: self.lines[0].get(name) for name in drawn}
        if head != drawn:
            raise ConfigError(
                f"{self.path} is of other cells, and nothing was changed.",
                hint="name another file with --output, or ask for the same cells, tier and seed",
            )

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["record"] == kind]

    def by_cell(self, kind: str) -> dict[int, dict[str, Any]]:
        """The newest line of each cell."""
        return {line["cell"]: line for line in self.of_kind(kind)}

    def add(self, kind: str, values: Mapping[str, object]) -> None:
        """Append a line. Raises MachineError."""
        line = json.loads(json.dumps({"record": kind, **values}, allow_nan=False))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise _unusable(self.path, error) from None
        self.lines.append(line)


def _is_ours(lines: Sequence[Mapping[str, Any]], end: bytes) -> bool:
    """Whether a file has such lines, and what follows the last of them."""
    if not end.startswith(_START[: len(end)]):
        return False
    heads = [line.get("schema") for line in lines[:1]]
    return heads == [SCHEMA] * len(heads) and all(line.get("record") in KINDS for line in lines)


def _unusable(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{path} cannot be used: {error.strerror or error}.",
        hint="name a file in a folder that you may write, with --output",
    )


def _foreign(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is no study of predictions of this version, and nothing was changed.",
        hint="name another file with --output",
    )
