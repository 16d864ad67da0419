"""Codex, OpenAI's coding agent, by the Responses API."""

from __future__ import annotations

import json

import pytest

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
# Of the provider: silence of 20 seconds ends a stream, and nothing is tried again.
IMPATIENT = """
stream_idle_timeout_ms = 20000
stream_max_retries = 0
request_max_retries = 0
"""
CALL = {"name": "exec_command", "arguments": {"cmd": "cat note.txt"}}
ASK = ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def set_up(client: Program, model: str, more: str = "") -> None:
    client.settings(".codex/config.toml", SETTINGS.format(model=model, url=client.tap.url) + more)


def asked(client: Program, model: str, question: str, more: str = "") -> list[dict[str, object]]:
    """The items that it tells of."""
    set_up(client, model, more)
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


RULES = (
    ("plover 4711", "The note says: plover 4711."),
    ("Read the note.", f"I look.<tool_call>{json.dumps(CALL)}</tool_call>"),
)


def said(items: list[dict[str, object]]) -> list[object]:
    return [item["text"] for item in items if item["type"] == "agent_message"]


def test_it_runs_a_tool_and_reads_its_result(scripted, program):
    server = scripted(*RULES)
    with program(PATH, url=server.url) as client:
        (client.work / "note.txt").write_text("plover 4711")
        items = asked(client, server.model, "Read the note.")
        client.record("codex")
        first, second = client.tap.to(RESPONSES)
    assert said(items) == ["I look.", "The note says: plover 4711."]
    [called] = [item for item in first.events[-1]["response"]["output"] if "call_id" in item]
    [result] = [item for item in second.asked["input"] if item["type"] == "function_call_output"]
    assert result["call_id"] == called["call_id"]
    assert "plover 4711" in json.dumps(result["output"])


@pytest.mark.slow
def test_it_waits_for_a_slow_first_token(scripted, program):
    server = scripted(*RULES, first_seconds=60)
    with program(PATH, url=server.url) as client:
        (client.work / "note.txt").write_text("plover 4711")
        items = asked(client, server.model, "Read the note.", IMPATIENT)
        exchanges = client.tap.to(RESPONSES)
    assert said(items) == ["I look.", "The note says: plover 4711."]
    assert len(exchanges) == 2
    for exchange in exchanges:
        kinds = [event["type"] for event in exchange.events]
        assert kinds.count("response.in_progress") >= 4


@pytest.mark.slow
def test_it_gives_up_where_there_are_no_heartbeats(scripted, program):
    server = scripted(*RULES, first_seconds=60)
    with program(PATH, url=server.url) as client:
        client.tap.withheld = (b"event: response.in_progress",)
        set_up(client, server.model, IMPATIENT)
        printed = client.give_up(*ASK, "Read the note.")
        [exchange] = client.tap.to(RESPONSES)
    assert "idle timeout" in printed
    assert b"response.completed" not in exchange.answer
