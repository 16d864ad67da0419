"""What is asked in vain: the answer's warnings name it, and nothing is ignored in silence."""

from __future__ import annotations

from typing import Any

import msgspec

from doubles.scripted_port import CARD, ScriptedPort
from doubles.scripted_site import ask
from outrider.server.port import EngineCard

MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class ThinkingPort(ScriptedPort):
    @property
    def card(self) -> EngineCard:
        return msgspec.structs.replace(CARD, chat_template="{{ enable_thinking }} </think>")


def warnings(path: str, body: dict[str, Any]) -> list[str]:
    return ask(ThinkingPort(), path, body).json().get("warnings", [])


def test_what_changes_nothing_is_warned_of() -> None:
    assert warnings(CHAT, MESSAGES) == []
    assert warnings(CHAT, MESSAGES | {"store": False}) == []
    (told,) = warnings(CHAT, MESSAGES | {"store": True})
    assert told.startswith("store: ")
    (told,) = warnings(RESPONSES, {"input": "hi", "temperature": 0, "max_tool_calls": 3})
    assert told.startswith("max_tool_calls: ")
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    limit = {"max_tokens": 9, "context_management": edits}
    (told,) = warnings(ANTHROPIC, MESSAGES | limit)
    assert told.startswith("context_management: ")


def test_a_variable_that_the_template_has_not_is_warned_of() -> None:
    known = {"chat_template_kwargs": {"enable_thinking": False}}
    assert warnings(CHAT, MESSAGES | known) == []
    (told,) = warnings(CHAT, MESSAGES | {"reasoning_effort": "high"})
    assert told == "'reasoning_effort': the chat template has no such variable"


def test_thoughts_that_nobody_wants_are_left_out() -> None:
    def port() -> ThinkingPort:
        return ThinkingPort(lambda _: ("<think>so</think>", "Yes"))

    body = MESSAGES | {"include_reasoning": False}
    message = ask(port(), CHAT, body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes"}
    assert "so" in ask(port(), CHAT, MESSAGES).body.decode()
    streamed = ask(port(), CHAT, body | {"stream": True}).body.decode()
    assert '"reasoning' not in streamed
    assert "Yes" in streamed


def test_likeliest_tokens_of_a_response_need_no_second_field() -> None:
    body = {"input": "hi", "temperature": 0, "top_logprobs": 1}
    engine = ScriptedPort()
    (item,) = ask(engine, RESPONSES, body).json()["output"]
    logprobs = item["content"][0]["logprobs"]
    assert [one["token"] for one in logprobs] == list("Hello")
    assert all(len(one["top_logprobs"]) == 1 for one in logprobs)
    assert engine.requests[0].params.top_logprobs == 1
