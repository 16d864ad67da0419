"""opencode, a coding agent of the terminal, by chat completions."""

from __future__ import annotations

import json

from clients.programs import Program

PATH = "opencode/node_modules/opencode-linux-x64/bin/opencode"
CHAT = "/v1/chat/completions"


def settings(url: str, model: str) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Outrider",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {model: {"limit": {"context": 65536, "output": 200}}},
    }
    names = dict.fromkeys(("model", "small_model"), f"outrider/{model}")
    return json.dumps({"provider": {"outrider": provider}, **names, "autoupdate": False})


def asked(client: Program, model: str, question: str, *words: str) -> list[dict[str, object]]:
    """The parts of messages that it prints."""
    client.settings(".config/opencode/opencode.json", settings(client.tap.url, model))
    lines = client.run(
        *("run", "--format", "json", *words, question),
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_LSP_DOWNLOAD="1",
    )
    return [json.loads(line)["part"] for line in lines.splitlines()]


def test_it_prints_what_the_server_wrote(agent_served, program):
    with program(PATH, url=agent_served.url) as client:
        parts = asked(client, agent_served.model, "Say hello.", "--title", "A word")
        [exchange] = client.tap.to(CHAT)
    [text] = [part["text"] for part in parts if part["type"] == "text"]
    assert text.strip() == exchange.chat_text.strip() != ""
    [end] = [part for part in parts if part["type"] == "step-finish"]
    assert end["reason"] in ("stop", "length")
    usage = exchange.events[-1]["usage"]
    assert end["tokens"]["output"] == usage["completion_tokens"] > 0


def test_it_runs_tools_and_reads_their_results(scripted, program, tmp_path):
    work = tmp_path / "home" / "work"
    read = {"name": "read", "arguments": {"filePath": str(work / "note.txt")}}
    copy = {"name": "write", "arguments": {"filePath": str(work / "copy.txt"), "content": "4711"}}
    server = scripted(
        ("title generator", "A note"),
        ("Wrote file", "The copy says 4711."),
        ("plover 4711", f"<tool_call>{json.dumps(copy)}</tool_call>"),
        ("Copy the note.", f"I look.<tool_call>{json.dumps(read)}</tool_call>"),
    )
    with program(PATH, url=server.url) as client:
        (client.work / "note.txt").write_text("plover 4711")
        parts = asked(client, server.model, "Copy the note.")
        client.record("opencode")
        exchanges = [one for one in client.tap.to(CHAT) if one.asked.get("tools")]
    assert (work / "copy.txt").read_text() == "4711"
    assert [part["text"] for part in parts if part["type"] == "text"] == [
        "I look.",
        "The copy says 4711.",
    ]
    calls = [
        call["id"]
        for exchange in exchanges
        for event in exchange.events
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", ())
        if call.get("id")
    ]
    assert len(exchanges) == 3
    results = [one for one in exchanges[-1].asked["messages"] if one["role"] == "tool"]
    assert [one["tool_call_id"] for one in results] == calls
    assert "plover 4711" in json.dumps(results[0]["content"])
