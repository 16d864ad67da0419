"""Codex, OpenAI's coding agent, by the Responses API."""

from __future__ import annotations

import json

from clients.programs import Program

PATH = "codex/node_modules/.bin/codex"
RESPONSES = "/v1/responses"
SETTINGS = """
model = "{model}"
model_provider = "outrider"
model_context_window = 65536
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.outrider]
name = "Outrider"
base_url = "{url}/v1"
wire_api = "responses"
"""
ASK = ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def asked(client: Program, model: str, question: str) -> list[dict[str, object]]:
    """The items that it tells of."""
    client.settings(".codex/config.toml", SETTINGS.format(model=model, url=client.tap.url))
    lines = [json.loads(line) for line in client.run(*ASK, question).splitlines()]
    assert lines[-1]["type"] == "turn.completed"
    return [line["item"] for line in lines if line["type"] == "item.completed"]


def test_it_prints_what_the_server_wrote(agent_served, program):
    with program(PATH, url=agent_served.url) as client:
        items = asked(client, agent_served.model, "Say hello.")
        [exchange] = client.tap.to(RESPONSES)
    last = exchange.events[-1]
    assert last["type"] == "response.completed"
    [told] = last["response"]["output"]
    assert told["content"][0]["text"].strip()
    assert items[-1]["text"] == told["content"][0]["text"]


def test_it_runs_a_tool_and_reads_its_result(scripted, program):
    call = {"name": "exec_command", "arguments": {"cmd": "cat note.txt"}}
    server = scripted(
        ("plover 4711", "The note says: plover 4711."),
        ("Read the note.", f"I look.<tool_call>{json.dumps(call)}</tool_call>"),
    )
    with program(PATH, url=server.url) as client:
        (client.work / "note.txt").write_text("plover 4711")
        items = asked(client, server.model, "Read the note.")
        client.record("codex")
        first, second = client.tap.to(RESPONSES)
    assert [item.get("text") for item in items if item["type"] == "agent_message"] == [
        "I look.",
        "The note says: plover 4711.",
    ]
    [called] = [item for item in first.events[-1]["response"]["output"] if "call_id" in item]
    [result] = [item for item in second.asked["input"] if item["type"] == "function_call_output"]
    assert result["call_id"] == called["call_id"]
    assert "plover 4711" in json.dumps(result["output"])
