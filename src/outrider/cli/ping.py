"""`outrider models ping`: does an OpenAI-compatible server answer, and how fast."""

from __future__ import annotations

from dataclasses import asdict

from outrider.cli.call import Call
from outrider.cli.options import PingOptions
from outrider.cli.output import json_line


def ping(call: Call[PingOptions]) -> int:
    """List the models served, then ask for one completion."""
    from outrider.api.clients import OpenAIClient, Server

    asked = call.options
    server = Server(url=asked.url, timeout_seconds=asked.timeout, retries=asked.retries)
    client = OpenAIClient(server)
    models = client.models()
    model = asked.model or next(iter(models), "")
    reply = client.complete(model, asked.prompt, max_tokens=asked.max_tokens)
    if asked.json:
        facts = {"url": asked.url, "models": models, "model": model}
        print(json_line(facts | asdict(reply) | {"tokens_per_second": reply.tokens_per_second}))
        return 0
    print(f"{asked.url} serves {', '.join(models)}")
    print(f"{model}: {asked.prompt}{reply.text}")
    rate = f"{reply.tokens_per_second:.1f} tok/s"
    print(f"{reply.num_tokens} tokens in {reply.seconds:.2f} s, {rate} as seen from here")
    return 0
