"""A batch whose server is killed: the next one answers every line once, as it answers requests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from doubles.served import Served, served

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

NUM_LINES = 80
PROMPTS = ("def quicksort(items):", "Once upon a time", "import os")


def body(number: int) -> dict[str, Any]:
    return {"prompt": PROMPTS[number % len(PROMPTS)], "temperature": 0, "max_tokens": 16}


def retrieved(server: Served, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get(f"/v1/batches/{batch}").json()
    return found


def begun(server: Served) -> str:
    """A batch of which some lines are answered."""
    data = "".join(
        json.dumps(
            {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions"} | {"body": body(i)}
        )
        + "\n"
        for i in range(NUM_LINES)
    )
    form = {"file": ("in.jsonl", data.encode())}
    got = server.client.post("/v1/files", files=form, data={"purpose": "batch"})
    assert got.status_code == 200, got.text
    asked = {"input_file_id": got.json()["id"], "endpoint": "/v1/completions"}
    got = server.client.post("/v1/batches", json=asked | {"completion_window": "24h"})
    assert got.status_code == 200, got.text
    batch: str = got.json()["id"]
    while not retrieved(server, batch)["request_counts"]["completed"]:
        time.sleep(0.005)
    return batch


def test_a_batch_goes_on_after_its_server_was_killed(tmp_path: Path) -> None:
    flags = ("--files", str(tmp_path / "files"))
    with served(*flags) as server:
        batch = begun(server)
        server.process.kill()
        server.process.wait()
    with served(*flags) as server:
        expected = [server.complete(**body(i))["choices"][0]["text"] for i in range(len(PROMPTS))]
        while (found := retrieved(server, batch))["status"] != "completed":
            assert found["status"] in ("in_progress", "finalizing")
            time.sleep(0.05)
        assert found["request_counts"]["completed"] == NUM_LINES
        got = server.client.get(f"/v1/files/{found['output_file_id']}/content")
        answers = {line["custom_id"]: line for line in map(json.loads, got.text.splitlines())}
        assert len(got.text.splitlines()) == len(answers) == NUM_LINES
        for name, answer in answers.items():
            (choice,) = answer["response"]["body"]["choices"]
            assert choice["text"] == expected[int(name) % len(PROMPTS)]
        assert server.end() == 0
