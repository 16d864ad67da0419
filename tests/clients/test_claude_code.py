"""Claude Code, Anthropic's coding agent, by Messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.programs import Program

PATH = "claude_code/node_modules/@anthropic-ai/claude-code-linux-x64/claude"
MESSAGES = "/v1/messages"
# Silence of 20 seconds ends a stream, and nothing is tried again. CLAUDE_STREAM_IDLE_TIMEOUT_MS has
# 300 seconds at least; the limit for bytes may be shorter.
IMPATIENT = {
    "API_TIMEOUT_MS": "20000",
    "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": "20000",
    "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": "20000",
    "CLAUDE_ENABLE_BYTE_WATCHDOG": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
}


def asked(
    client: Program, model: str, question: str, *words: str, run=Program.run, **more: str
) -> dict[str, object]:
    printed = run(
        client,
        *("-p", question, "--output-format", "json", *words),
        ANTHROPIC_BASE_URL=client.tap.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL=model,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=model,
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="200",
        CLAUDE_CODE_MAX_CONTEXT_TOKENS="65536",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        **more,
    )
    return json.loads(printed)


def text_of(exchange) -> str:
    deltas = [event["delta"] for event in exchange.events if event["type"] == "content_block_delta"]
    return "".join(delta.get("text", "") for delta in deltas)


def test_it_prints_what_the_server_wrote(agent_served, program):
    with program(PATH, url=agent_served.url) as client:
        told = asked(client, agent_served.model, "Say hello.")
        exchange = client.tap.to(MESSAGES)[-1]
    assert told["subtype"] == "success"
    assert told["result"] == text_of(exchange)
    assert text_of(exchange).strip()
    usage = exchange.events[-2]["usage"]
    assert told["usage"]["output_tokens"] == usage["output_tokens"] > 0


def rules(work: Path) -> tuple[tuple[str, str], ...]:
    call = {"name": "Read", "arguments": {"file_path": str(work / "note.txt")}}
    return (
        ("plover 4711", "The note says: plover 4711."),
        ("Read the note.", f"I look.<tool_call>{json.dumps(call)}</tool_call>"),
        ("", "Something else."),
    )


def test_it_runs_a_tool_and_reads_its_result(scripted, program, tmp_path):
    work = tmp_path / "home" / "work"
    server = scripted(*rules(work))
    with program(PATH, url=server.url) as client:
        (client.work / "note.txt").write_text("plover 4711")
        told = asked(client, server.model, "Read the note.", "--allowedTools", "Read")
        client.record("claude_code")
        exchanges = client.tap.to(MESSAGES)
    assert told["result"] == "The note says: plover 4711."
    assert told["num_turns"] == 2
    last = exchanges[-1]
    results = [
        block
        for message in last.asked["messages"]
        for block in message["content"]
        if isinstance(block, dict) and block["type"] == "tool_result"
    ]
    assert len(results) == 1
    calls = [
        event["content_block"]["id"]
        for exchange in exchanges
        for event in exchange.events
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use"
    ]
    assert calls == [results[0]["tool_use_id"]]


def test_it_knows_a_prompt_that_is_too_long(served, program):
    with program(PATH, url=served.url) as client:
        told = asked(client, served.model, "Say hello.", run=Program.fail)
    assert told["is_error"]
    assert "Prompt is too long" in told["result"]


@pytest.mark.slow
def test_it_waits_for_a_slow_first_token(scripted, program, tmp_path):
    server = scripted(*rules(tmp_path / "home" / "work"), first_seconds=60)
    with program(PATH, url=server.url) as client:
        (client.work / "note.txt").write_text("plover 4711")
        words = ("Read the note.", "--allowedTools", "Read")
        told = asked(client, server.model, *words, **IMPATIENT)
        exchanges = client.tap.to(MESSAGES)
    assert told["result"] == "The note says: plover 4711."
    assert told["num_turns"] == 2
    for exchange in exchanges:
        assert [event["type"] for event in exchange.events].count("ping") >= 3


@pytest.mark.slow
def test_it_gives_up_where_there_are_no_heartbeats(scripted, program, tmp_path):
    server = scripted(*rules(tmp_path / "home" / "work"), first_seconds=60)
    with program(PATH, url=server.url) as client:
        client.tap.withheld = (b"event: ping",)
        told = asked(client, server.model, "Read the note.", run=Program.give_up, **IMPATIENT)
        exchanges = client.tap.to(MESSAGES)
    assert told["is_error"]
    assert "idle" in told["result"]
    assert not any(b"message_stop" in exchange.answer for exchange in exchanges)
