"""Continue's command line, by chat completions."""

from __future__ import annotations

import json

from clients.programs import Program

PATH = "continue/node_modules/.bin/cn"
CHAT = "/v1/chat/completions"
SETTINGS = """
name: local
version: 1.0.0
schema: v1
models:
  - name: outrider
    provider: openai
    model: {model}
    apiBase: {url}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
"""


def asked(client: Program, model: str, question: str) -> str:
    text = SETTINGS.format(model=model, url=client.tap.url)
    file = client.settings(".continue/config.yaml", text)
    words = ("-p", "--config", str(file), "--auto", question)
    return client.run(*words, CONTINUE_TELEMETRY_ENABLED="0")


def test_it_prints_what_the_server_wrote(agent_served, program):
    with program(PATH, url=agent_served.url) as client:
        printed = asked(client, agent_served.model, "Say hello.")
        [exchange] = client.tap.to(CHAT)
    assert printed.strip() == exchange.chat_text.strip() != ""


def test_it_runs_a_tool_and_reads_its_result(scripted, program):
    call = {"name": "Read", "arguments": {"filepath": "note.txt"}}
    server = scripted(
        ("plover 4711", "The note says: plover 4711."),
        ("Read the note.", f"I look.<tool_call>{json.dumps(call)}</tool_call>"),
    )
    with program(PATH, url=server.url) as client:
        (client.work / "note.txt").write_text("plover 4711")
        printed = asked(client, server.model, "Read the note.")
        client.record("continue")
        first, second = client.tap.to(CHAT)
    assert printed.strip().endswith("The note says: plover 4711.")
    calls = [
        call
        for event in first.events
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    result = second.asked["messages"][-1]
    assert result["role"] == "tool"
    assert result["tool_call_id"] == calls[0]["id"]
    assert "plover 4711" in json.dumps(result["content"])
