"""A server whose processes write down what they do: which files they open, whom they connect to.

Python's own audit events tell it, through a `sitecustomize` that the server's processes import.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from doubles.served import Served, served

_LOG = "events.txt"
_HOOK = """
import os, sys
_file = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_names = ("open", "socket.connect", "socket.getaddrinfo", "pickle.find_class", "subprocess.Popen")
def _hook(event, args):
    if event in _names:
        told = [str(one)[:300] for one in args[:3]]
        os.write(_file, (event + " " + repr(told) + "\\n").encode("utf-8", "replace"))
sys.addaudithook(_hook)
"""


@dataclass(slots=True)
class Watched:
    """`events` are those since the last call."""

    server: Served
    folder: Path
    _num_read: int = 0

    def all(self) -> list[str]:
        return (self.folder / _LOG).read_text(encoding="utf-8").splitlines()

    def events(self, *names: str) -> list[str]:
        lines = self.all()
        new = lines[self._num_read :]
        self._num_read = len(lines)
        return [line for line in new if line.partition(" ")[0] in names]


def hook_into(folder: Path) -> Path:
    """The file in which a Python that imports from `folder` writes what it does."""
    hook = _HOOK.format(log=str(folder / _LOG))
    (folder / "sitecustomize.py").write_text(hook, encoding="utf-8")
    return folder / _LOG


@contextmanager
def watched(folder: Path, *flags: str) -> Generator[Watched]:
    hook_into(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with served(*flags) as server:
            wait_until_ready(server)
            yield Watched(server, folder)


def wait_until_ready(server: Served) -> None:
    for _ in range(600):
        if server.client.get("/ready").status_code == 200:
            return
    raise TimeoutError("the server is not ready")
