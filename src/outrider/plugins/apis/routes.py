"""Routes of the APIs in this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.routing import Route

from outrider.plugins.apis.events import count_route
from outrider.plugins.apis.messages import MessageExchange
from outrider.plugins.apis.responses import ResponseExchange, stored_response
from outrider.server.exchange import Exchange, api_route
from outrider.server.site import Site

_TEXTS: Mapping[str, type[Exchange[Any]]] = {
    "/v1/responses": ResponseExchange,
    "/v1/messages": MessageExchange,
}
_COUNTS: Mapping[str, type[Exchange[Any]]] = {
    "/v1/responses/input_tokens": ResponseExchange,
    "/v1/messages/count_tokens": MessageExchange,
}
KINDS = {**_TEXTS, **_COUNTS}


def more_routes(site: Site) -> list[Route]:
    found = [api_route(path, kind, site) for path, kind in _TEXTS.items()]
    found += [count_route(path, kind, site) for path, kind in _COUNTS.items()]
    return [*found, Route("/v1/responses/{name}", stored_response, methods=["GET", "DELETE"])]
