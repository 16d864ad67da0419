"""`outrider models ollama`: look at an Ollama server. Validation only, never a benchmark."""

from __future__ import annotations

from dataclasses import asdict

from outrider.cli.call import Call
from outrider.cli.options import OllamaOptions
from outrider.cli.output import json_line, size, table


def ollama(call: Call[OllamaOptions]) -> int:
    """What the server has; with --model, a test completion too."""
    from outrider.api.clients import Ollama

    asked = call.options
    server = Ollama(asked.host)
    models = server.models()
    reply = None
    if asked.model:
        reply = server.generate(asked.model, asked.prompt, max_tokens=asked.max_tokens)
    if asked.json:
        record = {"host": asked.host, "models": [asdict(model) for model in models]}
        print(json_line(record | ({"reply": asdict(reply)} if reply else {})))
        return 0
    rows = [(m.name, m.parameters, m.quantization, size(m.num_bytes)) for m in models]
    print(f"Ollama is running at {asked.host}, with {len(models)} models.")
    if rows:
        print(table(rows, header=("model", "params", "quant", "size")))
    if reply is not None:
        rate = f", {reply.num_tokens / reply.seconds:.0f} tok/s" if reply.seconds > 0 else ""
        print(f"\n{asked.prompt}{reply.text}\n\n{reply.num_tokens} tokens{rate} (Ollama's figures)")
    return 0
