"""The ASGI application: all routes, errors in a common format, and access control in front.

A part of the server is a function that takes a `Site` and returns routes.
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
from outrider.server.access import FILES, Door, DoorRules
from outrider.server.batches import Batches, batch_routes
from outrider.server.chat import chat_routes, completion_routes
from outrider.server.errors import ApiError, error_response
from outrider.server.messages import message_routes
from outrider.server.metrics import Metrics
from outrider.server.openapi import openapi_routes
from outrider.server.responses import response_routes
from outrider.server.site import Api, Site
from outrider.server.tokens import health_routes, model_routes
from outrider.server.web import card_routes, metric_routes, web_routes

_WORDS = {
    404: "no such path. Try GET /v1/models or POST /v1/chat/completions.",
    405: "this path does not have this method.",
}
_APIS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
}
# Endpoints of other servers that this server does not have.
_ELSEWHERE = ("/v1/embeddings", "/v1/rerank", "/rerank", "/v1/audio", "/v1/images", "/v1/score")
_FILES = (FILES, "/v1/batches")


def text_routes(site: Site) -> list[Route]:
    """Return the routes of the APIs that generate text."""
    parts = (chat_routes, completion_routes, response_routes, message_routes)
    return [route for part in parts for route in part(site)]


def all_routes(site: Site, metrics: Metrics, batches: Batches | None = None) -> list[BaseRoute]:
    """Return the routes of every part of the server."""
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
    """Return the whole server as an ASGI application."""
    app = routed(routes)

    def refused(status: int, path: str) -> None:
        # "Not ready yet" does not count as a refused request.
        for observer in site.observers if path not in ("/health", "/ready") else ():
            observer.observe_refusal(status, _APIS.get(path, "other"))

    return Door(app, rules, site.limits, refused)


def routed(routes: Sequence[BaseRoute]) -> Starlette:
    """Return the application without access control."""
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
    """Answer an error of the router, such as an unknown path."""
    status = cast("HTTPException", error).status_code
    path = request.scope["path"]
    if status == 404 and path.startswith(_ELSEWHERE):
        words = "this server writes text: no embeddings, ranks, sound or pictures."
        answer = ApiError(501, words, code="not_supported")
    elif status == 404 and path.startswith(_FILES) and FILES not in request.app.state.paths:
        words = "this server takes no files and no batches. Start it with --files FOLDER."
        answer = ApiError(501, words, code="not_supported")
    else:
        words = _WORDS.get(status, "the request was not understood.")
        text = f"{request.method} {path[:100]}: {words}"
        answer = ApiError(status, text, code=_CODES.get(status))
    response = error_response(answer, path)
    headers = cast("HTTPException", error).headers
    if headers:
        response.headers.update(headers)
    return response


_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope["path"])
