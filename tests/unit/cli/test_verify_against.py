"""`outrider verify --against`: what is printed and written, exit codes, and no need of PyTorch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from doubles.command_line import Command
from doubles.served import served
from doubles.toy_endpoint import ToyEndpoint
from outrider.core.errors import MachineError

LITTLE = ("--texts", "16", "--max-tokens", "16")


@contextmanager
def listening(endpoint: ToyEndpoint) -> Generator[str]:
    """A toy server on a port of this machine; its address, as users of OpenAI's client write it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            try:
                if self.path == "/metrics":
                    raise MachineError("no metrics")
                status, data = 200, json.dumps(endpoint.ask(self.path, body)).encode()
            except MachineError as error:
                status, data = 404, str(error).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: tests read stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/"
        finally:
            server.shutdown()
            thread.join()


def test_a_fault_is_printed_with_its_evidence_and_ends_with_1(
    outrider: Command, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    with listening(ToyEndpoint(seed=3, fault="off_by_one")) as url:
        done = outrider("verify", "--against", url, *LITTLE, "--html", str(page))
    assert done.code == 1
    assert "FAILED  greedy text" in done.out
    assert "gap of their log-probabilities" in " ".join(done.out.split())
    assert done.out.startswith("SPECULATION CHANGES THE OUTPUT: greedy text")
    first, *lines = done.err.splitlines()
    assert first.endswith(": 8 checks of its answers, a minute or more")
    assert len(lines) == 8
    assert lines[0].endswith(" s  check 1 of 8, greedy texts")
    assert re.search(r" s  check 2 of 8, sampled text, about \d+ s left; FAILED: greedy", lines[1])
    assert "FAILED" in page.read_text()


def test_two_honest_servers_end_with_0_and_json_says_what_was_compared(outrider: Command) -> None:
    with (
        listening(ToyEndpoint(seed=5)) as drafted,
        listening(ToyEndpoint(seed=5, speculates=False)) as plain,
    ):
        words = ("--against", drafted, "--plain", plain, *LITTLE, "--json", "--seed", "9")
        done = outrider("verify", "mine", *words, "--output", "report.json")
    found = json.loads(done.out)
    assert json.loads(Path("report.json").read_text()) == found
    assert (done.code, found["holds"]) == (0, True)
    assert found["about"]["drafted"]["model"] == "mine"
    assert found["about"]["plain"]["url"] + "/v1/" == plain
    assert found["about"]["amount"]["greedy_tokens"] == 16
    assert found["about"]["amount"]["seed"] == 9
    assert [check["name"] for check in found["checks"]][:4] == [
        *("speculation", "greedy", "logprobs", "sampled")
    ]


def test_what_cannot_be_compared_is_refused(outrider: Command) -> None:
    with listening(ToyEndpoint(shows_drafts=False)) as url:
        alone = outrider("verify", "--against", url)
    assert alone.code == 2
    assert "--plain" in alone.err
    missing = outrider("verify", "--html", "page.html")
    assert missing.code == 2
    assert "--html goes with --against" in missing.err
    nowhere = outrider("verify", "--against", "http://127.0.0.1:1")
    assert nowhere.code == 3


@pytest.mark.wide
def test_pytorch_is_not_needed() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from outrider.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    with listening(ToyEndpoint(seed=5)) as url:
        words = ("verify", "--against", url, *LITTLE)
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert "Speculation changes nothing" in done.stdout


@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.slow
def test_our_own_server_passes_with_a_switch_in_the_request(outrider: Command) -> None:
    with served() as server:
        done = outrider(
            "verify", "--against", server.url, "--texts", "8", "--max-tokens", "8", "--json"
        )
    found = json.loads(done.out)
    assert found["about"]["plain"]["fields"]["speculative"] is False
    checks = {check["name"]: check for check in found["checks"]}
    assert {name: check["holds"] for name, check in checks.items()} == dict.fromkeys(checks, True)
    assert checks["greedy"]["facts"]["num_near_ties"] == 0
    assert done.code == 0
