"""aider, which edits files by blocks of text and calls no tools, by chat completions."""

from __future__ import annotations

import json

from clients.programs import Program

PATH = "aider/bin/aider"
CHAT = "/v1/chat/completions"
OPTIONS = (
    *("--no-git", "--yes-always", "--no-pretty", "--no-check-update", "--analytics-disable"),
    *("--no-show-model-warnings", "--no-show-release-notes", "--no-detect-urls"),
    *("--edit-format", "diff", "--map-tokens", "0"),
)
BEFORE = "def area(a, b):\n    return a + b\n"
AFTER = "def area(a, b):\n    return a * b\n"
EDIT = """\
The product is the area.

shapes.py
```python
<<<<<<< SEARCH
    return a + b
=======
    return a * b
>>>>>>> REPLACE
```
"""


def asked(client: Program, model: str, question: str, *words: str) -> str:
    limits = {"max_input_tokens": 65536, "max_tokens": 65536, "max_output_tokens": 200}
    costs = {"input_cost_per_token": 0, "output_cost_per_token": 0}
    name = f"openai/{model}"
    told = {name: {"litellm_provider": "openai", "mode": "chat"} | limits | costs}
    client.settings(".aider.model.metadata.json", json.dumps(told))
    return client.run(
        *("--model", name, *OPTIONS, *words, "--message", question),
        OPENAI_API_BASE=f"{client.tap.url}/v1",
        OPENAI_API_KEY="none",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )


def test_it_prints_what_the_server_wrote(agent_served, program):
    with program(PATH, url=agent_served.url) as client:
        printed = asked(client, agent_served.model, "Say hello.", "--chat-mode", "ask")
        [exchange] = client.tap.to(CHAT)
    assert exchange.chat_text.strip()
    assert " ".join(exchange.chat_text.split()) in " ".join(printed.split())


def test_it_edits_a_file(scripted, program):
    server = scripted(("Correct the area.", EDIT))
    with program(PATH, url=server.url) as client:
        file = client.work / "shapes.py"
        file.write_text(BEFORE)
        printed = asked(client, server.model, "Correct the area.", "shapes.py")
        client.record("aider")
        exchanges = client.tap.to(CHAT)
        assert file.read_text() == AFTER
    assert "Applied edit to shapes.py" in printed
    assert [one.chat_text for one in exchanges] == [EDIT]
    assert any(BEFORE in message["content"] for message in exchanges[0].asked["messages"])


def test_it_asks_again_where_an_edit_does_not_fit(scripted, program):
    wrong = EDIT.replace("return a + b", "return b + a - 1")
    server = scripted(("failed to match", EDIT), ("Correct the area.", wrong))
    with program(PATH, url=server.url) as client:
        file = client.work / "shapes.py"
        file.write_text(BEFORE)
        asked(client, server.model, "Correct the area.", "shapes.py")
        exchanges = client.tap.to(CHAT)
        assert file.read_text() == AFTER
    assert [one.chat_text for one in exchanges] == [wrong, EDIT]
