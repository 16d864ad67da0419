"""Runs a client that is a program of its own, in a home of its own, with no way out."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from clients.recording import write_recording
from clients.tap import Tap, tapped

ROOT = Path(__file__).parents[2]
_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Program:
    """A program before a server. `home` is its user's; `work` is where it runs."""

    path: Path
    home: Path
    tap: Tap
    records: bool

    @property
    def work(self) -> Path:
        return self.home / "work"

    @property
    def environment(self) -> dict[str, str]:
        node = Path(shutil.which("node") or "/usr/bin/node").parent
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), self.tap.url)
        home = {"PATH": f"{node}:{os.defpath}", "HOME": str(self.home), "TERM": "dumb"}
        return home | proxies | {"NO_PROXY": "127.0.0.1"}

    def run(self, *words: str, **environment: str) -> str:
        """What it prints. Fails where the program does, or where the server refuses a request."""
        done = self._ended(*words, **environment)
        assert done.returncode == 0, (done.stdout, done.stderr, self.tap.failed)
        assert not self.tap.failed
        return done.stdout

    def fail(self, *words: str, **environment: str) -> str:
        """What it prints of a request that the server refuses."""
        printed = self.give_up(*words, **environment)
        assert self.tap.failed
        return printed

    def give_up(self, *words: str, **environment: str) -> str:
        """What it prints where it ends in an error, though the server refuses nothing."""
        done = self._ended(*words, **environment)
        assert done.returncode != 0, done.stdout
        return done.stdout

    def _ended(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.path), *words],
            env=self.environment | environment,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )

    @contextmanager
    def serving(self, *words: str, ready: str, **environment: str) -> Generator[None]:
        """While the program, a server itself, runs; once it answers at the URL `ready`."""
        log = self.home / "log.txt"
        with (
            log.open("wb") as out,
            subprocess.Popen(
                [str(self.path), *words],
                env=self.environment | environment,
                cwd=self.work,
                stdout=out,
                stderr=out,
            ) as process,
        ):
            try:
                wait_for(ready, _SECONDS)
                yield
            finally:
                process.kill()

    def settings(self, name: str, text: str) -> Path:
        """A file of its settings."""
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
        return file

    def record(self, name: str) -> None:
        """Keep what the client asked, where recordings are made (`--record`)."""
        if self.records:
            write_recording(name, self.tap.kept, str(self.home))


def wait_for(url: str, seconds: float) -> None:
    """Until somebody answers there."""
    until = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


@contextmanager
def program(path: str, home: Path, url: str, *, records: bool) -> Generator[Program]:
    """One of .clients, whose requests to the server at `url` can be looked at."""
    file = ROOT / ".clients" / path
    if not file.exists():
        pytest.skip(f"no {file}: scripts/client_tests installs it")
    with tapped(url) as tap:
        found = Program(file, home, tap, records)
        found.work.mkdir(parents=True)
        yield found
