"""Thinking budgets as each API spells them, switches of thoughts, and how many tokens these had."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from doubles.scripted_port import CARD, ScriptedPort
from doubles.scripted_site import ask, site_with
from outrider.core.params import SamplingParams
from outrider.server.params import Asked, params_of
from outrider.server.port import EngineCard

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


class ThinkingPort(ScriptedPort):
    @property
    def card(self) -> EngineCard:
        return msgspec.structs.replace(CARD, chat_template="{{ enable_thinking }} </think>")


def port() -> ThinkingPort:
    return ThinkingPort(lambda _: ("<think>so</think>", "Yes"))


def params(path: str, body: dict[str, Any]) -> SamplingParams:
    engine = port()
    got = ask(engine, path, body)
    assert got.status == 200, got.body
    return engine.requests[0].params


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO | {"thinking_budget_tokens": 7}),
        (CHAT, HELLO | {"thinking_token_budget": 7}),
        (CHAT, HELLO | {"thinking_budget": 7.0}),
        (CHAT, HELLO | {"reasoning": {"max_tokens": 7}, "thinking_budget_tokens": None}),
        (COMPLETIONS, {"prompt": "hi", "reasoning_budget_tokens": 7}),
        (RESPONSES, {"input": "hi", "reasoning": {"max_tokens": 7}}),
        (RESPONSES, {"input": "hi", "thinking_budget_tokens": 7}),
        (ANTHROPIC, HELLO | {"thinking": {"type": "enabled", "budget_tokens": 7}}),
    ],
)
def test_each_api_has_a_word_for_a_budget(path: str, body: dict[str, Any]) -> None:
    assert params(path, body).thinking_budget == 7


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"thinking_budget_tokens": -2}, "thinking_budget_tokens"),
        (CHAT, {"thinking_token_budget": 2**40}, "thinking_token_budget"),
        (CHAT, {"thinking_budget_tokens": "many"}, "thinking_budget_tokens"),
        (CHAT, {"reasoning": {"max_tokens": "many"}}, "reasoning.max_tokens"),
        (CHAT, {"reasoning": {"max_tokens": True}}, "reasoning.max_tokens"),
        (RESPONSES, {"input": "hi", "reasoning": {"max_tokens": 1.5}}, "reasoning.max_tokens"),
        (
            ANTHROPIC,
            {"thinking": {"type": "enabled", "budget_tokens": []}},
            "thinking.budget_tokens",
        ),
        (ANTHROPIC, {"thinking": {"type": "much"}}, "thinking"),
    ],
)
def test_what_is_no_budget_is_refused_by_name(path: str, body: dict[str, Any], name: str) -> None:
    got = ask(port(), path, ({} if "input" in body else HELLO) | body)
    assert got.status == 400
    message = got.json()["error"]["message"]
    assert message.startswith(f"{name}: ")
    if "Expected" not in message and "its type" not in message:
        assert "or -1 for no limit; got" in message
        assert "leave it out" in message


def test_the_owner_s_budget_holds_where_a_request_has_none() -> None:
    site = site_with(port())
    site.defaults["thinking_budget"] = 5

    def found(**given: Any) -> int | None:
        return params_of(site, Asked(**given), max_tokens=9).thinking_budget

    assert found() == 5
    assert found(thinking_budget_tokens=0) == 0
    assert found(thinking_budget_tokens=-1) is None


def chat(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Variables for the template, and warnings."""
    engine = port()
    warnings = ask(engine, path, body).json().get("warnings", [])
    return dict(engine.chats[0].variables), warnings


@pytest.mark.parametrize(
    ("path", "body", "variables"),
    [
        (CHAT, HELLO | {"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        (CHAT, HELLO | {"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        (CHAT, HELLO | {"reasoning": {"enabled": False}}, {"reasoning_effort": "none"}),
        (RESPONSES, {"input": "x", "reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        (ANTHROPIC, HELLO | {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
    ],
)
def test_thoughts_are_switched_off(
    path: str, body: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert chat(path, body) == (variables, [])


def test_thoughts_are_left_out_as_openrouter_says() -> None:
    got = ask(port(), CHAT, HELLO | {"reasoning": {"exclude": True}}).json()
    assert got["choices"][0]["message"] == {"role": "assistant", "content": "Yes"}


def usage(path: str, body: dict[str, Any], *, cut: bool | None) -> list[dict[str, Any]]:
    """Of an answer and of a stream."""
    found: list[dict[str, Any]] = []
    for stream in (False, True):
        engine = port()
        engine.thoughts = (2, cut)
        got = ask(engine, path, body | {"stream": stream})
        if not stream:
            found.append(got.json()["usage"])
            continue
        told = [event.get("response", event).get("usage") for event in got.events]
        found.append([one for one in told if one][-1])
    return found


def test_usage_has_the_tokens_of_thoughts_and_whether_the_budget_ended_them() -> None:
    cut = {"thinking_budget_reached": True}
    asked = HELLO | {"stream_options": {"include_usage": True}}
    engine = port()
    engine.thoughts = (2, False)
    whole = ask(engine, CHAT, HELLO | {"n": 2}).json()["usage"]["completion_tokens_details"]
    assert whole == {"reasoning_tokens": 4, "thinking_budget_reached": False}
    engine.thoughts = (2, True)
    streamed = ask(engine, CHAT, asked | {"stream": True}).events[-2]["usage"]
    assert streamed["completion_tokens_details"] == {"reasoning_tokens": 2} | cut
    for one in usage(RESPONSES, {"input": "hi"}, cut=True):
        assert one["output_tokens_details"] == {"reasoning_tokens": 2} | cut
    for one in usage(ANTHROPIC, HELLO, cut=True):
        assert one["output_tokens_details"] == {"thinking_tokens": 2} | cut
    (one, _) = usage(ANTHROPIC, HELLO, cut=None)
    assert one["output_tokens_details"] == {"thinking_tokens": 2}
    assert "completion_tokens_details" not in ask(port(), CHAT, HELLO).json()["usage"]
