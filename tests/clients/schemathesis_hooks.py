"""What schemathesis loads: generated bodies around ones that are answered, and checks of streams.

A body made from the document alone is refused for its messages or its model nearly always, so most
of what lies behind would stay untried.
"""

from __future__ import annotations

import json
import random
from zlib import crc32

import schemathesis

SAY = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# Bodies that are answered, by path.
ANSWERED = {
    "/v1/chat/completions": [
        {"messages": SAY},
        {"messages": SAY, "logprobs": True, "top_logprobs": 2},
        {"messages": SAY, "tools": [TOOL], "tool_choice": "required"},
        {"messages": SAY, "response_format": {"type": "json_object"}},
    ],
    "/v1/completions": [
        {"prompt": "def f(x):"},
        {"prompt": ["a", [1, 2, 3]], "n": 2},
        {"prompt": "x", "echo": True, "logprobs": 2, "max_tokens": 1},
        {"prompt": "x", "temperature": 0.9, "seed": 3, "speculative": {"trace": True}},
    ],
    "/v1/responses": [
        {"input": "hi"},
        {"input": SAY, "top_logprobs": 1},
        {"input": SAY, "tools": [{"type": "function", **TOOL["function"]}]},
    ],
    "/v1/responses/input_tokens": [{"input": "hi"}],
    "/v1/messages": [
        {"messages": SAY, "max_tokens": 8},
        {"messages": SAY, "max_tokens": 8, "stop_sequences": ["e"], "system": "Be short."},
    ],
    "/v1/messages/count_tokens": [{"messages": SAY}],
    "/tokenize": [{"prompt": "hi"}, {"messages": SAY}, {"content": "hi", "with_pieces": True}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
LASTS = ("message_stop", "response.completed", "response.incomplete")


@schemathesis.hook
def map_body(context, body):
    """Of four bodies one is as it was generated; of the others a few fields are."""
    path = context.operation.path
    if path not in ANSWERED or not isinstance(body, dict):
        return body
    drawn = random.Random(crc32(json.dumps(body, sort_keys=True, default=repr).encode()))
    if drawn.random() < 0.25:
        return body
    names = sorted(name for name in body if name != "model")
    kept = drawn.sample(names, min(len(names), drawn.randrange(4)))
    found = drawn.choice(ANSWERED[path]) | {name: body[name] for name in kept}
    if path in STREAMED and drawn.random() < 0.5:
        found["stream"] = True
    return found


@schemathesis.check
def streams_are_whole(ctx, response, case):
    """Each event is JSON, the last one is an end or an error, and no error is the server's own."""
    del ctx, case
    if "text/event-stream" not in response.headers.get("content-type", [""])[0]:
        return
    lines = response.text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data, "a stream has no event"
    has_ended = data[-1] == "[DONE]"
    found = [json.loads(one) for one in data[: len(data) - has_ended]]
    assert has_ended or found[-1].get("type") in LASTS or "error" in found[-1], data[-1]
    for one in found:
        failed = one.get("error") or (one.get("response") or {}).get("error") or {}
        assert failed.get("type") not in ("server_error", "api_error"), failed
        assert failed.get("code") not in ("server_error", "internal_error"), failed
