# pyright: basic, reportMissingImports=false
"""The gateway: the HTTP server of `outrider serve`, with replicas of Ray Serve as its engine.

`outrider.plugins.cluster.gateway:build` is the import path of the application of Ray Serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from outrider.core.env import api_key
from outrider.plugins.cluster.engine import Engine
from outrider.plugins.cluster.handle_port import HandlePort
from outrider.plugins.cluster.settings import DeploymentArgs, check_ray, read_args
from outrider.plugins.metrics import Metrics, metric_routes
from outrider.server.access import DoorRules, name_of, read_keys
from outrider.server.app import all_routes, make_app
from outrider.server.site import Admission, Limits, Site, Traffic, check_apart


class Gateway:
    """The gateway's actor. Ray calls `__serve_build_asgi_app__` after `__init__`, in the event
    loop of the actor."""

    # Ray waits for `__init__` and routes no request to the gateway before.
    async def __init__(self, args: Mapping[str, Any], engines: DeploymentHandle) -> None:  # pyright: ignore[reportGeneralTypeIssues]
        options = read_args(args)
        self._rules, shares = door_rules(options)
        port = HandlePort(engines, options.engine.tokenizer or options.model)
        self._site = Site(
            port=port,
            names=options.names or (options.model,),
            limits=Limits(most_running=options.most_running, most_of_a_key=options.max_per_key),
            traffic=Traffic(admission=Admission(weights=shares)),
            defaults=dict(options.sampling),
            shares_prefixes=options.shared_prefixes,
            keeps_apart=len(self._rules.keys) > 1 and not options.shared_prefixes,
        )
        self._metrics = Metrics(lambda: {self._site.names[0]: port.status})
        self._site.observers.append(self._metrics)
        await port.start()
        check_apart(self._site, port.card.drafter)
        self._keeping = asyncio.create_task(self._metrics.keep())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(
            self._site, self._rules, all_routes(self._site, metric_routes(self._metrics))
        )


def door_rules(options: DeploymentArgs) -> tuple[DoorRules, dict[str, float]]:
    """Return the access rules, and the weight of each API key by the key's name. Raises
    ConfigError."""
    keys = read_keys(options.api_key_file)
    rules = DoorRules(
        keys=tuple(dict.fromkeys([*keys, *filter(None, [api_key()])])),
        host=options.host,
        hosts=frozenset(map(str.lower, options.allowed_hosts)),
        origins=frozenset(options.allowed_origins),
    )
    return rules, {name_of(key): share for key, share in keys.items()}


def build(args: dict[str, Any]) -> Application:
    """Return the application: a gateway over replicas. The configuration file, which `outrider
    cluster config` writes, has the number and the resources of each. Raises OutriderError."""
    check_ray()
    door_rules(read_args(args))
    engines = serve.deployment(Engine, name="Engine").bind(args)
    return serve.deployment(serve.ingress()(Gateway), name="Gateway").bind(args, engines)
