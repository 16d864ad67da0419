"""A deployment on Ray of this machine, started as users do: by `outrider cluster config`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import httpx
import yaml

START_SECONDS, END_SECONDS = 300.0, 180.0
CONFIG = "serve.yaml"
_ENGINE = "ServeReplica:outrider:Engine"
# A busy machine may take minutes to start what Ray gives 30 seconds (a raylet) or 15 (a proxy).
_OWN = {
    "RAY_AUTH_MODE": "token",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
}
_VARIABLES = os.environ | _OWN  # noqa: TID251 - a child's


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


class Deployment:
    """`serve run` in a process of its own, and everything that Ray started below it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, folder: Path) -> None:
        self.process, self.url = process, url
        self.config: dict[str, Any] = yaml.safe_load((folder / CONFIG).read_text("utf-8"))
        self._folder, self._log = folder, folder / "log"
        self.most_bytes = 0
        self._has_ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def engines(self) -> list[int]:
        """Processes of replicas."""
        return [one for one in descendants(self.process.pid) if _ENGINE in title(one)]

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        until = monotonic() + START_SECONDS
        while not holds():
            if self.process.poll() is not None or monotonic() > until:
                raise TimeoutError(f"{what}:\n{self.log[-4000:]}")
            sleep(0.1)

    def deploy(self, config: Mapping[str, Any]) -> None:
        """As by `serve deploy`; returns as soon as Ray has it, and is not done with it."""
        (dashboard,) = set(
            re.findall(r"http://[\d.:]+(?= ?\x1b|\s)", self.log.split("dashboard at")[1][:80])
        )
        file = self._folder / "next.yaml"
        file.write_text(yaml.safe_dump(dict(config)), "utf-8")
        log = self._folder / "next.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [_serve(), "deploy", str(file), "--address", dashboard],
                stdout=output,
                stderr=output,
                env=_VARIABLES | {"PYTHONUNBUFFERED": "1"},
            )
        # The command itself ends so much later that short requests may have ended before it.
        while process.poll() is None and "successfully" not in log.read_text("utf-8"):
            sleep(0.01)
        if process.poll():
            raise RuntimeError(log.read_text("utf-8"))

    def end(self) -> int:
        """As by Ctrl-C; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(END_SECONDS)

    def stop_watching(self) -> None:
        self._has_ended.set()

    def _watch(self) -> None:
        while not self._has_ended.wait(1.0):
            everything = [self.process.pid, *descendants(self.process.pid)]
            self.most_bytes = max(self.most_bytes, sum(map(shared_bytes, everything)))


@contextmanager
def deployed(*flags: str, model: str = "outrider/embedded") -> Generator[Deployment]:
    """Two replicas of a thread each, ready, until the end of the block."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that starts this in the background has it ignore Ctrl-C, and its children too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    port = free_port()
    words = ("cluster", "config", model, "--threads", "1", "--port", str(port), *flags)
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / CONFIG
        with config.open("wb") as file:
            subprocess.run([sys.executable, "-m", "outrider", *words], stdout=file, check=True)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [_serve(), "run", str(config)],
                stdout=log,
                stderr=log,
                env=_VARIABLES | {"RAY_TMPDIR": name},
            )
        found = Deployment(process, f"http://127.0.0.1:{port}", folder)
        try:
            found.wait_until(lambda: is_ready(found.url), "the deployment does not start")
            yield found
        finally:
            found.stop_watching()
            left = descendants(process.pid)
            try:
                found.end()
            finally:
                # Ray ends them itself, if it can.
                for one in [process.pid, *left]:
                    if title(one):
                        with suppress(ProcessLookupError):
                            os.kill(one, signal.SIGKILL)


def _serve() -> str:
    """Of the environment that runs this."""
    return str(Path(sys.executable).with_name("serve"))


def is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    return False


def descendants(pid: int) -> list[int]:
    parents = dict(_parents())
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                yield (
                    int(folder.name),
                    int((folder / "stat").read_text().rpartition(")")[2].split()[1]),
                )


def title(pid: int) -> str:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace")
    return ""


def shared_bytes(pid: int) -> int:
    """What is this process's share of memory."""
    with suppress(OSError):
        told = (Path("/proc") / str(pid) / "smaps_rollup").read_text()
        found = re.search(r"^Pss: +(\d+) kB", told, re.MULTILINE)
        return int(found[1]) << 10 if found else 0
    return 0
