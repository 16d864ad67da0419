"""GET /openapi.json: the server's paths and what is sent to them, from the types that bodies are
read into, so that the document cannot say something else than the server does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outrider import __version__
from outrider.server.chat import ChatBody
from outrider.server.completions import CompletionBody
from outrider.server.messages import MessageBody
from outrider.server.responses import ResponseBody
from outrider.server.tokens import DetokenizeBody, TokenizeBody
from outrider.server.wire import encode

BODIES: Mapping[str, type[Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/responses/input_tokens": ResponseBody,
    "/v1/messages": MessageBody,
    "/v1/messages/count_tokens": MessageBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_QUERIES: Mapping[str, tuple[str, ...]] = {
    "/tokenizer_info": ("model",),
    "/outrider/v1/card": ("model",),
    "/outrider/v1/history": ("since",),
}
_Record: TypeAlias = dict[str, Any]
_KINDS = ("application/json", "text/event-stream", "text/plain", "text/html")
_ANSWER: _Record = {"description": "The answer.", "content": {kind: {} for kind in _KINDS}}
_ERROR: _Record = {
    "description": "What is wrong, why, and what to do.",
    "content": {"application/json": {}},
}
_PARAMETER = re.compile(r"\{(\w+):?\w*\}")


def openapi_routes(others: Iterable[BaseRoute]) -> list[Route]:
    """Of the other routes."""
    told = encode(document(others))

    async def openapi(_request: Request) -> Response:
        return Response(told, media_type="application/json")

    return [Route("/openapi.json", openapi, methods=["GET"])]


def document(routes: Iterable[BaseRoute]) -> _Record:
    kinds = list(dict.fromkeys(BODIES.values()))
    place = "#/components/schemas/{name}"
    told, schemas = msgspec.json.schema_components(kinds, ref_template=place)
    by_kind = dict(zip(kinds, told, strict=True))
    paths: dict[str, _Record] = {}
    for route in routes:
        # Files of pages are no interface.
        if not isinstance(route, Route) or route.path.startswith("/web/"):
            continue
        path = _PARAMETER.sub(r"{\1}", route.path)
        body = None if route.path not in BODIES else by_kind[BODIES[route.path]]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route.path, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "outrider serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, body: Mapping[str, Any] | None) -> _Record:
    found: _Record = {"responses": {"200": _ANSWER, "4XX": _ERROR, "503": _ERROR}}
    named = [("path", name, True) for name in _PARAMETER.findall(path)]
    named += [("query", name, False) for name in _QUERIES.get(path, ())]
    if named:
        found["parameters"] = [
            {"in": kind, "name": name, "required": required, "schema": {"type": "string"}}
            for kind, name, required in named
        ]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found
