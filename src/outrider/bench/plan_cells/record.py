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
from outrider.bench.store import GrownFile, RecordError, parse
from outrider.core.errors import ConfigError, MachineError

SCHEMA = "outrider-plan-cells/1"
KINDS = ("draw", "run", "prediction", "measured", "ladder")


@dataclass(slots=True)
class Study:
    """What the file at `path` says so far, line by line."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    file: GrownFile = field(init=False)

    def __post_init__(self) -> None:
        self.file = GrownFile(self.path)

    @classmethod
    def open(cls, path: Path) -> Study:
        """Raises ConfigError for a file that is none of ours, MachineError for one that cannot be
        used."""
        study = cls(path)
        try:
            study.file, lines, end_is_ours = GrownFile.read(path)
            study.lines = [parse(line.decode()) for line in lines]
        except OSError as error:
            raise _unusable(path, error) from None
        except (RecordError, UnicodeDecodeError):
            raise _foreign(path) from None
        if not (end_is_ours and _are_ours(study.lines)):
            raise _foreign(path)
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
        """Append a line. Raises MachineError, also if somebody else wrote to the file."""
        line = json.loads(json.dumps({"record": kind, **values}, allow_nan=False))
        try:
            self.file.add(f"{json.dumps(line)}\n".encode())
        except OSError as error:
            raise _unusable(self.path, error) from None
        self.lines.append(line)


def _are_ours(lines: Sequence[Mapping[str, Any]]) -> bool:
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
