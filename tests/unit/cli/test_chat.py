"""`outrider chat` over a pipe: replies, commands, and staying alive."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence

import pytest

from doubles.command_line import Command
from outrider.cli.paint import Painter

pytestmark = [pytest.mark.wide, pytest.mark.weights]

SHORT = ("--max-tokens", "12")
QUESTION = "What is 3 plus 4?"


def test_every_line_is_answered_with_a_verdict(outrider: Command) -> None:
    shown = outrider("chat", *SHORT, stdin=f"{QUESTION}\n\n{QUESTION}\n")
    assert shown.code == 0
    assert shown.out.count("12 tokens · ") == 2


def test_run_is_an_alias_and_json_is_one_line_a_reply(outrider: Command) -> None:
    shown = outrider("run", "--json", *SHORT, stdin=f"{QUESTION}\n{QUESTION}\n/exit\nnever\n")
    replies = [json.loads(line) for line in shown.out.splitlines()]
    assert len(replies) == 2
    assert all(len(reply["token_ids"]) == 12 for reply in replies)
    assert replies[0]["text"] != replies[1]["text"]


def test_reset_forgets_what_was_said(outrider: Command) -> None:
    lines = f"{QUESTION}\n/reset\n{QUESTION}\n"
    first, forgotten, second = outrider("chat", "--json", *SHORT, stdin=lines).out.splitlines()
    assert forgotten == "(forgotten)"
    assert json.loads(first)["token_ids"] == json.loads(second)["token_ids"]


def test_commands_show_help_statistics_and_settings(outrider: Command) -> None:
    lines = f"/help\n{QUESTION}\n/stats\n/set max_tokens 3\n/set\n{QUESTION}\n"
    shown = outrider("chat", *SHORT, stdin=lines)
    assert shown.code == 0
    assert "/set KEY VALUE" in shown.out
    assert "1 replies · 12 tokens · " in shown.out
    assert "max_tokens 3" in shown.out
    assert "3 tokens · " in shown.out


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/hlp", "did you mean '/help'?"),
        ("/set tmperature 1", "did you mean 'temperature'?"),
        ("/set k 3", "k is fixed once a model is loaded."),
        ("/set temperature hot", "temperature must be a number"),
        ("/set temperature -1", "temperature must be between"),
        ("/set seed", "seed must be an integer"),
        ("word " * 3000, "does not fit"),
    ],
)
def test_a_mistake_is_explained_and_the_conversation_goes_on(
    outrider: Command, line: str, problem: str
) -> None:
    shown = outrider("chat", *SHORT, stdin=f"{line}\n{QUESTION}\n")
    assert shown.code == 2
    assert problem in shown.err
    assert "12 tokens · " in shown.out


def test_the_system_message_opens_the_conversation(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.api.tokenizer import Tokenizer

    seen: list[list[tuple[object, object]]] = []

    def chat(self: Tokenizer, messages: Sequence[dict[str, str]]) -> str:
        assert self.has_chat_template
        seen.append([(message["role"], message["content"]) for message in messages])
        return "Answer:"

    monkeypatch.setattr(Tokenizer, "chat", chat)
    outrider("chat", "--system", "be kind", *SHORT, stdin="a\n/reset\nb\n")
    opening = ("system", "be kind")
    assert seen == [[opening, ("user", "a")], [opening, ("user", "b")]]


def test_an_interrupt_stops_the_reply_and_not_the_program(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    pieces = Painter.pieces

    def press(self: Painter, texts: Sequence[str], origins: Sequence[str]) -> None:
        pieces(self, texts, origins)  # pyright: ignore[reportArgumentType]
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Painter, "pieces", press)
    shown = outrider("chat", "--max-tokens", "200", stdin=f"{QUESTION}\n{QUESTION}\n/stats\n")
    assert shown.code == 0
    assert shown.out.count(" (stopped)\n") == 2
    assert "2 replies" in shown.out
    assert signal.getsignal(signal.SIGINT) == before
