"""Claude Code, Anthropic's coding agent, by Messages."""

from __future__ import annotations

import json

from clients.programs import Program

PATH = "claude_code/node_modules/@anthropic-ai/claude-code-linux-x64/claude"
MESSAGES = "/v1/messages"


def asked(
    client: Program, model: str, question: str, *words: str, fails: bool = False
) -> dict[str, object]:
    printed = (client.fail if fails else client.run)(
        *("-p", question, "--output-format", "json", *words),
        ANTHROPIC_BASE_URL=client.tap.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL=model,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=model,
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="200",
        CLAUDE_CODE_MAX_CONTEXT_TOKENS="65536",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
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


def test_it_runs_a_tool_and_reads_its_result(scripted, program, tmp_path):
    work = tmp_path / "home" / "work"
    call = {"name": "Read", "arguments": {"file_path": str(work / "note.txt")}}
    server = scripted(
        ("plover 4711", "The note says: plover 4711."),
        ("Read the note.", f"I look.<tool_call>{json.dumps(call)}</tool_call>"),
        ("", "Something else."),
    )
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
        told = asked(client, served.model, "Say hello.", fails=True)
    assert told["is_error"]
    assert "Prompt is too long" in told["result"]
