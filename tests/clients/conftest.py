"""A real server for real clients, each in an environment of its own (scripts/client_tests).

Nothing of the program is imported here: the server runs with the program's own Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("OUTRIDER_SERVER_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
MODEL = "outrider/embedded"


class Served(NamedTuple):
    """A server and its one model. `call` runs a line of Python in the program's environment."""

    url: str
    model: str

    def post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, object] = json.load(answer)
        return found


def ours(program: str) -> object:
    """The JSON that `program`, run in the program's environment, prints."""
    done = subprocess.run(
        [PYTHON, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    if not Path(PYTHON).exists():
        pytest.skip(f"no {PYTHON}: scripts/setup makes it")
    command = [PYTHON, "-m", "outrider", "serve", MODEL, "--port", "0", "--json", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server ended before it was ready"
        told = json.loads(line)
        served = Served(told["url"], told["model"])
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(served.url + "/ready", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield served
        process.terminate()
        assert process.wait(60) == 0, "the server did not end in order"
    sys.stdout.flush()
