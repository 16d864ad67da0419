"""Verbs of models: `inflate` and `export` write one, `load` tests one, `ollama` and `ping` test a
server.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.cli.call import Call, needed
from outrider.cli.output import Meter, answer, screen_table
from outrider.core.errors import ContractError
from outrider.core.fields import size
from outrider.core.files import new_folder
from outrider.kernels.operators import DTYPES
from outrider.models.loading import resolve
from outrider_lab.cli.verb_options import (
    ExportOptions,
    InflateOptions,
    LoadOptions,
    OllamaOptions,
    PingOptions,
)

LOADER_PROMPT = "The quick brown fox"


def inflate(call: Call[InflateOptions]) -> int:
    """Write the checkpoint, with a bar on a terminal, and the heads that lie beside the small one;
    say what it holds."""
    name, folder = needed(call, "SHAPE"), Path(needed(call, "FOLDER", position=1))

    from outrider.models.heads import find_heads
    from outrider_lab.models.inflate import shape_called
    from outrider_lab.models.inflate_files import (
        INFLATABLE,
        InflatedFiles,
        write_inflated,
        write_inflated_heads,
    )

    shape, dtype = shape_called(name), DTYPES[call.options.dtype]
    source = resolve(call.options.source)
    done: InflatedFiles | None = None
    heads: list[str] = []
    with new_folder(folder) as files:
        with Meter(f"inflating to {name}") as meter:
            for done in write_inflated(source, shape, folder, dtype):
                meter.reach(done.num_files, total=done.num_files_in_all)
        if done is None:
            raise ContractError("nothing was written")
        # A model whose heads fail goes as well.
        files.extend(folder.iterdir())
        for kind, place in find_heads(source).items():
            if kind in INFLATABLE:
                write_inflated_heads(place, source, shape, folder / kind, dtype)
                files.extend([*(folder / kind).iterdir(), folder / kind])
                heads.append(kind)
    share = done.num_zeros / done.num_parameters
    facts = {"folder": str(folder), "shape": name, "num_parameters": done.num_parameters}
    more = {"num_bytes": done.num_bytes, "zero_share": round(share, 4), "heads": heads}
    lines = [
        f"{folder}: {done.num_parameters / 1e9:.3f} billion weights, {size(done.num_bytes)}, "
        f"{100 * share:.0f} % of them zeros that are read like any others.",
        f"It writes what {call.options.source} writes:",
        f'  outrider generate "def add(a, b):" --target {folder} --draft outrider/embedded-draft',
        *(f"Its {kind} heads, which draft alike: --draft {folder / kind}" for kind in heads),
    ]
    answer(call.options, {**facts, **more}, "\n".join(lines))
    return 0


def export(call: Call[ExportOptions]) -> int:
    """Write the file, with a bar on a terminal, and say what it holds."""
    model, path = needed(call, "MODEL"), Path(needed(call, "FILE", position=1))

    from outrider_lab.models.gguf_export import Exported, GgufOptions
    from outrider_lab.models.gguf_export import export as written

    options = call.options
    # A path says nothing to whoever gets the file; its folder's name does.
    name = "" if Path(model).expanduser().exists() else model
    wish = GgufOptions(
        form=options.gguf, pre_tokenizer=options.pre_tokenizer, name=name, force=options.force
    )
    done: Exported | None = None
    with Meter(f"exporting {model}") as meter:
        for done in written(resolve(model), path, wish):
            meter.reach(done.num_tensors, total=done.num_tensors_in_all)
    if done is None:
        raise ContractError("nothing was written")
    facts = {"file": str(path), "format": options.gguf, "num_tensors": done.num_tensors}
    said = f"{path}: {done.num_tensors} tensors in {options.gguf}, {size(done.num_bytes)}."
    lines = [said, *(f"note: {note}" for note in done.notes)]
    record = facts | {"num_bytes": done.num_bytes, "notes": list(done.notes)}
    answer(options, record, "\n".join(lines))
    return 0


def load_model(call: Call[LoadOptions]) -> int:
    """Load a model and continue a fixed text greedily: a test of the path from files to tokens."""
    name = needed(call, "MODEL")

    from outrider.plugins.compat.wrapper import load_wrapper

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
    sizes = {"parameters": wrapper.param_count, "weights_bytes": spec.weight_bytes}
    record = facts | sizes | {"kv_bytes": arena.nbytes, "token_ids": written, "ok": True}
    shown = facts | {"text": repr(facts["text"])}
    lines = [*(f"[loader] {key} {value}" for key, value in shown.items()), "[loader] OK"]
    answer(call.options, record, "\n".join(lines))
    return 0


def ollama(call: Call[OllamaOptions]) -> int:
    """List the server's models; with --model, also write a test completion."""
    from outrider_lab.bench.peers.clients import Ollama

    asked = call.options
    server = Ollama(asked.host)
    models = server.models()
    record: dict[str, Any] = {"host": asked.host, "models": [asdict(model) for model in models]}
    rows = [(m.name, m.parameters, m.quantization, size(m.num_bytes)) for m in models]
    lines = [f"Ollama is running at {asked.host}, with {len(models)} models."]
    if rows:
        lines.append(screen_table(rows, header=("model", "params", "quant", "size")))
    if asked.model:
        reply = server.generate(asked.model, asked.prompt, max_tokens=asked.max_tokens)
        record["reply"] = asdict(reply)
        rate = f", {reply.tokens_per_second:.0f} tok/s" if reply.seconds > 0 else ""
        lines.append(f"\n{asked.prompt}{reply.text}\n")
        lines.append(f"{reply.num_tokens} tokens{rate} (Ollama's figures)")
    answer(asked, record, "\n".join(lines))
    return 0


def ping(call: Call[PingOptions]) -> int:
    """List the server's models, then request one completion."""
    from outrider.plugins.running.clients import Server
    from outrider_lab.bench.peers.clients import OpenAIClient

    asked = call.options
    server = Server(url=asked.url, timeout_seconds=asked.timeout, retries=asked.retries)
    client = OpenAIClient(server)
    models = client.models()
    model = asked.model or next(iter(models), "")
    reply = client.complete(model, asked.prompt, max_tokens=asked.max_tokens)
    facts = {"url": asked.url, "models": models, "model": model}
    rate = f"{reply.tokens_per_second:.1f} tok/s"
    answer(
        asked,
        facts | asdict(reply) | {"tokens_per_second": reply.tokens_per_second},
        f"{asked.url} serves {', '.join(models)}\n{model}: {asked.prompt}{reply.text}\n"
        f"{reply.num_tokens} tokens in {reply.seconds:.2f} s, {rate} as seen from here",
    )
    return 0
