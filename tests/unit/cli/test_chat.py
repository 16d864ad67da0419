"""`outrider chat` over a pipe: replies, commands, and staying alive."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command
from outrider.cli.output import Painter

pytestmark = [pytest.mark.wide, pytest.mark.weights]

SHORT = ("--max-tokens", "12")
QUESTION = "What is 3 plus 4?"


def test_every_line_is_answered_with_a_verdict(outrider: Command) -> None:
    shown = outrider("chat", *SHORT, stdin=f"{QUESTION}\n\n{QUESTION}\n")
    assert shown.code == 0
    assert shown.out.count("12 tokens, ") == 2


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
    assert "3 tokens, " in shown.out


@pytest.mark.sample(4)
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
    assert "12 tokens, " in shown.out


def test_the_system_message_opens_the_conversation(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.api.chat_template import Rendered
    from outrider.api.tokenizer import Tokenizer

    seen: list[list[tuple[object, object]]] = []

    def chat(self: Tokenizer, messages: Sequence[dict[str, str]], **options: object) -> Rendered:
        assert not any(options.values())
        assert self.has_chat_template
        seen.append([(message["role"], message["content"]) for message in messages])
        return Rendered("Answer:")

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


def _replies(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def test_a_message_of_several_lines_is_one(outrider: Command) -> None:
    quotes = '"""'
    several = f"{quotes}What is 3\nplus 4?{quotes}\n{quotes}\n/bye\n{quotes}\n/bye\nnever\n"
    shown = outrider("chat", "--json", *SHORT, stdin=several)
    assert shown.code == 0
    assert len(_replies(shown.out)) == 2
    open_end = outrider("chat", "--json", *SHORT, stdin=f"{quotes}What is\n")
    assert (open_end.code, open_end.out) == (2, "")
    assert "did not end" in open_end.err


@pytest.mark.parametrize("leave", ["/bye", "/exit", "/quit"])
def test_words_that_leave(outrider: Command, leave: str) -> None:
    shown = outrider("chat", *SHORT, stdin=f"{leave}\n{QUESTION}\n")
    assert (shown.code, shown.out) == (0, "")


def test_help_names_every_command(outrider: Command) -> None:
    shown = outrider("chat", stdin="/?\n")
    for name in ("/bye", "/retry", "/reset", "/system", "/save", "/load", "/model", "/k"):
        assert f"\n{name}" in shown.out
    assert shown.out == outrider("chat", stdin="/help\n").out


def test_a_conversation_is_saved_and_goes_on(outrider: Command, tmp_path: Path) -> None:
    lines = f"/system be kind\n{QUESTION}\n/save talk.json\n/save talk.json\n"
    first = outrider("chat", "--json", *SHORT, stdin=lines)
    assert first.code == 0, first.err
    assert first.out.count("(3 messages in talk.json)") == 2
    saved = json.loads((tmp_path / "talk.json").read_text("utf-8"))
    roles = [message["role"] for message in saved["messages"]]
    assert roles == ["system", "user", "assistant"]
    again = "/load talk.json\n/system\n/retry\n/system -\n/system\n"
    shown = outrider("chat", "--json", *SHORT, stdin=again)
    assert "be kind\n" in shown.out
    assert _replies(shown.out)[0]["token_ids"] == _replies(first.out)[0]["token_ids"]
    assert shown.out.count("(no system message)") == 2
    # As the playground saves it, with more of each message than the terminal reads.
    more = {"id": "x", "text": "", "facts": {}}
    messages = [message | more for message in saved["messages"]]
    browsers = {"format": "outrider-conversation-1", "title": "a", "messages": messages}
    Path("browser.json").write_text(json.dumps(browsers), "utf-8")
    shown = outrider("chat", "--json", *SHORT, stdin="/load browser.json\n/retry\n")
    assert _replies(shown.out)[0]["token_ids"] == _replies(first.out)[0]["token_ids"]


def test_a_greedy_reply_that_is_asked_for_again_says_how_to_vary_it(outrider: Command) -> None:
    shown = outrider("chat", *SHORT, stdin=f"{QUESTION}\n/retry\n/system Be brief.\n")
    assert shown.code == 0, shown.err
    assert shown.out.count("/set temperature 0.8") == 1
    assert "(the system message of this conversation)" in shown.out


def test_models_and_drafters_change_within_a_conversation(outrider: Command) -> None:
    lines = (
        f"{QUESTION}\n/drafter ngram\n/retry\n/k 2\n/k\n/drafter\n"
        "/model outrider/embedded-draft\n/model\n/drafter none\n/retry\n"
    )
    shown = outrider("chat", "--json", *SHORT, stdin=lines)
    assert shown.code == 0, shown.err
    first, second, third = _replies(shown.out)
    assert first["token_ids"] == second["token_ids"]
    assert [one["stats"]["drafter"] for one in (first, second)] == ["model", "ngram"]
    assert third["stats"]["drafter"] == "none"
    told = [line for line in shown.out.splitlines() if not line.startswith("{")]
    assert told[1:5] == [told[1], "2", "ngram", told[4]]
    assert "outrider/embedded-draft (a toy), drafter" in told[4]
    assert told[5] == "outrider/embedded-draft"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/retry", "there is no reply to replace"),
        ("/save", "no file is named"),
        ("/save there.json", "there.json exists already"),
        ("/save absent/x.json", "cannot be written"),
        ("/load", "no file is named"),
        ("/load absent.json", "absent.json: No such file"),
        ("/load there.json", "there.json is no JSON"),
        ("/load list.json", "list.json has no list of messages"),
        ("/model nobody", "no model 'nobody'"),
        ("/drafter foo", "/drafter: unknown value 'foo'"),
        ("/k many", "/k must be an integer"),
        ("/k 99", "/k must be between 0 and 64"),
    ],
)
def test_a_command_that_fails_loses_nothing(
    outrider: Command, tmp_path: Path, line: str, problem: str
) -> None:
    (tmp_path / "there.json").write_text("{")
    (tmp_path / "list.json").write_text('[{"role": "robot", "content": "x"}]')
    plain = outrider("chat", "--json", *SHORT, stdin=f"{QUESTION}\n{QUESTION}\n")
    wrong = line if line == "/retry" else f"{QUESTION}\n{line}"
    lines = f"{wrong}\n{QUESTION}\n" + (f"{QUESTION}\n" if line == "/retry" else "")
    shown = outrider("chat", "--json", *SHORT, stdin=lines)
    assert shown.code in (2, 3)
    assert problem in shown.err
    ids = [[one["token_ids"] for one in _replies(found.out)] for found in (plain, shown)]
    assert ids[0] == ids[1]
    assert (tmp_path / "there.json").read_text() == "{"


def test_one_message_is_answered_with_a_structure(outrider: Command) -> None:
    shown = outrider("run", "outrider/embedded", QUESTION, "--regex", "[0-9]{2}", "--json")
    assert re.fullmatch("[0-9]{2}", json.loads(shown.out)["text"])
    same = outrider("run", "--prompt", QUESTION, "--regex", "[0-9]{2}", "--json")
    assert json.loads(same.out)["text"] == json.loads(shown.out)["text"]


def test_a_toy_is_called_one(outrider: Command) -> None:
    shown = outrider("chat", *SHORT, stdin=f"{QUESTION}\n{QUESTION}\n")
    assert shown.err.count("outrider/embedded is a toy") == 1
    assert "toy" not in outrider("chat", "--json", *SHORT, stdin=f"{QUESTION}\n").err


def test_what_was_counted_is_told_when_asked(outrider: Command) -> None:
    brief = outrider("chat", *SHORT, stdin=f"{QUESTION}\n")
    whole = outrider("chat", "--stats", *SHORT, stdin=f"{QUESTION}\n")
    assert "tokens a round" not in brief.out
    assert "tokens a round" in whole.out
    assert "time: prefill" in whole.out
    told = " ".join(whole.out.split())
    counted = re.search(r"rounds: (\d+) with drafter \S+ \(([^)]+)\); with 0", told)
    assert counted is not None
    by = [int(part.split()[1]) for part in counted[2].split(", ")]
    assert sum(by) == int(counted[1])


def test_one_message_that_is_cut_names_the_flag(outrider: Command) -> None:
    once = outrider("run", "outrider/embedded", QUESTION, "--max-tokens", "1")
    assert "1 token, " in once.out
    assert "--max-tokens N for more" in once.out.replace("\n", " ")
    talk = outrider("run", "--max-tokens", "2", stdin=f"{QUESTION}\n")
    assert "/set max_tokens N for more" in talk.out.replace("\n", " ")
