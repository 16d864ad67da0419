"""`outrider serve`: an HTTP server over one engine, or over several models that are loaded in turn.

The address is reserved and printed before anything is loaded, so that an error in it is reported
without a wait.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from outrider.cli.call import Call
from outrider.cli.output import json_line, prose, say
from outrider.cli.session import (
    check_models,
    engines_of,
    fetch_missing,
    made_greedy,
    open_llm,
    sampling_line,
    start_logging,
    to_load,
    without_draft,
)
from outrider.cli.verb_options import ServeOptions
from outrider.core.env import api_key
from outrider.core.errors import ConfigError, MachineError
from outrider.core.params import SamplingParams
from outrider.core.plugins import install_command
from outrider.core.settings import Chosen, Resolved
from outrider.server.access import read_keys

if TYPE_CHECKING:
    from outrider.api.memory import Part
    from outrider.api.plan import LoadPlan
    from outrider.plugins.batches.batches import Batches
    from outrider.plugins.replicas import ReplicasPort
    from outrider.server.access import Address, DoorRules
    from outrider.server.port import Engines
    from outrider.server.process_port import ProcessPort
    from outrider.server.site import Site
    from outrider.server.thread_port import ThreadPort


# The models of `outrider serve`: their names, their settings, and whether they fit into memory.
#
# A word is a model, or NAME=MODEL, or NAME=MODEL,DRAFT. All other settings apply to all models.
@dataclass(frozen=True, slots=True)
class Served:
    """A model, its names, and its settings."""

    names: tuple[str, ...]
    resolved: Resolved

    @property
    def name(self) -> str:
        return self.names[0]


def served_models(
    words: tuple[str, ...], resolved: Resolved, options: ServeOptions
) -> tuple[Served, ...]:
    """Return the models of the command line. Raises ConfigError for contradictions."""
    if len(words) < 2:
        models = [_served(words[0] if words else resolved.program().target, resolved)]
    else:
        models = [_served(word, resolved) for word in words]
        _check_several(resolved, options)
    if options.served_model_name:
        models = [Served(options.served_model_name, models[0].resolved)]
    names = [model.name for model in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two models are called {twice!r}.", hint="NAME=MODEL")
    return tuple(models)


def _served(word: str, resolved: Resolved) -> Served:
    name, _, model = ("", "", word) if Path(word).exists() else word.rpartition("=")
    target, _, draft = (model, "", "") if Path(model).exists() else model.partition(",")
    said = {"target": target} | ({"draft": draft} if draft else {})
    own = {
        key: Chosen(resolved.chosen[key].setting, value, resolved.chosen[key].setting.flag)
        for key, value in said.items()
    }
    known = Path(target).name if Path(target).exists() else target
    return Served((name or known,), Resolved({**resolved.chosen, **own}))


def _check_several(resolved: Resolved, options: ServeOptions) -> None:
    if options.served_model_name:
        raise ConfigError("--served-model-name names one model.", hint="NAME=MODEL for each")
    if resolved.program().draft not in ("auto", "none"):
        raise ConfigError("--draft drafts for one model.", hint="NAME=MODEL,DRAFT for each")


def share_of(words: str) -> float:
    """Parse a share such as `1/1000` or `0.001`; "" is 0. Raises ConfigError."""
    try:
        share = float(Fraction(words or "0"))
    except (ValueError, ZeroDivisionError, OverflowError):
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"--audit is a share from 0 to 1, got {words!r}.", hint="--audit 1/1000")
    return share


def planned(model: Served, engines: Engines) -> tuple[LoadPlan, tuple[Part, ...]]:
    """Return the plan of loading an engine without its weights. Raises the errors of loading."""
    from outrider.api.memory import fitted
    from outrider.api.plan import plan_pair

    program, engine = model.resolved.program(), engines.shared(model.resolved.engine())
    draft = None if program.draft in ("auto", "none") else program.draft
    engine = without_draft(engine) if program.draft == "none" else engine
    fetch_missing(program.target, draft)
    return fitted(plan_pair(program.target, draft, engine))


def record_of(
    model: Served, engines: Engines, plan: LoadPlan, parts: tuple[Part, ...]
) -> dict[str, Any]:
    """Return the record of a model that would run. Memory is that of one engine."""
    return {
        "models": model.names,
        "engines": engines.described,
        "drafter": plan.resolved.drafter.name,
        "k": plan.resolved.k,
        "batch_size": plan.settings.most_batch,
        "window": plan.window,
        "arena_tokens": plan.num_slots,
        "memory_bytes": {part.name: part.num_bytes for part in parts if part.when == "held"},
        "notes": plan.notes,
    }


def together(
    plans: list[tuple[LoadPlan, tuple[Part, ...]]], engines: Engines, most_loaded: int
) -> dict[str, Any]:
    """Return what all engines of the largest `most_loaded` models hold, and what is free."""
    from outrider.cache.pages import free_bytes
    from outrider.kernels.operators import pick_device

    device = pick_device(plans[0][0].settings.device)
    number = 1 if device.type == "cuda" else len(engines)
    held = [[part.num_bytes for part in parts if part.when == "held"] for _, parts in plans]
    sizes = sorted((number * sum(parts) for parts in held), reverse=True)
    most, free = sum(sizes[:most_loaded]), free_bytes(device)
    fits = most <= free
    return {"most_loaded": most_loaded, "held_bytes": most, "free_bytes": free, "fits": fits}


_EXTRA = ("granian", "starlette", "msgspec", "prometheus_client")


def serve(call: Call[ServeOptions]) -> int:
    _check_extra()
    address = _address(call.options)
    share_of(call.options.audit)
    _keep_alive(call.options, 1)
    models = served_models(call.arguments, call.resolved, call.options)
    engines = engines_of(call.options, call.resolved.engine())
    if len(engines) > 1 and call.options.engine_home != "process":
        raise ConfigError(
            f"{len(engines)} engines need their own processes.",
            hint="leave --engine-home at process",
        )
    if call.options.check:
        return _checked(call, models, engines, address)
    rules = rules_of(call.options)
    for program in (model.resolved.program() for model in models):
        check_models(program.target, program.draft)
    from outrider.plugins.running.verbs import announced
    from outrider.server.access import reserved

    address, held = reserved(address)
    start_logging(call.resolved.program(), wordless=True)
    with ExitStack() as ports:
        ports.enter_context(closing(held))
        if health := address.health:
            ports.enter_context(closing(reserved(health)[1]))
        ports.enter_context(announced(address.url, [name for one in models for name in one.names]))
        _run(call, models, engines, address, rules)
    # All work is done; threads that load or listen need not end in order.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _check_extra() -> None:
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise MachineError(
            f"the server needs {', '.join(missing)}.", hint=install_command("server")
        )


def _address(options: ServeOptions) -> Address:
    from outrider.server.access import Address

    if (options.ssl_certfile is None) != (options.ssl_keyfile is None):
        raise ConfigError(
            "HTTPS needs a certificate and its key.", hint="--ssl-certfile FILE --ssl-keyfile FILE"
        )
    if options.health_port and options.health_port == options.port:
        raise ConfigError("--health-port is --port.", hint="another port, or none")
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
        health_port=options.health_port,
    )


def rules_of(options: ServeOptions) -> DoorRules:
    from outrider.server.access import PUBLIC, DoorRules

    keys = [*options.api_key, *read_keys(options.api_key_file), *filter(None, [api_key()])]
    # With keys, the machine's own names are allowed: a page that uses DNS rebinding has no key.
    own = (socket.gethostname(), socket.getfqdn()) if keys else ()
    return DoorRules(
        keys=tuple(dict.fromkeys(keys)),
        host=options.host,
        hosts=frozenset(map(str.lower, (*options.allowed_host, *own))),
        origins=frozenset(options.allowed_origin),
        public=PUBLIC | {"/metrics"} if options.open_metrics else PUBLIC,
    )


def _run(
    call: Call[ServeOptions],
    models: Sequence[Served],
    engines: Engines,
    address: Address,
    rules: DoorRules,
) -> None:
    from outrider.plugins.batches.batches import BATCH_BODIES, batch_routes
    from outrider.plugins.metrics import Auditor, Metrics, metric_routes
    from outrider.plugins.spans import traced
    from outrider.server.access import name_of
    from outrider.server.app import Bodies, all_routes, make_app
    from outrider.server.run import run_server, tell_ready
    from outrider.server.site import Admission, Limits, Site, Traffic, check_apart

    options, engine = call.options, call.resolved.engine()
    at_once = len(engines) * engine.most_batch
    limits = Limits(
        most_running=at_once + (options.max_queued or 4 * at_once),
        most_of_a_key=options.max_per_key,
        drain_seconds=options.drain_seconds,
        file_bytes=options.files_limit << 20 if options.files is not None else 0,
    )
    weights = {name_of(key): share for key, share in read_keys(options.api_key_file).items()}
    ports = {
        model.name: _port(model, engines, options, limits.most_completions) for model in models
    }
    first = Site(
        port=ports[models[0].name],
        names=models[0].names,
        limits=limits,
        traffic=Traffic(admission=Admission(weights=weights)),
        defaults=sampling_decided(made_greedy(call.resolved) if options.greedy else call.resolved),
        shares_prefixes=options.shared_prefixes,
        keeps_apart=len(rules.keys) > 1 and not options.shared_prefixes,
    )
    site, load, also = first, ports[first.name].start, list[Coroutine[None, None, None]]()
    if len(models) > 1 or options.keep_alive:
        if first.keeps_apart:
            for model in models[1:]:
                check_apart(first, planned(model, engines)[0].resolved.drafter.name)
        from outrider.plugins.several_models import Models

        turns = Models(ports, options.max_loaded_models, _keep_alive(options, len(models)))
        site, load, also = turns.sites(first), turns.start, [turns.run()]
    if len(engines) > 1:
        from outrider.plugins.replicas import replace_on_hangup

        also.append(replace_on_hangup(ports.values(), options.drain_seconds))
    metrics = Metrics(lambda: {one.names[0]: one.port.status for one in site.all})
    site.observers.append(metrics)
    if share := share_of(options.audit):
        auditor = Auditor(site, share, metrics.audited)
        site.observers.append(auditor)
        also.append(auditor.run())
    batches = _batches(options, site, at_once)
    more = [*metric_routes(metrics), *([] if batches is None else batch_routes(batches))]
    bodies: Bodies = {} if batches is None else BATCH_BODIES

    def ready() -> None:
        check_apart(site, site.port.card.drafter)
        announce(call, address, site, needs_key=bool(rules.keys))
        tell_ready()

    also += [metrics.keep(), *([batches.run()] if batches is not None else ())]
    say(f"loading {models[0].name}; {address.url} already answers /ready")
    with traced(make_app(site, rules, all_routes(site, more, bodies))) as app:
        asyncio.run(run_server(app, site, address, load=load, ready=ready, also=also))


def _batches(options: ServeOptions, site: Site, most_lines: int) -> Batches | None:
    """Open the batches of --files; None without it. Raises ConfigError for a bad folder."""
    if options.files is None:
        return None
    from outrider.plugins.batches.batches import Batches, Lines
    from outrider.plugins.batches.files import Files
    from outrider.server.app import routed, text_routes

    files = Files(Path(options.files).expanduser(), site.limits.file_bytes)
    lines = Lines(routed(text_routes(site)), site.traffic.admission, most_lines)
    return Batches(site, files, lines)


def _keep_alive(options: ServeOptions, num_models: int) -> float:
    """Return --keep-alive in seconds. Raises ConfigError."""
    from outrider.server.params import keep_alive_of

    given = options.keep_alive or ("5m" if num_models > 1 else "-1")
    return keep_alive_of(given, "--keep-alive")


def _port(
    model: Served, engines: Engines, options: ServeOptions, max_queued: int
) -> ProcessPort | ReplicasPort | ThreadPort:
    # Only the engine's own process imports the code that runs models, which takes seconds.
    if options.engine_home == "process":
        from outrider.server.process_port import ProcessPort

        ports = list(map(ProcessPort, engines.loads(*to_load(model.resolved), max_queued)))
        if len(ports) == 1:
            return ports[0]
        from outrider.plugins.replicas import ReplicasPort

        return ReplicasPort(ports)
    from outrider.server.thread_port import LaneLoad, ThreadPort

    lanes = LaneLoad()
    load = partial(open_llm, model.resolved, on_job=lanes.note)
    return ThreadPort(load, max_queued=max_queued, lanes=lanes)


def sampling_decided(resolved: Resolved) -> dict[str, object]:
    """Return the sampling settings that the user decided: the defaults of requests."""
    known = SamplingParams.__dataclass_fields__
    return {name: value for name, value in resolved.decided().items() if name in known}


def announce(call: Call[ServeOptions], address: Address, site: Site, *, needs_key: bool) -> None:
    url, card = address.url, site.port.card
    record = {"url": url, "model": site.name, "window": card.window, "drafter": card.drafter}
    names = [one.name for one in site.all]
    if call.options.json:
        print(json_line(record | {"models": names}), flush=True)
        return
    drafts = "no speculation" if card.drafter == "none" else f"drafter {card.drafter}, K {card.k}"
    for note in card.notes if call.options.engine_home == "process" else ():
        say(f"note: {note}")
    say(f"{site.name}: window of {card.window} tokens, {drafts}")
    say(_sampling(site))
    if "at_once" in card.facts:
        say(card.facts["at_once"])
    if site.others:
        say(f"loaded on demand: {', '.join(names[1:])}")
    print(f"API         {url}/v1\nplayground  {url}/{_page_temperature(site)}")
    if address.is_everywhere:
        name = replace(address, host=socket.gethostname()).url
        print(f"elsewhere   {name}/v1, or with this machine's address")
    print(f"dashboard   {url}/dashboard, or outrider top --url {url}")
    print(f"try         {_curl(url, card.has_chat_template, needs_key)}", flush=True)


def _sampling(site: Site) -> str:
    advised = [name for name in site.sampling if name not in site.defaults]
    used = ("temperature", *(name for name in site.sampling if name != "temperature"))
    return sampling_line({name: site.default(name) for name in used}, advised)


def _page_temperature(site: Site) -> str:
    """Return words on the playground's temperature, where it is not that of other requests."""
    if "temperature" in site.sampling:
        return ""
    usual = site.default("temperature")
    return f"  (at temperature 0 unless it is set there; other requests: {usual:g})"


def _curl(url: str, can_chat: bool, needs_key: bool) -> str:
    if can_chat:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}'
    else:
        path, body = "completions", '{"prompt": "def quicksort(items):", "max_tokens": 64}'
    kind = quote("Content-Type: application/json")
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    return f"curl {url}/v1/{path} -H {kind}{key} -d {quote(body)}"


def _checked(
    call: Call[ServeOptions], models: Sequence[Served], engines: Engines, address: Address
) -> int:
    """Run `--check`: print what would run, as far as it is known before weights are read."""
    from outrider.api.memory import table_of
    from outrider.core.fields import size

    start_logging(call.resolved.program())
    rules = rules_of(call.options)
    plans = [planned(model, engines) for model in models]
    records = [record_of(model, engines, *plan) for model, plan in zip(models, plans, strict=True)]
    fit = together(plans, engines, min(call.options.max_loaded_models, len(models)))
    if call.options.json:
        common = {"url": address.url, "asks_for_key": bool(rules.keys), "together": fit}
        several = {"models": records} if len(models) > 1 else records[0]
        print(json_line(common | several))
        return 0
    print("an API key is required" if rules.keys else "no API key is required")
    for record, (plan, parts) in zip(records, plans, strict=True):
        print(f"would serve {', '.join(record['models'])} at {address.url}")
        print(f"drafter {record['drafter']}, K {record['k']}, window of {plan.window} tokens")
        for number, placement in enumerate(engines.described if len(engines) > 1 else ()):
            print(f"engine {number} on {placement}")
        each = "each engine: " if len(engines) > 1 else ""
        print(prose(f"{each}{plan.at_once}"))
        print(f"memory, {size(sum(record['memory_bytes'].values()))}:\n{table_of(parts)}")
        for note in plan.notes:
            say(f"note: {note}")
    if len(models) > 1 or len(engines) > 1:
        verdict = "fits" if fit["fits"] else "does not fit"
        engine = "engine" if len(engines) == 1 else f"{len(engines)} engines"
        print(
            f"{fit['most_loaded']} loaded at once, {engine} each: {size(fit['held_bytes'])} at "
            f"most, which {verdict}; {size(fit['free_bytes'])} are free"
        )
    return 0
