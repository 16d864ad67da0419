"""What stands in a study of gateways: plain replicas, and nginx or smg in front of them.

Each replica is behind a relay of bytes in this process, which sees whose request it got.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import httpx

DEPLOY = Path(__file__).parents[1] / "deploy"
KEY = "a-key-of-this-study-alone"
START_SECONDS = 120
MARK = re.compile(rb"request-(\d+)\.")


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


class Replica:
    """`outrider serve`, and what came to it: numbers of requests, once for each time. `port` is the
    relay's."""

    def __init__(self, target: str, keys: Path) -> None:
        self._target, self._keys = target, keys
        self.port, self._own = free_port(), free_port()
        self.seen: list[int] = []
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._process: Process | None = None

    async def start(self) -> None:
        words = ("serve", self._target, "--port", str(self._own), "--threads", "1")
        self._process = await create_subprocess_exec(
            *(sys.executable, "-m", "outrider", *words, "--api-key-file", str(self._keys)),
            # A busy machine may need longer for what is under way than a service should.
            *("--batch-size", "16", "--drain-seconds", "300"),
            stderr=DEVNULL,
            stdout=DEVNULL,
        )
        await answers(f"http://127.0.0.1:{self._own}/ready")
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)

    def kill(self) -> None:
        """As a machine that is gone: nobody answers at its port any more."""
        self._send(signal.SIGKILL)
        self._close()

    async def end(self) -> int:
        """Ask it to end; its exit code."""
        self._send(signal.SIGTERM)
        assert self._process is not None
        code = await self._process.wait()
        self._close()
        return code

    async def aclose(self) -> None:
        self.kill()
        if self._process is not None:
            await self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            up = await asyncio.open_connection("127.0.0.1", self._own)
            await asyncio.gather(
                self._pass(reader, up[1], self._note), self._pass(up[0], writer, lambda _: None)
            )
        except OSError:
            writer.transport.abort()
        finally:
            self._writers.discard(writer)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        note: Callable[[bytes], None],
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                note(data)
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.close()

    def _note(self, data: bytes) -> None:
        self.seen += [int(found) for found in MARK.findall(data)]


async def answers(url: str) -> None:
    """Wait for a 200 at `url`."""
    until = monotonic() + START_SECONDS
    async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": KEY}) as client:
        while monotonic() < until:
            with suppress(httpx.HTTPError):
                if (await client.get(url, timeout=5)).status_code == 200:
                    return
            await asyncio.sleep(0.05)
    raise TimeoutError(f"{url} does not answer")


async def nginx(folder: Path, port: int, replicas: list[Replica]) -> Process:
    """By deploy/nginx-replicas.conf, but for addresses and certificates."""
    text = (DEPLOY / "nginx-replicas.conf").read_text("utf-8")
    text = text.replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")
    text = re.sub(r"^ *ssl_certificate.*\n", "", text, flags=re.MULTILINE)
    for number, replica in enumerate(replicas, start=8001):
        text = text.replace(f"127.0.0.1:{number}", f"127.0.0.1:{replica.port}")
    (folder / "site.conf").write_text(text, "utf-8")
    places = "".join(
        f"{kind}_temp_path {folder};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid;\nerror_log {folder}/errors warn;\ndaemon off;\nworker_processes 1;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{places}include {folder}/site.conf;\n}}\n",
        "utf-8",
    )
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    return await create_subprocess_exec(program, "-c", str(folder / "nginx.conf"), stderr=DEVNULL)


async def smg(_: Path, port: int, replicas: list[Replica]) -> Process:
    """By deploy/smg.service, but for addresses."""
    text = (DEPLOY / "smg.service").read_text("utf-8").replace("\\\n", " ")
    words = shlex.split(re.findall(r"^ExecStart=\S+ (.*)$", text, re.MULTILINE)[0])
    at = {"8000": port, "29000": free_port(), "${OUTRIDER_KEY}": KEY}
    for number, replica in enumerate(replicas, start=8001):
        at[f"http://127.0.0.1:{number}"] = f"http://127.0.0.1:{replica.port}"
    program = shutil.which("smg") or "smg"
    filled = [str(at.get(word, word)) for word in words]
    return await create_subprocess_exec(program, *filled, stdout=DEVNULL, stderr=DEVNULL)


GATEWAYS = {"nginx": nginx, "smg": smg}
