"""GET /openapi.json: the server's paths, request bodies and answers.

Schemas of requests derive from the types and bounds with which bodies are parsed, so the document
cannot differ from the server. Schemas of answers have the fields that an answer always has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outrider import __version__
from outrider.core.fields import meta_of
from outrider.core.params import SamplingParams
from outrider.server.access import FILES
from outrider.server.batches import BatchBody
from outrider.server.chat import ChatBody, CompletionBody
from outrider.server.errors import ANTHROPIC_PATHS
from outrider.server.messages import MessageBody
from outrider.server.responses import ResponseBody
from outrider.server.tokens import DetokenizeBody, TokenizeBody
from outrider.server.wire import encode

Schema: TypeAlias = dict[str, Any]
JSON, EVENTS, TEXT, PAGE = "application/json", "text/event-stream", "text/plain", "text/html"
FORM, BYTES = "multipart/form-data", "application/octet-stream"

_STRING: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_BOOL: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def _record(**fields: Schema) -> Schema:
    """An object that has all of these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _kind(name: str) -> Schema:
    return {"const": name}


_USAGE = _record(
    prompt_tokens=_WHOLE,
    completion_tokens=_WHOLE,
    total_tokens=_WHOLE,
    prompt_tokens_details=_record(cached_tokens=_WHOLE),
)
_SPECULATION = _record(
    num_spec_steps=_WHOLE,
    num_draft_tokens=_WHOLE,
    num_accepted_draft_tokens=_WHOLE,
    acceptance_histogram=_list(_WHOLE),
)
_METRICS = _or_null(_record(speculative_decoding=_SPECULATION))
_ENDED = _one_of("stop", "length", "tool_calls")
_CALL = _record(
    id=_STRING, type=_kind("function"), function=_record(name=_STRING, arguments=_STRING)
)
_MESSAGE = _record(role=_kind("assistant"), content=_or_null(_STRING))
_MESSAGE["properties"] |= {"tool_calls": _list(_CALL), "reasoning": _STRING}


def _completion(kind: str, **choice: Schema) -> Schema:
    choices = _list(_record(index=_WHOLE, finish_reason=_ENDED, **choice))
    named = _record(id=_STRING, object=_kind(kind), created=_WHOLE, model=_STRING, choices=choices)
    more = _record(usage=_USAGE, metrics=_METRICS)
    more["properties"] |= {"seed": _WHOLE, "warnings": _list(_STRING)}
    return {"allOf": [named, more]}


_STATUS = _one_of("completed", "incomplete")
_RESPONSE = _record(
    id=_STRING,
    object=_kind("response"),
    created_at=_WHOLE,
    status=_STATUS,
    model=_STRING,
    output=_list(_record(id=_STRING, type=_one_of("message", "reasoning", "function_call"))),
    tools=_list(_OBJECT),
    store={"const": False},
    usage=_record(input_tokens=_WHOLE, output_tokens=_WHOLE, total_tokens=_WHOLE),
)
_ANTHROPIC = _record(
    id=_STRING,
    type=_kind("message"),
    role=_kind("assistant"),
    model=_STRING,
    content=_list(_record(type=_one_of("text", "thinking", "tool_use"))),
    stop_reason=_one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
    stop_sequence=_or_null(_STRING),
    usage=_record(
        input_tokens=_WHOLE,
        output_tokens=_WHOLE,
        cache_creation_input_tokens=_WHOLE,
        cache_read_input_tokens=_WHOLE,
    ),
)
_MODEL = _record(id=_STRING, object=_kind("model"), created=_WHOLE, owned_by=_STRING)
_TOKEN_IDS: Schema = {"anyOf": [_list(_WHOLE), _list(_record(id=_WHOLE, piece=_STRING))]}
_LOGPROBS = _or_null(_OBJECT)

ANSWERS: Mapping[str, Mapping[str, Schema]] = {
    "/v1/chat/completions": {
        JSON: _completion("chat.completion", message=_MESSAGE, logprobs=_LOGPROBS),
        EVENTS: {},
    },
    "/v1/completions": {
        JSON: _completion("text_completion", text=_STRING, logprobs=_LOGPROBS),
        EVENTS: {},
    },
    "/v1/responses": {JSON: _RESPONSE, EVENTS: {}},
    "/v1/responses/input_tokens": {
        JSON: _record(object=_kind("response.input_tokens"), input_tokens=_WHOLE)
    },
    "/v1/messages": {JSON: _ANTHROPIC, EVENTS: {}},
    "/v1/messages/count_tokens": {JSON: _record(input_tokens=_WHOLE)},
    "/v1/models": {JSON: _record(object=_kind("list"), data=_list(_MODEL))},
    "/v1/models/{name}": {JSON: _MODEL},
    "/tokenize": {JSON: _record(count=_WHOLE, max_model_len=_WHOLE, tokens=_TOKEN_IDS)},
    "/detokenize": {JSON: _record(prompt=_STRING, content=_STRING)},
    "/tokenizer_info": {JSON: _record(tokenizer_class=_STRING, vocab_size=_WHOLE)},
    "/health": {JSON: _record(status=_kind("ok"), engine=_STRING, restarts=_WHOLE)},
    "/ready": {JSON: _record(status=_kind("ready"))},
    "/version": {JSON: _record(version=_STRING, name=_STRING)},
    "/outrider/v1/card": {
        JSON: _record(model=_STRING, window=_WHOLE, drafters=_list(_STRING), exact=_BOOL)
    },
    "/outrider/v1/history": {
        JSON: _record(step_seconds=_NUMBER, first=_WHOLE, next=_WHOLE, columns=_OBJECT)
    },
    "/metrics": {TEXT: {}},
    "/": {PAGE: {}},
    "/dashboard": {PAGE: {}},
}
UPLOAD = _record(purpose={"const": "batch"}, file=_STRING)
# With --files.
_BATCHES = ("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel")
FILE_ANSWERS: Mapping[str, Mapping[str, Schema]] = {
    **{path: {JSON: {}} for path in ("/v1/files", "/v1/files/{file_id}", *_BATCHES)},
    "/v1/files/{file_id}/content": {BYTES: {}},
}
ERRORS: Mapping[str, Schema] = {
    "Error": _record(
        error=_record(
            message=_STRING, type=_STRING, param=_or_null(_STRING), code=_or_null(_STRING)
        )
    ),
    "MessageError": _record(type=_kind("error"), error=_record(type=_STRING, message=_STRING)),
}


BODIES: Mapping[str, type[Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/responses/input_tokens": ResponseBody,
    "/v1/messages": MessageBody,
    "/v1/messages/count_tokens": MessageBody,
    "/v1/batches": BatchBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_QUERIES: Mapping[str, tuple[str, ...]] = {
    "/tokenizer_info": ("model",),
    "/outrider/v1/card": ("model",),
    "/outrider/v1/history": ("since",),
    "/v1/files": ("purpose", "limit", "after", "order"),
    "/v1/batches": ("limit", "after"),
}
_Record: TypeAlias = dict[str, Any]
_NONE, _ONE, _SOME = {"type": "null"}, {"enum": [1, None]}, {"minItems": 1}
_IDS: _Record = {"items": {"type": "integer", "minimum": 0}}
# Further limits of bodies: fields of other APIs of which this server accepts only one value, or
# none.
_HELD: Mapping[str, Mapping[str, _Record]] = {
    "ChatBody": {
        "messages": _SOME,
        "max_completion_tokens": {"minimum": 1},
        "functions": {"maxItems": 0},
        "function_call": _NONE,
        "audio": _NONE,
        "modalities": {"items": {"enum": ["text"]}},
        "web_search_options": _NONE,
    },
    "CompletionBody": {"prompt": _SOME, "suffix": {"maxLength": 0}},
    "ResponseBody": {
        "n": _ONE,
        "max_output_tokens": {"minimum": 1},
        "previous_response_id": _NONE,
        "conversation": _NONE,
        "prompt": _NONE,
        "background": {"enum": [False, None]},
        "truncation": {"enum": ["disabled", None]},
    },
    "MessageBody": {
        "n": _ONE,
        "messages": _SOME,
        "mcp_servers": {"maxItems": 0},
        "container": _NONE,
    },
    "DetokenizeBody": {"tokens": _IDS},
}
# Minimums of parameters for which other servers use negative values, such as -1 for "all".
_LEAST = {"top_k": -1, "seed": -(2**63)}
_COUNTED = ("CompletionBody", "top_logprobs")
_PARAMETER = re.compile(r"\{(\w+):?\w*\}")


def openapi_routes(others: Iterable[BaseRoute]) -> list[Route]:
    """Return the route of the document about the `others`."""
    data = document(others)

    async def openapi(_request: Request) -> Response:
        return Response(data, media_type="application/json")

    return [Route("/openapi.json", openapi, methods=["GET"])]


def document(routes: Iterable[BaseRoute]) -> bytes:
    """Return the document in JSON. Files of web pages are left out: they are no API."""
    shown = [one for one in routes if isinstance(one, Route) and not one.path.startswith("/web/")]
    return _document(tuple((one.path, *sorted((one.methods or set()) - {"HEAD"})) for one in shown))


@cache
def _document(routes: Iterable[tuple[str, ...]]) -> bytes:
    """Return the document for routes, each a path and its methods; cached for several servers."""
    kinds = list(dict.fromkeys(BODIES.values()))
    template = "#/components/schemas/{name}"
    references, schemas = msgspec.json.schema_components(kinds, ref_template=template)
    by_kind = dict(zip(kinds, references, strict=True))
    for name, schema in schemas.items():
        _bound(name, schema)
    paths: dict[str, _Record] = {}
    for plain, *methods in routes:
        path = _PARAMETER.sub(r"{\1}", plain)
        body = None if plain not in BODIES else by_kind[BODIES[plain]]
        for method in methods:
            sent = body if method == "POST" else None
            paths.setdefault(path, {})[method.lower()] = _operation(method, path, sent)
    whole: _Record = {
        "openapi": "3.1.0",
        "info": {"title": "outrider serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, **ERRORS},
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
        if name in properties and name != "logit_bias":
            properties[name].update({key: one for key, one in bounds.items() if one is not None})
    for name, held in _HELD.get(kind, {}).items():
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
        parameters += [("query", name, False) for name in _QUERIES.get(path, ())]
    if parameters:
        found["parameters"] = [
            {"in": kind, "name": name, "required": required, "schema": {"type": "string"}}
            for kind, name, required in parameters
        ]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    if (method, path) == ("POST", FILES):
        found["requestBody"] = {"required": True, "content": {FORM: {"schema": UPLOAD}}}
    return found


def _contents(kinds: Mapping[str, _Record]) -> _Record:
    return {kind: {"schema": schema} if schema else {} for kind, schema in kinds.items()}
