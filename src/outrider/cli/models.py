"""`outrider models`: what is on this machine, and what a model is made of."""

from __future__ import annotations

from outrider.cli.call import Call, needed
from outrider.cli.options import JsonOption, LoadOptions
from outrider.cli.output import json_line, size, table

LOADER_PROMPT = "The quick brown fox"


def list_models(call: Call[JsonOption]) -> int:
    from outrider.cli.hub import local_models

    found = local_models()
    if call.options.json:
        fields = ("name", "family", "num_bytes", "refusal")
        rows = [{name: getattr(model, name) for name in fields} for model in found]
        folders = [{"folder": str(model.folder)} for model in found]
        print(json_line([row | folder for row, folder in zip(rows, folders, strict=True)]))
        return 0
    rows = [(m.name, m.family, size(m.num_bytes), m.refusal or "ready") for m in found]
    print(table(rows, header=("model", "family", "weights", "state")))
    return 0


def inspect_model(call: Call[JsonOption]) -> int:
    name = needed(call, "MODEL")

    from outrider.cli.hub import describe, read_notes, read_spec

    facts, notes = describe(read_spec(name)), read_notes(name)
    if call.options.json:
        print(json_line(facts | {"notes": notes}))
        return 0
    shown = {key: size(value) if key.endswith("_bytes") else value for key, value in facts.items()}
    print(table([(key.replace("_", " "), value) for key, value in shown.items()]))
    for note in notes:
        print(f"note: {note}")
    return 0


def load_model(call: Call[LoadOptions]) -> int:
    """Load a model and go on from a fixed text, greedily: the whole path from files to tokens."""
    name = needed(call, "MODEL")

    from outrider.api.wrapper import load_wrapper

    dtype = call.options.dtype
    wrapper, tokenizer = load_wrapper(name, dtype)
    spec, arena = wrapper.model.spec, wrapper.model.state.arena
    written = wrapper.greedy(tokenizer.encode(LOADER_PROMPT), call.options.n_tokens)
    text = tokenizer.decode(written)
    quantised = f" with matrices in {dtype}" if dtype.startswith("int") else ""
    facts = {
        "tokenizer": f"{tokenizer.vocab_size} tokens",
        "model": f"{name}: {spec.family}, {spec.num_layers} layers, "
        f"{str(arena.dtype).removeprefix('torch.')}{quantised} on {wrapper.device}",
        "parameters": f"{wrapper.param_count:,}",
        "memory": f"{size(spec.weight_bytes)} of weights, {size(arena.nbytes)} of KV",
        "text": f"{LOADER_PROMPT}{text}",
    }
    if call.options.json:
        sizes = {"parameters": wrapper.param_count, "weights_bytes": spec.weight_bytes}
        record = facts | sizes | {"kv_bytes": arena.nbytes, "token_ids": written, "ok": True}
        print(json_line(record))
        return 0
    for key, value in facts.items():
        print(f"[loader] {key} {value!r}" if key == "text" else f"[loader] {key} {value}")
    print("[loader] OK")
    return 0
