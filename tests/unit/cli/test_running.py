"""Servers of this user: listed while they run, stopped by name, and forgotten once they died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from doubles.command_line import Command
from doubles.json_server import Answer, serving
from outrider.plugins.running.verbs import announced, running

CHILD = """
import signal, sys
from outrider.plugins.running.verbs import announced
def end(*_):
    sys.exit(0)
signal.signal(signal.SIGTERM, end if sys.argv[2] == "polite" else signal.SIG_IGN)
with announced(sys.argv[1], ["small", "tiny"]):
    print("announced", flush=True)
    signal.pause()
    signal.pause()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider" / "servers"


@pytest.fixture
def children() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(children: ExitStack, url: str, kind: str = "polite") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, url, kind]
    process = children.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    children.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "announced\n"
    return process


def test_a_server_is_listed_with_its_state_for_as_long_as_it_runs(
    outrider: Command, cache: Path
) -> None:
    with serving({"GET /ready": Answer.of({"status": "ready"})}) as server:
        with announced(server.url, ["small", "tiny"]):
            (record,) = json.loads(outrider("ps", "--json").out)
            assert record["models"] == ["small", "tiny"]
            assert (record["pid"], record["url"]) == (os.getpid(), server.url)
            assert record["state"] == "ready"
            assert record["memory_bytes"] is None or record["memory_bytes"] > 1 << 20
            assert "small, tiny" in outrider("ps").out
        assert json.loads(outrider("ps", "--json").out) == []
    assert "`outrider serve MODEL`" in outrider("ps").out
    assert list(cache.iterdir()) == []


def test_one_that_answers_nothing_is_not_ready(outrider: Command) -> None:
    with announced("https://127.0.0.1:9", ["small"]):
        assert json.loads(outrider("ps", "--json").out)[0]["state"] == "unknown"
    with announced("http://127.0.0.1:9", ["small"]):
        assert json.loads(outrider("ps", "--json").out)[0]["state"] == "not ready"


@pytest.mark.wide
def test_a_server_is_stopped_by_any_of_its_names(outrider: Command, children: ExitStack) -> None:
    for number, word in enumerate(("tiny", "8001", "http://127.0.0.1:8002", None)):
        process = start(children, f"http://127.0.0.1:800{number}")
        done = outrider("stop", *([word] if word else []))
        assert (done.code, "stopped small, tiny at" in done.out) == (0, True), done.err
        assert process.wait(5) == 0
        assert running() == {}


@pytest.mark.wide
def test_of_several_the_name_decides(outrider: Command, children: ExitStack) -> None:
    for port in (8000, 8001):
        start(children, f"http://127.0.0.1:{port}")
    done = outrider("stop", "small")
    assert done.code == 2
    assert "2 servers are meant" in done.err
    assert done.err.count("outrider stop") == 2
    done = outrider("stop", "none")
    assert (done.code, "no server is called 'none'" in done.err) == (2, True)
    assert len(running()) == 2
    assert outrider("stop", "8001").code == 0
    assert [one.url for one in running().values()] == ["http://127.0.0.1:8000"]


@pytest.mark.wide
def test_one_that_goes_on_is_reported(outrider: Command, children: ExitStack) -> None:
    process = start(children, "http://127.0.0.1:8000", "stubborn")
    done = outrider("stop", "--timeout", "0.1")
    assert (done.code, "has not ended" in done.err) == (3, True)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Its file is a leftover now.
    assert running() == {}


def test_there_may_be_none(outrider: Command) -> None:
    done = outrider("stop")
    assert (done.code, "no server runs here" in done.err) == (2, True)


def test_a_folder_of_others_is_not_believed(outrider: Command, cache: Path) -> None:
    with announced("http://127.0.0.1:9", ["small"]):
        cache.chmod(0o777)
        assert json.loads(outrider("ps", "--json").out) == []
