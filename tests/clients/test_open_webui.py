"""Open WebUI's own server before ours: what its pages ask, by the API that they ask it by.

Its packages for reading documents and sound are not installed: they bring torch, and no chat
needs them.
"""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.conftest import MODEL

pytest.importorskip("open_webui")
CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Say hello."}]
SETTINGS = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "none",
    "ENABLE_OLLAMA_API": "False",
    "ENABLE_VERSION_UPDATE_CHECK": "False",
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "True",
    "ANONYMIZED_TELEMETRY": "False",
    # As its own command does: where its pages are.
    "FROM_INIT_PY": "True",
}


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def asker(url: str) -> Callable[..., str]:
    """Who asks it as a browser does that has signed in."""
    headers = {"content-type": "application/json"}

    def ask(path: str, body: object = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read().decode()

    token = json.loads(ask("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
    headers["authorization"] = f"Bearer {token}"
    return ask


def told(stream: str) -> str:
    """The text of a stream."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if "data: {" in line]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_its_chats_and_tasks_are_answered(agent_served, program):
    url = f"http://127.0.0.1:{free_port()}"
    python = str(Path(sys.executable).relative_to(Path.cwd() / ".clients"))
    words = ["-m", "uvicorn", "open_webui.main:app", "--port", url.rpartition(":")[2]]
    with program(python, url=agent_served.url) as client:
        data = client.home / "data"
        data.mkdir()
        more = {"OPENAI_API_BASE_URL": f"{client.tap.url}/v1", "OPENAI_API_KEY": "none"}
        more |= {"DATA_DIR": str(data), "STATIC_DIR": str(client.home / "static")}
        with client.serving(*words, ready=f"{url}/health", **SETTINGS, **more):
            ask = asker(url)
            models = json.loads(ask("/api/models"))["data"]
            assert [model["id"] for model in models] == [MODEL]
            params = {"temperature": 0, "max_tokens": 24, "top_k": 40, "min_p": 0.0, "seed": 3}
            params |= {"repeat_penalty": 1.1, "num_ctx": 4096, "reasoning_effort": "low"}
            chat = {"model": MODEL, "messages": ASK, "params": params}
            printed = ask("/api/chat/completions", chat | {"stream": True})
            whole = json.loads(ask("/api/chat/completions", chat | {"stream": False}))
            for task in ("title", "follow_up", "tags", "queries"):
                said = [*ASK, {"role": "assistant", "content": "Hello."}]
                body = {"model": MODEL, "messages": said, "chat_id": "local:chat"}
                assert json.loads(ask(f"/api/v1/tasks/{task}/completions", body))["choices"]
        client.record("open_webui")
        streamed, at_once, *tasks = client.tap.to(CHAT)
        assert not client.tap.failed
    assert len(tasks) == 4
    text = at_once.told["choices"][0]["message"]["content"]
    assert told(streamed.answer.decode()) == told(printed) == text
    assert whole["choices"][0]["message"]["content"] == text
    assert streamed.asked["seed"] == 3
