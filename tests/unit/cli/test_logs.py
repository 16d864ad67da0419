"""Events on stderr: a line for people, or an object for programs."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable

import pytest

from doubles.command_line import Command
from outrider.cli.session import JsonLines, start_logging
from outrider.core.settings import ProgramConfig


@pytest.fixture
def nobody_logs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """To be called in a test: pytest begins to listen after its fixtures are made."""

    def silence() -> None:
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setattr(logging.root, "level", logging.WARNING)

    return silence


def test_text_is_for_people(
    nobody_logs: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    nobody_logs()
    start_logging(ProgramConfig(log_level="info"))
    logging.getLogger("a.b").info("read %d rows", 3)
    logging.getLogger("a.b").debug("not this")
    assert capsys.readouterr().err == "outrider: read 3 rows\n"


def test_json_is_one_object_a_line(
    nobody_logs: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    nobody_logs()
    start_logging(ProgramConfig(log_level="info", log_format="json"))
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(milliseconds=1)
    logging.getLogger("a.b").info("read %d\nrows of %s", 3, "é")
    logging.getLogger("a.c").error("lost")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert before <= datetime.datetime.fromisoformat(first.pop("time"))
    assert first == {"level": "info", "logger": "a.b", "message": "read 3\nrows of é"}
    assert (second["level"], second["message"]) == ("error", "lost")


def test_an_error_brings_its_traceback() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        about = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "lost", None, about)
    event = json.loads(JsonLines().format(record))
    assert event["message"] == "lost"
    assert event["error"].startswith("Traceback")
    assert event["error"].endswith("ValueError: boom")


@pytest.mark.weights
def test_the_command_line_logs_as_it_is_told(
    nobody_logs: Callable[[], None], outrider: Command
) -> None:
    nobody_logs()
    words = ("generate", "x", "--max-tokens", "2", "--force-reference", "--log-level", "info")
    shown = outrider(*words, "--log-format", "json")
    assert shown.code == 0
    messages = [json.loads(line)["message"] for line in shown.err.splitlines() if line[0] == "{"]
    assert any("reference kernels" in message for message in messages)
    assert outrider(*words, "--log-format", "yaml").code == 2
