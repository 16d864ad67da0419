"""A file of JSON lines that grows while a run measures, and outlives it.

A run may be stopped in the midst of a line: what it left is dropped with the next lines that are
added, if it is the beginning of one of ours. Nothing else is ever cut off. Where the file is not as
this run left it, somebody else writes there, and nothing more is added: lines of two runs would say
of each other's what is not so.

Results folders have one such file each; what cannot be gone on with is refused in the same words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.records import RecordError, parse
from outrider.core.errors import ConfigError, MachineError
from outrider.core.files import Kind, read_bytes

# What every line of ours begins with.
_START = b'{"record": "'


@dataclass(slots=True)
class GrownFile:
    """`num_whole` bytes of the file at `path` are whole lines, `num_bytes` are all that there were
    when it was last seen."""

    path: Path
    num_whole: int = 0
    num_bytes: int = 0

    @classmethod
    def read(cls, path: Path) -> tuple[GrownFile, list[bytes], bool]:
        """The file, its whole lines, and whether what follows these can be half a line of ours.
        Raises OSError."""
        data = read_bytes(path, Kind.RESULTS) if path.exists() else b""
        whole = data.rfind(b"\n") + 1
        end = data[whole:]
        file = cls(path, num_whole=whole, num_bytes=len(data))
        return file, data[:whole].split(b"\n")[:-1], end.startswith(_START[: len(end)])

    @property
    def torn(self) -> bool:
        """Whether it ends in half a line, which the next ones take the place of."""
        return self.num_bytes > self.num_whole

    def add(self, lines: bytes) -> None:
        """Append whole lines, making the folder if need be. Raises OSError, and MachineError if
        somebody else wrote to the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer, so that it is known how much was written before a disk was full.
        with self.path.open("ab", buffering=0) as file:
            if file.seek(0, 2) != self.num_bytes:
                raise MachineError(
                    f"{self.path} has changed since this run last wrote to it, so nothing was "
                    "added.",
                    hint="let one run at a time write into a folder; the same command goes on",
                )
            if self.torn:
                file.truncate(self.num_whole)
                self.num_bytes = self.num_whole
            left = memoryview(lines)
            while left:
                num_written = file.write(left)
                self.num_bytes += num_written
                left = left[num_written:]
        self.num_whole = self.num_bytes


def read_records(path: Path, take: Callable[[dict[str, Any]], None]) -> GrownFile:
    """The file of a results folder, its records handed to `take` in order; nothing is changed.

    Raises ConfigError with the number of the first line that this version did not write, which is
    what a RecordError of `take` means, and MachineError if the file cannot be read."""
    try:
        file, lines, end_is_ours = GrownFile.read(path)
    except OSError as error:
        raise _unusable(path.parent, error) from None
    for number, line in enumerate(lines, start=1):
        try:
            take(parse(line.decode()))
        except (RecordError, UnicodeDecodeError) as error:
            found = f"a line {number} that this version did not write ({error})"
            raise refusal(path.parent, found) from None
    if not end_is_ours:
        raise refusal(path.parent, f"a line {len(lines) + 1} that this version did not write")
    return file


def add_records(file: GrownFile, records: Iterable[Mapping[str, object]]) -> None:
    """Append records to the file of a results folder, all or none; without any, see that it can be
    written. Raises MachineError."""
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    try:
        file.add(text.encode())
    except OSError as error:
        raise _unusable(file.path.parent, error) from None


def refuse_others(path: Path, allowed: Collection[str] = ()) -> None:
    """Raises ConfigError if the folder of `path` has other files than `allowed`, and not this one:
    results that nobody knows the circumstances of, or somebody else's. MachineError if it cannot be
    read."""
    folder = path.parent
    try:
        if path.exists() or not folder.exists():
            return
        if not folder.is_dir() or any(other.name not in allowed for other in folder.iterdir()):
            raise refusal(folder, f"other files and no {path.name}")
    except OSError as error:
        raise _unusable(folder, error) from None


def refusal(folder: Path, found: str) -> ConfigError:
    """Of a results folder that holds what a run must not be mixed with."""
    return ConfigError(
        f"{folder} holds {found}. They are not mixed, and nothing was changed.",
        hint=f"choose another folder, such as --output-dir {folder}-2",
    )


def _unusable(folder: Path, error: OSError) -> MachineError:
    return MachineError(
        f"the results folder {folder} cannot be used: {error.strerror or error}.",
        hint="name a folder that you may write with --output-dir",
    )
