"""llama.cpp through its own server, one process a setup: weights, draft and settings are its flags.

Seconds are the server's own count for a request, reading the prompt and writing the tokens, so the
way over HTTP is not in them. The prompt is read anew each time, as everybody's is.

Quantised weights are repacked for matrix instructions where there are some. On some virtual
machines that crashes; then, and only then, the server runs with `--no-repack`, and says so.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from outrider.bench.peers.lines import Ask, RefusedError, Setup, serve

START_SECONDS = 180
ANSWER_SECONDS = 1800
# Same n-gram settings as ours: tails of three tokens.
NGRAM = 3


class LlamaSide:
    """`folder` holds llama-server."""

    def __init__(self, folder: Path) -> None:
        self._binary = folder / "llama-server"
        self._loaded: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    def about(self) -> dict[str, Any]:
        done = subprocess.run(
            [self._binary, "--version"], capture_output=True, text=True, check=True
        )
        return {"versions": {"llama.cpp": " ".join((done.stdout + done.stderr).split())[:300]}}

    def load(self, setup: Setup) -> list[str]:
        try:
            self._loaded[setup.name] = self._started(setup, [])
        except RefusedError:
            if setup.form in ("f32", "bf16"):
                raise
            self._loaded[setup.name] = self._started(setup, ["--no-repack"])
            return ["runs with --no-repack: the server does not start without"]
        return []

    def run(self, ask: Ask) -> dict[str, Any]:
        _, port = self._loaded[ask.name]
        # Greedy is the best one of one; else the law as it is, without the server's usual cuts.
        how = {"samplers": ["temperature"], "temperature": ask.temperature}
        greedy = {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0}
        body = {
            "prompt": ask.ids,
            "n_predict": ask.max_tokens,
            "seed": ask.seed,
            "return_tokens": True,
            "cache_prompt": False,
            **(how if ask.temperature else greedy),
        }
        answer = _http(port, "POST", "/completion", body)
        times = answer["timings"]
        seconds = (times["prompt_ms"] + times["predicted_ms"]) / 1e3
        counts = {"drafted": times.get("draft_n", 0), "accepted": times.get("draft_n_accepted", 0)}
        return {"ids": answer["tokens"], "seconds": seconds, **counts}

    def drop(self, name: str) -> None:
        process, _ = self._loaded.pop(name)
        process.terminate()
        process.wait()

    def close(self) -> None:
        for name in list(self._loaded):
            self.drop(name)

    def _started(self, setup: Setup, extra: list[str]) -> tuple[subprocess.Popen[bytes], int]:
        port = _free_port()
        process = subprocess.Popen(
            [str(self._binary), *_flags(setup, port), *extra], stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                flags = " ".join([*_flags(setup, port), *extra])
                raise RefusedError(f"llama-server ended with {process.returncode}: {flags}")
            try:
                if _http(port, "GET", "/health", None).get("status") == "ok":
                    return process, port
            except OSError:
                pass
            time.sleep(0.05)
        process.kill()
        process.wait()
        raise RefusedError(f"llama-server did not start in {START_SECONDS} s")


def _flags(setup: Setup, port: int) -> list[str]:
    threads = str(setup.threads)
    context = str(setup.options.get("context", 2048))
    flags = ["-m", setup.target, "-t", threads, "-tb", threads, "-c", context, "-np", "1"]
    flags += ["--host", "127.0.0.1", "--port", str(port), "--no-ui", "--cache-ram", "0"]
    return [*flags, *_speculation(setup)]


def _speculation(setup: Setup) -> list[str]:
    if setup.drafter == "none":
        return []
    if setup.drafter == "model":
        doubt = str(setup.options.get("p_min", 0.0))
        flags = ["-md", setup.draft, "--spec-type", "draft-simple"]
        return [*flags, "--spec-draft-n-max", str(setup.k), "--spec-draft-p-min", doubt]
    kind = setup.options["kind"]
    if kind == "ngram-cache":
        return ["--spec-type", kind]
    sizes = [f"--spec-{kind}-size-n", str(NGRAM), f"--spec-{kind}-size-m", str(setup.k)]
    return ["--spec-type", kind, *sizes]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _http(port: int, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    finally:
        connection.close()
    if response.status >= 400 and path != "/health":
        raise RefusedError(f"llama-server: {answer}")
    return answer


def main() -> None:
    side = LlamaSide(Path(sys.argv[1]))
    try:
        serve(side)
    finally:
        side.close()


if __name__ == "__main__":
    main()
