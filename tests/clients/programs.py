"""Runs a client that is a program of its own, in a home of its own, with no way out."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from clients.tap import Tap, tapped

ROOT = Path(__file__).parents[2]
_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Program:
    """A program before a server. `home` is its user's; `work` is where it runs."""

    path: Path
    home: Path
    tap: Tap

    @property
    def work(self) -> Path:
        return self.home / "work"

    def run(self, *words: str, **environment: str) -> str:
        """What it prints. Fails where the program does, or where the server refuses a request."""
        done = self._ended(*words, **environment)
        assert done.returncode == 0, (done.stdout, done.stderr, self.tap.failed)
        assert not self.tap.failed
        return done.stdout

    def fail(self, *words: str, **environment: str) -> str:
        """What it prints of a request that the server refuses."""
        done = self._ended(*words, **environment)
        assert done.returncode != 0, done.stdout
        assert self.tap.failed
        return done.stdout

    def _ended(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        node = Path(shutil.which("node") or "/usr/bin/node").parent
        environment |= {"PATH": f"{node}:{os.defpath}", "HOME": str(self.home), "TERM": "dumb"}
        environment |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), self.tap.url)
        environment["NO_PROXY"] = "127.0.0.1"
        return subprocess.run(
            [str(self.path), *words],
            env=environment,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )

    def settings(self, name: str, text: str) -> Path:
        """A file of its settings."""
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
        return file


@contextmanager
def program(path: str, home: Path, url: str) -> Generator[Program]:
    """One of .clients, whose requests to the server at `url` can be looked at."""
    file = ROOT / ".clients" / path
    if not file.exists():
        pytest.skip(f"no {file}: scripts/client_tests installs it")
    with tapped(url) as tap:
        found = Program(file, home, tap)
        found.work.mkdir(parents=True)
        yield found
