"""A real server in a child process: `outrider serve` on a port of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from doubles import warm_python

SECONDS = 240


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready, and a client of it."""

    process: subprocess.Popen[str]
    url: str
    client: httpx.Client

    def complete(self, prompt: object, **more: object) -> Any:
        got = self.client.post("/v1/completions", json={"prompt": prompt} | more)
        assert got.status_code == 200, got.text
        return got.json()

    def streamed(self, prompt: object, **more: object) -> str:
        """The text of a stream, from its pieces."""
        body = {"prompt": prompt, "stream": True} | more
        with self.client.stream("POST", "/v1/completions", json=body) as got:
            assert got.status_code == 200
            return "".join(choice["text"] for event in events(got) for choice in event["choices"])

    def gauge(self, name: str, **labels: str) -> float:
        """A value of /metrics; of several with these labels the sum."""
        lines = self.client.get("/metrics").text.splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in lines if line.startswith(f"{name}{{")]
        found = [line for line in found if all(one in line for one in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def engine_id(self) -> int:
        """The process of its only engine."""
        (engine,) = self.engine_ids()
        return engine

    def engine_ids(self) -> list[int]:
        """The processes of its engines as they were started: its children, as Linux tells it."""
        parent = f"PPid:\t{self.process.pid}\n"
        found = [
            file.parent.name
            for file in Path("/proc").glob("[0-9]*/status")
            if parent in (status := told(file)) and f"Name:\t{warm_python.NAME}\n" not in status
        ]
        if not Path("/proc/self/status").exists():
            pytest.skip("only Linux tells whose child a process is")
        return sorted(map(int, found))

    def end(self) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)


def told(file: Path) -> str:
    """Nothing of a process that has ended meanwhile."""
    with suppress(OSError):
        return file.read_text()
    return ""


def events(got: httpx.Response) -> Iterator[Any]:
    """Of a stream, up to its end. Raises ValueError for one that has no end."""
    for line in got.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise ValueError("the stream has no end")


@contextmanager
def served(*flags: str, model: str = "outrider/embedded", anew: bool = False) -> Generator[Served]:
    """A server, of the embedded pair where no model is named, until the end of the block. It begins
    as a fork of an interpreter that has imported its modules, or anew."""
    words = ("serve", model, "--port", "0", "--json", "--threads", "1", *flags)
    command = [sys.executable, "-m", "outrider", *words]
    with warm_python.anew() if anew else warm_python.warm():
        started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with started as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = json.loads(line)["url"]
            with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
                yield Served(process, url, client)
        finally:
            process.kill()
