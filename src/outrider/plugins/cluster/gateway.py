# pyright: basic, reportMissingImports=false
"""The gateway: the HTTP server of `outrider serve`, with replicas of Ray Serve as its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from outrider.core.env import api_key
from outrider.plugins.cluster.handle_port import HandlePort
from outrider.plugins.cluster.settings import DeploymentArgs, read_args
from outrider.server.app import all_routes, make_app
from outrider.server.door import DoorRules, name_of
from outrider.server.keys import read_keys
from outrider.server.metrics import Metrics
from outrider.server.places import Places
from outrider.server.site import Limits, Site, Traffic, check_apart


class Gateway:
    """Ray calls `__serve_build_asgi_app__` once it is made, in the event loop of its replica."""

    # Ray waits for it, and routes nothing here before.
    async def __init__(self, args: Mapping[str, Any], engines: DeploymentHandle) -> None:  # pyright: ignore[reportGeneralTypeIssues]
        told = read_args(args)
        self._rules, shares = door_rules(told)
        port = HandlePort(engines, told.engine.tokenizer or told.model)
        self._site = Site(
            port=port,
            names=told.names or (told.model,),
            limits=Limits(most_running=told.most_running, most_of_a_key=told.max_per_key),
            traffic=Traffic(places=Places(weights=shares)),
            defaults=dict(told.sampling),
            shares_prefixes=told.shared_prefixes,
            keeps_apart=len(self._rules.keys) > 1 and not told.shared_prefixes,
        )
        self._metrics = Metrics(lambda: {self._site.names[0]: port.status})
        self._site.observers.append(self._metrics)
        await port.start()
        check_apart(self._site, port.card.drafter)
        self._keeping = asyncio.create_task(self._metrics.keep())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(self._site, self._rules, all_routes(self._site, self._metrics))


def door_rules(told: DeploymentArgs) -> tuple[DoorRules, dict[str, float]]:
    """Who may come in, and the share of each key by its name. Raises ConfigError."""
    keys = read_keys(told.api_key_file)
    rules = DoorRules(
        keys=tuple(dict.fromkeys([*keys, *filter(None, [api_key()])])),
        host=told.host,
        hosts=frozenset(map(str.lower, told.allowed_hosts)),
        origins=frozenset(told.allowed_origins),
    )
    return rules, {name_of(key): share for key, share in keys.items()}
