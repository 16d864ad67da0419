"""Routes of the web pages, the metrics and their history.

Every file of `web/` and of the component that shows rounds is read once, when the server starts;
the path of a request is never opened as a file. The pages load nothing from other hosts, and their
content security policy forbids it (docs/playground.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from string import Template

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.server.metrics import Metrics
from outrider.server.site import Site
from outrider.server.wire import json_response

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Values that differ between the pages: the script, the page's own style, and the text for browsers
# without scripts.
PAGES: Mapping[str, Mapping[str, str]] = {
    "/": {
        "name": "playground",
        "style": "rounds/rounds.css",
        "instead": "The API works without it.",
    },
    "/dashboard": {
        "name": "dashboard",
        "style": "vendor/uplot.css",
        "instead": "/metrics has the same for Prometheus.",
    },
}
_PAGE = "/web/page.html"
# Fields of a card that no page shows.
_LONG = ("chat_template", "tool_template", "response_template")


@cache
def web_routes() -> tuple[Route, ...]:
    """Return the routes of the playground, the dashboard, and their files below `/web/`. They
    contain no secret and need no key: pages ask for one when the API requires it."""
    found = _served()
    page = Template(found.pop(_PAGE).decode())
    routes = [_static(path, page.substitute(own).encode(), _PAGE) for path, own in PAGES.items()]
    routes += [_static(path, data, path) for path, data in found.items()]
    return tuple(routes)


def metric_routes(metrics: Metrics) -> list[Route]:
    """Return the routes `/metrics` for Prometheus and `/outrider/v1/history?since=N`."""

    async def exposition(_request: Request) -> Response:
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def history(request: Request) -> Response:
        said = request.query_params.get("since", "0")
        since = int(said) if said.isascii() and said.isdigit() and len(said) < 16 else 0
        body = msgspec.json.encode(metrics.history(since))
        headers = {"cache-control": "no-store"}
        return Response(body, media_type="application/json", headers=headers)

    return [
        Route("/metrics", exposition, methods=["GET"]),
        Route("/outrider/v1/history", history, methods=["GET"]),
    ]


def card_routes(site: Site) -> list[Route]:
    """Return the route `/outrider/v1/card`: facts about the engine, for the playground."""

    async def card(request: Request) -> Response:
        own = site.of(request.query_params.get("model"))
        known = msgspec.to_builtins(own.port.card) | {"sampling": own.sampling}
        return json_response({name: known[name] for name in known if name not in _LONG})

    return [Route("/outrider/v1/card", card, methods=["GET"])]


def _served() -> dict[str, bytes]:
    """Return each file by the path at which it is served."""
    package = files("outrider")
    found = _below(package / "server" / "web", "/web/")
    return found | _below(package / "api" / "assets", "/web/rounds/")


def _below(folder: Traversable, path: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _below(entry, f"{path}{entry.name}/")
        elif _kind(entry.name) in TYPES:
            found[f"{path}{entry.name}"] = entry.read_bytes()
    return found


def _kind(name: str) -> str:
    return name[name.rfind(".") :]


def _static(path: str, data: bytes, name: str) -> Route:
    """Return the route of a file as it was at the start, with an ETag of its content."""
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": tag, "content-type": TYPES[_kind(name)]}

    async def answer(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if tag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers)

    return Route(path, answer, methods=["GET"])
