"""Puts the parts of the server together: routes, errors in one shape, and the door in front.

A part is a function from a `Site` to routes, or a list of them that needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from outrider.core.errors import OutriderError
from outrider.server.batches import Batches, batch_routes
from outrider.server.chat import chat_routes
from outrider.server.completions import completion_routes
from outrider.server.door import FILES, Door, DoorRules
from outrider.server.errors import ApiError, error_response
from outrider.server.messages import message_routes
from outrider.server.metrics import Metrics
from outrider.server.openapi import openapi_routes
from outrider.server.responses import response_routes
from outrider.server.site import Api, Site
from outrider.server.tokens import health_routes, model_routes
from outrider.server.web import card_routes, metric_routes, web_routes

_WORDS = {
    404: "there is nothing here. GET /v1/models and POST /v1/chat/completions are.",
    405: "not with this method.",
}
_APIS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
}
# What others serve and this server does not.
_ELSEWHERE = ("/v1/embeddings", "/v1/rerank", "/rerank", "/v1/audio", "/v1/images", "/v1/score")
_FILES = (FILES, "/v1/batches")


def text_routes(site: Site) -> list[Route]:
    """Of the APIs that write text."""
    parts = (chat_routes, completion_routes, response_routes, message_routes)
    return [route for part in parts for route in part(site)]


def all_routes(site: Site, metrics: Metrics, batches: Batches | None = None) -> list[BaseRoute]:
    """Of every part of the server."""
    found = [
        *web_routes(),
        *metric_routes(metrics),
        *card_routes(site),
        *health_routes(site),
        *model_routes(site),
        *text_routes(site),
        *(batch_routes(batches) if batches is not None else ()),
    ]
    return [*found, *openapi_routes(found)]


def make_app(site: Site, rules: DoorRules, routes: Sequence[BaseRoute]) -> ASGIApp:
    """The whole server as an ASGI application."""
    app = routed(routes)

    def refused(status: int, path: str) -> None:
        # That a server is not ready yet is no refusal.
        for observer in site.observers if path not in ("/health", "/ready") else ():
            observer.observe_refusal(status, _APIS.get(path, "other"))

    return Door(app, rules, site.limits, refused)


def routed(routes: Sequence[BaseRoute]) -> Starlette:
    """What lies behind the door."""
    app = Starlette(
        routes=list(routes),
        exception_handlers={
            HTTPException: _http_error,
            ApiError: _error,
            OutriderError: _error,
            Exception: _error,
        },
    )
    app.router.redirect_slashes = False
    app.state.paths = {getattr(route, "path", "") for route in routes}
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router raises."""
    status = cast("HTTPException", error).status_code
    path = request.scope["path"]
    if status == 404 and path.startswith(_ELSEWHERE):
        words = "this server writes text: no embeddings, ranks, sound or pictures."
        told = ApiError(501, words, code="not_supported")
    elif status == 404 and path.startswith(_FILES) and FILES not in request.app.state.paths:
        words = "this server takes no files and no batches. Start it with --files FOLDER."
        told = ApiError(501, words, code="not_supported")
    else:
        words = _WORDS.get(status, "the request was not understood.")
        told = ApiError(status, f"{request.method} {path[:100]}: {words}", code=_CODES.get(status))
    response = error_response(told, path)
    headers = cast("HTTPException", error).headers
    if headers:
        response.headers.update(headers)
    return response


_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope["path"])
