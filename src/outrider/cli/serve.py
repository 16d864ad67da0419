"""`outrider serve`: an HTTP server over one engine.

The address is taken and told before anything is loaded, so that a mistake in it costs no wait.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from outrider.cli.call import Call
from outrider.cli.output import json_line, say
from outrider.cli.serve_options import ServeOptions
from outrider.cli.session import fetch_missing, open_llm, start_logging, to_load, without_draft
from outrider.core.env import api_key
from outrider.core.errors import ConfigError, MachineError
from outrider.core.files import FileKind, read_text
from outrider.core.params import SamplingParams

if TYPE_CHECKING:
    from outrider.server.address import Address
    from outrider.server.door import DoorRules
    from outrider.server.port import EngineCard
    from outrider.server.process_port import ProcessPort
    from outrider.server.thread_port import ThreadPort

_EXTRA = ("granian", "starlette", "msgspec", "prometheus_client")


def serve(call: Call[ServeOptions]) -> int:
    _check_extra()
    address = _address(call.options)
    if call.options.check:
        return _checked(call, address)
    from outrider.server.address import reserved

    address, held = reserved(address)
    start_logging(call.resolved.program(), wordless=True)
    with closing(held):
        say(f"loading {call.resolved.program().target}; {address.url} answers /ready meanwhile")
        _run(call, address)
    # Nothing is left to do, and threads that load or listen need not end in order.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _check_extra() -> None:
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise MachineError(
            f"the server needs {', '.join(missing)}.", hint="pip install 'outrider[server]'"
        )


def _address(options: ServeOptions) -> Address:
    from outrider.server.address import Address

    if (options.ssl_certfile is None) != (options.ssl_keyfile is None):
        raise ConfigError("HTTPS needs a certificate and its key.", hint="give both files")
    files = [Path(name) for name in (options.ssl_certfile, options.ssl_keyfile) if name is not None]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}: no such file.", hint="a file in PEM")
    certificate, private_key = files or (None, None)
    return Address(
        host=options.host,
        port=options.port,
        certificate=certificate,
        private_key=private_key,
    )


def _rules(options: ServeOptions) -> DoorRules:
    from outrider.server.door import DoorRules

    keys = [*options.api_key, *_keys_of(options), *filter(None, [api_key()])]
    # Pages that make a name mean this machine have no key.
    own = (socket.gethostname(), socket.getfqdn()) if keys else ()
    return DoorRules(
        keys=tuple(dict.fromkeys(keys)),
        host=options.host,
        hosts=frozenset(map(str.lower, (*options.allowed_host, *own))),
        origins=frozenset(options.allowed_origin),
    )


def _keys_of(options: ServeOptions) -> dict[str, float]:
    """Of the file of keys, with the share of the server that each has."""
    name = options.api_key_file
    if name is None:
        return {}
    try:
        lines = read_text(Path(name), FileKind.SETTINGS).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}.", hint="one key a line") from None
    found: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        key, *share = line.split() or ["#"]
        if key.startswith("#"):
            continue
        try:
            found[key] = float(*share or [1])
        except (TypeError, ValueError):
            found[key] = 0
        if not 0.001 <= found[key] <= 1000:
            raise ConfigError(
                f"{name}, line {number}: the share of a key is a number from 0.001 to 1000.",
                hint="KEY, or KEY SHARE",
            )
    if not found:
        raise ConfigError(f"{name}: there is no key in it.", hint="one key a line")
    return found


def _run(call: Call[ServeOptions], address: Address) -> None:
    from outrider.server.app import all_routes, make_app
    from outrider.server.door import name_of
    from outrider.server.metrics import Metrics
    from outrider.server.places import Places
    from outrider.server.run import run_server
    from outrider.server.site import Limits, Site, Traffic, check_apart

    options, engine = call.options, call.resolved.engine()
    rules = _rules(options)
    limits = Limits(
        most_running=engine.batch_size + (options.max_queued or 4 * engine.batch_size),
        most_of_a_key=options.max_per_key,
        drain_seconds=options.drain_seconds,
    )
    weights = {name_of(key): share for key, share in _keys_of(options).items()}
    port = _port(call, limits.most_completions)
    site = Site(
        port=port,
        names=_names(call),
        limits=limits,
        traffic=Traffic(places=Places(weights=weights)),
        defaults=_defaults(call),
        shares_prefixes=options.shared_prefixes,
        keeps_apart=len(rules.keys) > 1 and not options.shared_prefixes,
    )
    metrics = Metrics(lambda: {one.names[0]: one.port.status for one in site.all})
    site.observers.append(metrics)
    app = make_app(site, rules, all_routes(site, metrics))

    def ready() -> None:
        check_apart(site)
        _tell(call, address, site.names[0], port.card)

    asyncio.run(run_server(app, site, address, load=port.start, ready=ready, also=[metrics.keep()]))


def _port(call: Call[ServeOptions], max_queued: int) -> ProcessPort | ThreadPort:
    # The engine's own process alone needs what runs models, which takes seconds to import.
    if call.options.engine_home == "process":
        from outrider.server.frames import Load
        from outrider.server.process_port import ProcessPort

        target, draft, engine = to_load(call.resolved)
        return ProcessPort(Load(target, draft, engine, max_queued))
    from outrider.server.thread_port import ThreadPort

    return ThreadPort(lambda: open_llm(call.resolved), max_queued=max_queued)


def _names(call: Call[ServeOptions]) -> tuple[str, ...]:
    target = call.resolved.program().target
    own = Path(target).name if Path(target).exists() else target
    return call.options.served_model_name or (own,)


def _defaults(call: Call[ServeOptions]) -> dict[str, object]:
    """Sampling settings that somebody decided: those of requests that leave them out."""
    known = SamplingParams.__dataclass_fields__
    return {name: value for name, value in call.resolved.decided().items() if name in known}


def _tell(call: Call[ServeOptions], address: Address, name: str, card: EngineCard) -> None:
    url = address.url
    record = {"url": url, "model": name, "window": card.window, "drafter": card.drafter}
    if call.options.json:
        print(json_line(record), flush=True)
        return
    drafts = "no speculation" if card.drafter == "none" else f"drafter {card.drafter}, K {card.k}"
    for note in card.notes if call.options.engine_home == "process" else ():
        say(f"note: {note}")
    say(f"{name}: window of {card.window} tokens, {drafts}")
    print(f"API         {url}/v1\nplayground  {url}/")
    print(f"dashboard   {url}/dashboard, or outrider top --url {url}")
    print(f"try         {_curl(url, card.has_chat_template)}", flush=True)


def _curl(url: str, can_chat: bool) -> str:
    if can_chat:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}'
    else:
        path, body = "completions", '{"prompt": "def quicksort(items):", "max_tokens": 64}'
    kind = quote("Content-Type: application/json")
    return f"curl {url}/v1/{path} -H {kind} -d {quote(body)}"


def _checked(call: Call[ServeOptions], address: Address) -> int:
    """`--check`: reads all that is known before weights are, and says what would run."""
    from outrider.api.memory_plan import fitted, table_of
    from outrider.api.plan import plan_pair
    from outrider.core.fields import size

    program, engine = call.resolved.program(), call.resolved.engine()
    start_logging(program)
    rules = _rules(call.options)
    draft = None if program.draft in ("auto", "none") else program.draft
    engine = without_draft(engine) if program.draft == "none" else engine
    fetch_missing(program.target, draft)
    plan, parts = fitted(plan_pair(program.target, draft, engine))
    total = sum(part.num_bytes for part in parts if part.when == "held")
    record = {
        "url": address.url,
        "models": _names(call),
        "drafter": plan.resolved.drafter.name,
        "k": plan.resolved.k,
        "batch_size": plan.settings.batch_size,
        "window": plan.window,
        "arena_tokens": plan.num_slots,
        "asks_for_key": bool(rules.keys),
        "memory_bytes": {part.name: part.num_bytes for part in parts if part.when == "held"},
        "notes": plan.notes,
    }
    if call.options.json:
        print(json_line(record))
        return 0
    print(f"would serve {', '.join(_names(call))} at {address.url}")
    print(f"drafter {record['drafter']}, K {record['k']}, window of {plan.window} tokens")
    print(f"{plan.settings.batch_size} requests at once, {plan.num_slots:,} tokens of KV cache")
    print("an API key is asked for" if rules.keys else "no API key is asked for")
    print(f"memory, {size(total)}:\n{table_of(parts)}")
    for note in plan.notes:
        say(f"note: {note}")
    return 0
