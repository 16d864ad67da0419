"""llama.cpp in a process of its own (peer.py), asked one line at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

_HERE = Path(__file__).parent


class PeerError(Exception):
    """The library ended its process."""


class PeerClient:
    """`scratch` is a folder for files that both sides read."""

    def __init__(self, source: Path, libraries: Path, scratch: Path) -> None:
        self.scratch = scratch
        variable = f"LLAMA_CPP_LIB_PATH={libraries}"
        self._command = ["env", variable, sys.executable, str(_HERE / "peer.py"), str(source)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def open(self, path: Path, *, vocabulary: bool = True) -> bool:
        """Whether the library reads the file."""
        return self._ask("open", str(path), vocabulary)

    def encode(self, texts: Sequence[str], *, add: bool = True) -> list[list[int]]:
        return self._ask("encode", list(texts), add, True)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        return [bytes.fromhex(piece) for piece in self._ask("pieces", list(ids))]

    def logits(self, ids: Sequence[int]) -> list[list[float]]:
        return self._ask("logits", list(ids))

    def _ask(self, *request: object) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        line = process.stdout.readline()
        if not line:
            self._end()
            raise PeerError(f"llama.cpp ended at {request[0]}")
        return json.loads(line)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
