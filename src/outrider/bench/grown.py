"""A file of JSON lines that grows while a run measures, and outlives it.

A run may be stopped in the midst of a line: what it left is dropped with the next lines that are
added, if it is the beginning of one of ours. Nothing else is ever cut off. Where the file is not as
this run left it, somebody else writes there, and nothing more is added: lines of two runs would say
of each other's what is not so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import MachineError

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
        data = path.read_bytes() if path.exists() else b""
        whole = data.rfind(b"\n") + 1
        end = data[whole:]
        file = cls(path, num_whole=whole, num_bytes=len(data))
        return file, data[:whole].split(b"\n")[:-1], end.startswith(_START[: len(end)])

    def add(self, lines: bytes) -> None:
        """Append whole lines, making the folder if need be. Raises OSError, and MachineError if
        somebody else wrote to the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            if file.seek(0, 2) != self.num_bytes:
                raise MachineError(
                    f"{self.path} has changed since this run last wrote to it, so nothing was "
                    "added.",
                    hint="let one run at a time write into a folder; the same command goes on",
                )
            if self.num_bytes > self.num_whole:
                file.truncate(self.num_whole)
            file.write(lines)
        self.num_whole = self.num_bytes = self.num_whole + len(lines)
