"""Prompts beyond the window: clients know them by status, code and words, and shorten them."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask
from outrider.api.callers import PromptReader
from outrider.core.errors import PromptTooLongError
from outrider.server.errors import api_error

CHAT = "/v1/chat/completions"
# What LiteLLM, OpenRouter's clients, Groq's and Anthropic's look for, in lower case.
PATTERNS = (
    r"this model's maximum context length is \d+ tokens",
    r"reduce the length of the messages",
)
ANTHROPIC = r"^prompt is too long[^0-9]*(\d+) tokens? > (\d+) maximum"


class ReadingPort(ScriptedPort):
    """It refuses by bytes what engines do, 32 for each of its 256 tokens."""

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        reader = PromptReader(cast("Any", None), window=self.card.window, vocab_size=512)
        reader.check_size(prompt)
        return await super().encode(prompt, add_special=add_special)


def body_of(path: str, text: str) -> dict[str, Any]:
    if path.startswith("/v1/responses"):
        return {"input": text}
    if path == "/v1/completions" or path == "/tokenize":
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


PARAMS = {
    CHAT: "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": None,
}
COUNTS = {
    "/tokenize": "prompt",
    "/v1/responses/input_tokens": "input",
    "/v1/messages/count_tokens": None,
}


def check(path: str, body: dict[str, Any], param: str | None) -> None:
    got = ask(ReadingPort(), path, body)
    assert got.status == 400
    error = got.json()["error"]
    assert error["type"] == "invalid_request_error"
    for pattern in PATTERNS:
        assert re.search(pattern, error["message"].lower()), error
    if param is None:
        found = re.match(ANTHROPIC, error["message"])
        assert found is not None, error
        assert int(found[1]) > int(found[2]) == 256
    else:
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize("text", ["x" * 256, "x" * 8192, "x" * 8193, "é" * 4097, "x" * 99_999])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PARAMS)
def test_every_api_says_so_of_tokens_and_of_bytes(path: str, stream: bool, text: str) -> None:
    check(path, body_of(path, text) | {"stream": stream}, PARAMS[path])


@pytest.mark.parametrize("path", COUNTS)
def test_counts_say_so_of_what_is_not_counted(path: str) -> None:
    assert ask(ReadingPort(), path, body_of(path, "x" * 300)).status == 200
    check(path, body_of(path, "x" * 8193), COUNTS[path])


def test_words_of_an_error() -> None:
    by_tokens, by_bytes = PromptTooLongError(301, 256), PromptTooLongError(257, 256, 8193, 8192)
    assert str(by_tokens) == (
        "This model's maximum context length is 256 tokens, and the prompt has 301 tokens."
    )
    assert str(by_bytes).endswith("and the prompt has 8,193 bytes or more; it may have 8,192.")
    told = api_error(by_bytes, "/v1/messages/count_tokens").message
    assert told.startswith("prompt is too long: at least 257 tokens > 256 maximum. This model's")


@pytest.mark.parametrize("max_tokens", [1, 250, 256, 100_000])
@pytest.mark.parametrize("path", PARAMS)
def test_a_limit_beyond_the_window_is_what_is_left_of_it(path: str, max_tokens: int) -> None:
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    port = ScriptedPort()
    assert ask(port, path, body_of(path, "x") | {name: max_tokens}).status == 200
    (request,) = port.requests
    left = port.card.window - len(request.prompt_ids)
    assert request.params.max_tokens == min(max_tokens, left)
