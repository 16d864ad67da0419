"""The ASGI application: all routes, errors in a common format, access control in front, and
GET /openapi.json, the document about the routes.

A part of the server is a function that takes a `Site` and returns routes. Schemas of requests
derive from the types and bounds with which bodies are parsed, so the document cannot differ from
the server. Schemas of answers have the fields that an answer always has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from outrider import __version__
from outrider.core.errors import OutriderError
from outrider.core.fields import meta_of
from outrider.core.files import packaged
from outrider.core.params import SamplingParams
from outrider.server.about import (
    DetokenizeBody,
    TokenizeBody,
    card_routes,
    health_routes,
    model_routes,
    web_routes,
)
from outrider.server.access import FILES, Door, DoorRules
from outrider.server.chat import ChatExchange, CompletionBody, CompletionExchange
from outrider.server.errors import ANTHROPIC_PATHS, ApiError, error_response
from outrider.server.exchange import Exchange, api_route
from outrider.server.reply import encode
from outrider.server.site import Api, Site

# The bodies that paths read.
Bodies: TypeAlias = Mapping[str, type[Struct]]
_WORDS = {
    404: "no such path. Try GET /v1/models or POST /v1/chat/completions.",
    405: "this path does not have this method. Use {allowed}.",
}
_EXCHANGES: Mapping[str, type[Exchange[Any]]] = {
    "/v1/chat/completions": ChatExchange,
    "/v1/completions": CompletionExchange,
}
# Endpoints of other servers that this server does not have.
_ELSEWHERE = ("/v1/embeddings", "/v1/rerank", "/rerank", "/v1/audio", "/v1/images", "/v1/score")
_FILES = (FILES, "/v1/batches")


def kinds() -> Mapping[str, type[Exchange[Any]]]:
    """Return the APIs that read prompts, by path: chat, completions, and those of a plugin."""
    from outrider.plugins.apis.routes import KINDS

    return {**_EXCHANGES, **KINDS}


def text_routes(site: Site) -> list[Route]:
    """Return the routes of the APIs that read prompts."""
    from outrider.plugins.apis.routes import more_routes

    return [*(api_route(path, kind, site) for path, kind in _EXCHANGES.items()), *more_routes(site)]


def all_routes(
    site: Site, more: Sequence[Route] = (), bodies: Bodies = MappingProxyType({})
) -> list[BaseRoute]:
    """Return the routes of every part of the server, and `more` ones, with the `bodies` that these
    read by path."""
    found = [
        *web_routes(),
        *card_routes(site),
        *health_routes(site),
        *model_routes(site),
        *text_routes(site),
        *more,
    ]
    data = document(found, bodies)

    async def openapi(_request: Request) -> Response:
        return Response(data, media_type="application/json")

    return [*found, Route("/openapi.json", openapi, methods=["GET"])]


def make_app(site: Site, rules: DoorRules, routes: Sequence[BaseRoute]) -> ASGIApp:
    """Return the whole server as an ASGI application."""
    app, known = routed(routes), kinds()

    def refused(status: int, path: str) -> None:
        # "Not ready yet" does not count as a refused request.
        kind = known.get(path)
        api: Api = "other" if kind is None else kind.api
        for observer in site.observers if path not in ("/health", "/ready") else ():
            observer.observe_refusal(status, api)

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
    status, headers = cast("HTTPException", error).status_code, cast("HTTPException", error).headers
    path = request.scope["path"]
    if status == 404 and path.startswith(_ELSEWHERE):
        words = "this server writes text: no embeddings, ranks, sound or pictures."
        answer = ApiError(501, words, code="not_supported")
    elif status == 404 and path.startswith(_FILES) and FILES not in request.app.state.paths:
        words = "this server takes no files and no batches. Start it with --files FOLDER."
        answer = ApiError(501, words, code="not_supported")
    else:
        words = _WORDS.get(status, "the request was not understood.")
        words = words.format(allowed=(headers or {}).get("Allow", "another one"))
        text = f"{request.method} {path[:100]}: {words}"
        answer = ApiError(status, text, code=_CODES.get(status))
    response = error_response(answer, path)
    if headers:
        response.headers.update(headers)
    return response


_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope["path"])


Schema: TypeAlias = dict[str, Any]
JSON, FORM = "application/json", "multipart/form-data"

# Parts of the document that follow from no type: `answers` of paths by media type, more of them
# with --files, `queries` of paths, and limits of bodies (`held`): fields of other APIs with only
# one value that is accepted here, or none.
_PARTS: dict[str, Any] = packaged("outrider.server", "openapi.json")
ANSWERS: Mapping[str, Mapping[str, Schema]] = _PARTS["answers"]
FILE_ANSWERS: Mapping[str, Mapping[str, Schema]] = _PARTS["file_answers"]

_Record: TypeAlias = dict[str, Any]
_NONE = {"type": "null"}
# Minimums of parameters for which other servers use negative values, such as -1 for "all".
_LEAST = {"top_k": -1, "seed": -(2**63)}
_COUNTED = ("CompletionBody", "top_logprobs")
_PARAMETER = re.compile(r"\{(\w+):?\w*\}")


def own_bodies() -> Bodies:
    """Return the bodies of all routes but those of batches, by path."""
    texts = {path: kind.kind for path, kind in kinds().items()}
    return {**texts, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}


def document(routes: Iterable[BaseRoute], bodies: Bodies = MappingProxyType({})) -> bytes:
    """Return the document in JSON. Files of web pages are left out: they are no API."""
    shown = [one for one in routes if isinstance(one, Route) and not one.path.startswith("/web/")]
    described = tuple((one.path, *sorted((one.methods or set()) - {"HEAD"})) for one in shown)
    return _document(described, tuple({**own_bodies(), **bodies}.items()))


@cache
def _document(
    routes: Iterable[tuple[str, ...]], bodies: Iterable[tuple[str, type[Struct]]]
) -> bytes:
    """Return the document for routes, each a path and its methods; cached for several servers."""
    kind_of = dict(bodies)
    kinds = list(dict.fromkeys(kind_of.values()))
    template = "#/components/schemas/{name}"
    references, schemas = msgspec.json.schema_components(kinds, ref_template=template)
    by_kind = dict(zip(kinds, references, strict=True))
    for name, schema in schemas.items():
        _bound(name, schema)
    paths: dict[str, _Record] = {}
    for plain, *methods in routes:
        path = _PARAMETER.sub(r"{\1}", plain)
        body = None if plain not in kind_of else by_kind[kind_of[plain]]
        for method in methods:
            sent = body if method == "POST" else None
            paths.setdefault(path, {})[method.lower()] = _operation(method, path, sent)
    whole: _Record = {
        "openapi": "3.1.0",
        "info": {"title": "outrider serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, **_PARTS["errors"]},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
    return encode(whole)


def _bound(kind: str, schema: _Record) -> None:
    """Add the bounds of each field's value to the schema."""
    properties: Mapping[str, _Record] = schema.get("properties", {})
    for item in fields(SamplingParams):
        meta = meta_of(item)
        # Completions accept 0 tokens, which only scores the prompt.
        least = meta.minimum
        if item.name == "max_tokens":
            least = 0 if kind == CompletionBody.__name__ else 1
        least = _LEAST.get(item.name, least)
        bounds = {"minimum": least, "maximum": meta.maximum}
        # In completions, `logprobs` is the number of likeliest tokens.
        name = "logprobs" if (kind, item.name) == _COUNTED else item.name
        if name in properties and name not in ("logit_bias", "stop_token_ids"):
            properties[name].update({key: one for key, one in bounds.items() if one is not None})
    for name, held in _PARTS["held"].get(kind, {}).items():
        properties[name].update(held)
    if "chat_template" in properties:
        properties["chat_template"].update(_NONE)


def _operation(method: str, path: str, body: Mapping[str, Any] | None) -> _Record:
    contents = {**ANSWERS, **FILE_ANSWERS}.get(path)
    answer = {"description": "The answer.", "content": _contents(contents or {})}
    named = "MessageError" if path.startswith(ANTHROPIC_PATHS) else "Error"
    wrong = {
        "description": "What is wrong, why, and what to do.",
        "content": _contents({JSON: {"$ref": f"#/components/schemas/{named}"}}),
    }
    found: _Record = {"responses": {"200": answer, "4XX": wrong, "503": wrong}}
    if contents is None:
        # This path always answers with an error.
        del found["responses"]["200"]
    parameters = [("path", name, True) for name in _PARAMETER.findall(path)]
    if method == "GET":
        parameters += [("query", name, False) for name in _PARTS["queries"].get(path, ())]
    if parameters:
        found["parameters"] = [
            {"in": kind, "name": name, "required": required, "schema": {"type": "string"}}
            for kind, name, required in parameters
        ]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    if (method, path) == ("POST", FILES):
        found["requestBody"] = {"required": True, "content": {FORM: {"schema": _PARTS["upload"]}}}
    return found


def _contents(kinds: Mapping[str, _Record]) -> _Record:
    return {kind: {"schema": schema} if schema else {} for kind, schema in kinds.items()}
