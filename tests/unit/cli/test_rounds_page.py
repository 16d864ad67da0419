"""`generate --html` and /html: the page is written, and nothing else changes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from checks.html import read
from doubles.command_line import Command
from outrider.api.result import text_of

pytestmark = [pytest.mark.wide, pytest.mark.weights]

PROMPT = "def </script><b>(x):"
SHORT = ("--max-tokens", "12")


def runs_of(path: str) -> list[dict[str, Any]]:
    page = Path(path).read_text(encoding="utf-8")
    read(page)
    (data,) = re.findall(r'<script type="application/json" id="runs">(.*?)</script>', page)
    runs: list[dict[str, Any]] = json.loads(data)
    return runs


def test_the_page_has_the_run_and_the_text_is_the_same(outrider: Command) -> None:
    plain = json.loads(outrider("generate", "--json", PROMPT, *SHORT).out)
    shown = outrider("generate", "--json", PROMPT, *SHORT, "--html", "run.html")
    assert shown.code == 0, shown.err
    assert "page: run.html (" in shown.err
    told = json.loads(shown.out)
    assert told["token_ids"] == plain["token_ids"]
    (run,) = runs_of("run.html")
    assert (run["prompt"], text_of(run)) == (PROMPT, told["text"])
    facts = dict(run["facts"])
    assert (facts["drafter"], facts["max_tokens"]) == ("model", "12")
    assert "speed_ratio" not in run["result"]


def test_every_completion_has_its_part(outrider: Command) -> None:
    words = ("--n", "2", "--temperature", "0.9", "--seed", "1", "--html", "run.html", "--json")
    shown = outrider("generate", PROMPT, *SHORT, *words)
    texts = [one["text"] for one in json.loads(shown.out)["completions"]]
    runs = runs_of("run.html")
    assert [text_of(run) for run in runs] == texts
    assert [run["title"] for run in runs] == ["Text 1", "Text 2"]
    assert {dict(run["facts"])["seed"] for run in runs} == {"1"}


def test_only_a_page_is_replaced(outrider: Command) -> None:
    for _ in range(2):
        assert outrider("generate", PROMPT, *SHORT, "--html", "run.html").code == 0
    other = Path("other.html")
    other.write_text("<title>mine</title>")
    shown = outrider("generate", PROMPT, *SHORT, "--html", "other.html")
    assert (shown.code, shown.out) == (2, "")
    assert "other.html exists already" in shown.err
    assert other.read_text() == "<title>mine</title>"


def test_a_file_that_cannot_be_written_is_told_of_before_anything_runs(outrider: Command) -> None:
    shown = outrider("generate", PROMPT, "--html", "no/such/run.html")
    assert shown.code == 3
    assert "cannot be written" in shown.err
    assert shown.out == ""


def test_a_conversation_is_shown_from_the_command_on(outrider: Command) -> None:
    lines = "one\n/html chat.html\ntwo <b>\n/html\nthree\n/html no/such.html\nfour\n"
    shown = outrider("chat", "--json", *SHORT, stdin=lines)
    assert shown.code == 3
    texts = [json.loads(line)["text"] for line in shown.out.splitlines()]
    assert len(texts) == 4
    assert "(replies from now on are shown in chat.html)\n" in shown.err
    (run,) = runs_of("chat.html")
    assert (run["prompt"], text_of(run)) == ("two <b>", texts[1])
