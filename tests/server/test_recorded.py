"""What real clients asked, asked again: each answer is whole, and nothing they need is left out.

Recordings are made by `scripts/client_tests --record`; each names its package and version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from doubles.asgi_client import Got
from doubles.scripted_port import CARD, ScriptedPort
from doubles.scripted_site import ask
from outrider.api.chat_messages import forms
from outrider.server.port import EngineCard

RECORDED = Path(__file__).parents[1] / "clients" / "recorded"
TEXT = "I look."
# What is told to be left out, by client: tools that only their makers' servers run, and
# parameters of other servers.
LEFT_OUT = {
    "codex": ["'namespace'", "'web_search'"],
    "claude_code": ["context_management", "instructions within the conversation"],
    "continue": [],
    "opencode": [],
    "aider": [],
    "open_webui": ["repeat_penalty", "num_ctx"],
}
# They send two messages of the user's in a row, which a strict template gets as one.
IN_A_ROW = {"opencode"}


class AgentPort(ScriptedPort):
    """An engine with a long window, whose model calls tools as Hermes does."""

    @property
    def card(self) -> EngineCard:
        template = "{{ tools }} {{ enable_thinking }} {{ reasoning_effort }} <tool_call> arguments"
        return msgspec.structs.replace(CARD, window=200_000, chat_template=template)


def recorded() -> Iterator[Any]:
    for name in LEFT_OUT:
        requests = json.loads((RECORDED / f"{name}.json").read_text("utf-8"))["requests"]
        for i, request in enumerate(requests):
            yield pytest.param(name, request, id=f"{name}-{i}")


def test_every_recording_is_asked() -> None:
    assert {file.stem for file in RECORDED.glob("*.json")} == set(LEFT_OUT)


@pytest.mark.parametrize(("name", "request_"), list(recorded()))
def test_a_client_is_answered(name: str, request_: Mapping[str, Any]) -> None:
    body = request_["body"]
    call = '<tool_call>{"name": "Read", "arguments": {"a": 1}}</tool_call>'
    calls = body is not None and "tools" in body
    port = AgentPort(lambda _: (TEXT, call) if calls else (TEXT,))
    if body is not None:
        body = body | {"model": "scripted"}
    got = ask(port, request_["path"], body, headers=request_["headers"])
    assert got.status == 200
    if body is None:
        assert got.json()["data"][0]["id"] == "scripted"
        return
    whole, warnings = said(request_["path"], got)
    assert whole == (TEXT, "tool_calls" if calls else "stop")
    unknown = [told for told in warnings if not any(one in told for one in LEFT_OUT[name])]
    assert not unknown
    messages = port.chats[0].messages
    if name in IN_A_ROW:
        each = [form.messages for form in forms(messages, (), "system")]
        messages = next(one for one in each if alternates(one))
    check_turns(messages)


def said(path: str, got: Got) -> tuple[tuple[str, str], Sequence[str]]:
    """The text of an answer and why it ended, in OpenAI's words, and its warnings."""
    events = got.events
    if path.startswith("/v1/chat"):
        chunks = [one for one in events if one != "[DONE]"] or [got.json()]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = [choice.get("delta", choice.get("message"))["content"] for choice in choices]
        warnings = [told for chunk in chunks for told in chunk.get("warnings", ())]
        return ("".join(texts), choices[-1]["finish_reason"]), warnings
    if path.startswith("/v1/responses"):
        last = events[-1]["response"]
        kinds = [item["type"] for item in last["output"]]
        text = last["output"][0]["content"][0]["text"]
        reason = "tool_calls" if kinds[-1] == "function_call" else "stop"
        return (text, reason), last.get("warnings", [])
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    [end] = [event for event in events if event["type"] == "message_delta"]
    reasons = {"tool_use": "tool_calls", "end_turn": "stop"}
    return (text, reasons[end["delta"]["stop_reason"]]), end.get("warnings", [])


def check_turns(messages: Sequence[Mapping[str, Any]]) -> None:
    """As the strictest templates want them: a system message first or none, then turns that
    alternate, and results of tools after their calls."""
    assert "system" not in [message["role"] for message in messages[1:]]
    assert alternates(messages)
    asked = {call["id"] for message in messages for call in message.get("tool_calls") or ()}
    answered = {message["tool_call_id"] for message in messages if message["role"] == "tool"}
    assert asked == answered


def alternates(messages: Sequence[Mapping[str, Any]]) -> bool:
    turns = [one["role"] for one in messages if one["role"] not in ("system", "tool")]
    return turns[0] == "user" and all(a != b or a == "assistant" for a, b in pairwise(turns))
