"""`outrider serve`: what it checks before anything is loaded, and what --check says."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest

from doubles.command_line import Command
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask, site_with
from outrider.cli.call import Call
from outrider.cli.serve import announce, rules_of
from outrider.cli.verb_options import ServeOptions
from outrider.core.config import MOST_BATCH
from outrider.core.settings import resolve
from outrider.server.access import Address

MODEL = "outrider/embedded"
KEY = "k" * 32


@pytest.mark.weights
def test_check_says_what_would_run(outrider: Command) -> None:
    shown = outrider("serve", MODEL, "--check", "--port", "8123", "--json")
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    assert record["url"] == "http://127.0.0.1:8123"
    assert record["models"] == [MODEL]
    assert record["batch_size"] == MOST_BATCH
    assert record["asks_for_key"] is False
    assert sum(record["memory_bytes"].values()) > 1_000_000
    text = outrider("serve", MODEL, "--check").out
    assert "would serve outrider/embedded" in text
    assert "weights" in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("nosuch",), "no model 'nosuch'"),
        (("./nosuch.gguf",), "there is no file nosuch.gguf"),
        ((MODEL, "--host", "0.0.0.0"), "0.0.0.0 can be reached from other machines"),
        ((MODEL, "--api-key", "short"), "an API key has 5 characters"),
        ((MODEL, "--audit", "2"), "--audit is a share"),
        ((MODEL, "--keep-alive", "5 minutes"), "--keep-alive: '5 minutes' is no duration"),
    ],
)
def test_what_needs_no_model_is_checked_first(
    outrider: Command, words: tuple[str, ...], problem: str
) -> None:
    shown = outrider("serve", *words)
    assert shown.code in (2, 3)
    assert shown.err.startswith(f"error: {problem}")


@pytest.mark.weights
def test_check_says_where_each_engine_would_run(outrider: Command) -> None:
    words = ("serve", MODEL, "--check", "--device", "cpu")
    alone = json.loads(outrider(*words, "--json").out)
    shown = outrider(*words, "--replicas", "2", "--json")
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    assert (len(alone["engines"]), len(record["engines"])) == (1, 2)
    assert record["memory_bytes"] == alone["memory_bytes"]
    assert record["together"]["held_bytes"] == 2 * alone["together"]["held_bytes"]
    assert "2 engines each" in outrider(*words, "--replicas", "2").out


def test_a_gpu_that_is_not_there_is_told(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    shown = outrider("serve", MODEL, "--check", "--devices", "cuda:0,cuda:1")
    assert shown.code == 3
    assert "no device cuda:1" in shown.err


@pytest.mark.weights
def test_keys_come_from_a_file_and_the_environment(
    outrider: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{KEY}\n")
    words = ("serve", MODEL, "--check", "--json", "--host", "0.0.0.0")
    assert json.loads(outrider(*words, "--api-key-file", str(file)).out)["asks_for_key"]
    monkeypatch.setenv("OUTRIDER_API_KEY", KEY)
    assert json.loads(outrider(*words).out)["asks_for_key"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--host", "0.0.0.0"], "no API key"),
        (["--api-key", "short"], "needs 16"),
        (["--api-key-file", "nowhere"], "cannot be read"),
        (["--ssl-certfile", "x.pem"], "a certificate and its key"),
        (["--ssl-certfile", "x.pem", "--ssl-keyfile", "y.pem"], "no such file"),
        (["--port", "70000"], "--port"),
        (["--devices", "cpu,cpu"], "names cpu twice"),
        (["--devices", "cpu,cuda:0"], "different kinds"),
        (["--replicas", "2", "--engine-home", "thread"], "need their own processes"),
        (["--replicas", "2", "--tensor-parallel", "2"], "2 ranks"),
        (["--replicas", "0"], "--replicas"),
    ],
    ids=str,
)
def test_mistakes_are_told_before_anything_is_loaded(
    outrider: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = outrider("serve", MODEL, "--check", *words)
    assert shown.code == 2
    assert problem in shown.err


def test_a_port_that_is_taken_is_told(outrider: Command) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        shown = outrider("serve", MODEL, "--port", str(taken.getsockname()[1]))
    assert shown.code == 2
    assert "another program listens there" in shown.err


@pytest.mark.parametrize(("host", "key"), [("127.0.0.1", ""), ("0.0.0.0", KEY)])
def test_the_request_that_is_shown_has_a_key_if_one_is_needed(
    capsys: pytest.CaptureFixture[str], host: str, key: str
) -> None:
    call = Call(resolve(), ServeOptions())
    announce(call, Address(host=host), site_with(ScriptedPort()), needs_key=bool(key))
    shown = capsys.readouterr().out
    assert ("Bearer $KEY" in shown) == bool(key)
    assert (f"http://{socket.gethostname()}:8000/v1" in shown) == (host == "0.0.0.0")


def test_the_playground_says_its_temperature_if_it_is_not_that_of_other_requests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call, site = Call(resolve(), ServeOptions()), site_with(ScriptedPort())

    def line() -> str:
        announce(call, Address(host="127.0.0.1"), site, needs_key=False)
        (found,) = [one for one in capsys.readouterr().out.splitlines() if "playground" in one]
        return found

    own = "(at temperature 0 unless it is set there; other requests: 1)"
    assert line() == f"playground  http://127.0.0.1:8000/  {own}"
    site.defaults |= {"temperature": 0.5}
    assert line() == "playground  http://127.0.0.1:8000/"


def test_a_missing_extra_is_named(outrider: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_granian(name: str) -> object:
        return None if name == "granian" else util.find_spec(name)

    monkeypatch.setattr("outrider.cli.serve.find_spec", without_granian)
    shown = outrider("serve", MODEL)
    assert shown.code == 3
    assert "needs granian" in shown.err
    assert "try: pip install 'granian<3,>=2.8.7'" in shown.err


def test_metrics_are_behind_the_key_unless_they_are_told_to_be_open() -> None:
    options = ServeOptions(api_key=(KEY,))
    for is_open, status in ((False, 401), (True, 200)):
        rules = rules_of(replace(options, open_metrics=is_open))
        assert ask(ScriptedPort(), "/metrics", method="GET", rules=rules).status == status
        assert ask(ScriptedPort(), "/v1/models", method="GET", rules=rules).status == 401
