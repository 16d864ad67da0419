"""A whole server over a scripted engine, for one test."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import ASGIApp

from doubles.asgi_client import Client, Got
from doubles.scripted_port import ScriptedPort
from outrider.plugins.metrics import Metrics, metric_routes
from outrider.server.access import DoorRules
from outrider.server.app import all_routes, make_app
from outrider.server.site import Limits, Site

T = TypeVar("T")
QUICK = Limits(body_seconds=0.2, write_seconds=0.2, ping_seconds=60.0)


def site_with(port: ScriptedPort, limits: Limits = QUICK) -> Site:
    return Site(port=port, names=("scripted", "alias"), limits=limits)


def app_of(site: Site, rules: DoorRules | None = None) -> ASGIApp:
    metrics = Metrics(lambda: {"scripted": site.port.status})
    return make_app(site, rules or DoorRules(), all_routes(site, metric_routes(metrics)))


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


def ask(
    port: ScriptedPort,
    path: str,
    body: object = None,
    *,
    rules: DoorRules | None = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
) -> Got:
    """One request to a server of its own."""

    async def once() -> Got:
        app = app_of(site_with(port), rules)
        return await Client(app).ask(path, body, headers=headers, method=method)

    return run(once())
