"""`outrider top`: what it draws of a server's history, and how it ends."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from doubles.command_line import Command
from outrider.cli.output import GatedConsole
from outrider.core.errors import MachineError
from outrider.plugins.running.clients import Server
from outrider.plugins.running.verbs import Watched, screen, sparkline

COLUMNS = {
    "tokens_per_second": [0.0, 50.0, 100.0],
    "first_token_p50": [None, 0.05, None],
    "first_token_p99": [None, 1.5, None],
    "running": [0, 2, 1],
    "waiting": [0, 0, 7],
    "kv_usage": [0.0, 0.25, 0.5],
}
ENGINE = {
    "state": "ready",
    "num_running": 1,
    "num_waiting": 7,
    "kv_usage": 0.5,
    "num_preempted": 3,
    "num_restarts": 0,
    "lanes": {"draft": "idle"},
}
DRAFTER = {"drafts": 10, "draft_tokens": 40, "accepted_tokens": 20, "per_pos": [9, 6, 3, 2]}
HISTORY: dict[str, Any] = {
    "began": 1.0,
    "first": 0,
    "next": 3,
    "columns": COLUMNS,
    "engines": {"tiny\x1b[31m": ENGINE},
    "totals": {"drafters": {"model": DRAFTER}},
}


def told(**changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(HISTORY | changes))


def drawn(watched: Watched, width: int = 100, problem: str = "") -> str:
    out = io.StringIO()
    console = GatedConsole(out)
    console.width = width
    console.print(screen(watched, "http://here", width, problem))
    return out.getvalue()


def test_of_several_engines_each_has_a_line() -> None:
    watched = Watched()
    lost = ENGINE | {"state": "restarting", "num_restarts": 1}
    watched.take(told(engines={"tiny": ENGINE | {"engines": [ENGINE, lost]}}))
    lines = drawn(watched, 120).splitlines()
    assert [line.split(",")[0] for line in lines[1:4]] == [
        "tiny: ready",
        "  0: ready",
        "  1: restarting",
    ]
    assert "1 restarts, lanes: draft idle" in lines[3]
    assert "lanes" not in lines[1]


def test_one_screen_says_all_of_it() -> None:
    watched = Watched()
    watched.take(told())
    text = drawn(watched)
    assert "ready, 1 running, 7 waiting, KV cache 50 %, 3 set back" in text
    assert "lanes: draft idle" in text
    rows = {line[:21].strip(): line[22:].split() for line in text.splitlines()}
    assert rows["tokens a second"] == ["100", "▁▅█"]
    assert rows["first token p50 / p99"][:5] == ["50", "ms", "/", "1.5", "s"]
    assert rows["running / waiting"][:3] == ["1", "/", "7"]
    model = next(line for line in text.splitlines() if line.startswith("model"))
    assert model.split() == [
        "model",
        "10",
        "40",
        *("50", "%", "90", "%", "60", "%", "30", "%", "20", "%"),
    ]
    assert "\x1b" not in text
    assert "no answer" in drawn(watched, problem="no answer from http://here")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_the_terminal(width: int) -> None:
    watched = Watched()
    for first in range(0, 600, 3):
        watched.take(told(first=first, next=first + 3))
    assert max(map(len, drawn(watched, width).splitlines())) <= width
    assert max(map(len, watched.columns.values())) == 300


def test_looks_are_joined_and_a_server_that_began_anew_begins_anew() -> None:
    watched = Watched()
    watched.take(told())
    watched.take(told(first=3, next=4, columns={"running": [5]}))
    assert watched.columns["running"] == [0, 2, 1, 5]
    watched.take(told(began=2.0, first=0, next=1, columns={"running": [9]}))
    assert watched.columns == {"running": [9]}
    with pytest.raises(MachineError, match="no history"):
        watched.take({"first": 0})


def test_a_line_of_bars_has_the_latest_values() -> None:
    assert sparkline([1, 2, None, 4], 3) == "▅ █"
    assert sparkline([0, 0], 5) == "▁▁"
    assert sparkline([], 5) == ""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def ask(_server: object, path: str, body: Mapping[str, object] | None = None) -> Any:
        assert body is None
        asked.append(path)
        return told()

    monkeypatch.setattr(Server, "ask", ask)
    return asked


def test_without_a_terminal_it_looks_once(served: list[str], outrider: Command) -> None:
    shown = outrider("top")
    assert shown.code == 0
    assert "tokens a second" in shown.out
    assert served == ["/outrider/v1/history?since=0"]


def test_json_is_the_servers_answer(served: list[str], outrider: Command) -> None:
    assert json.loads(outrider("top", "--json").out) == told()
    assert len(served) == 1


def test_ctrl_c_leaves_without_a_word(
    served: list[str], monkeypatch: pytest.MonkeyPatch, outrider: Command
) -> None:
    def interrupted(_seconds: float) -> None:
        if len(served) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(GatedConsole, "is_terminal", True)
    monkeypatch.setattr("outrider.plugins.running.verbs.time.sleep", interrupted)
    shown = outrider("top")
    assert (shown.code, shown.err) == (0, "")
    assert served[1:] == ["/outrider/v1/history?since=3"] * 2


def test_no_server_is_said_in_words(outrider: Command) -> None:
    shown = outrider("top", "--url", "http://127.0.0.1:9")
    assert shown.code == 3
    assert "no answer from http://127.0.0.1:9" in shown.err


@pytest.mark.wide
def test_it_needs_no_tensors() -> None:
    code = "import outrider.plugins.running.verbs, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0
