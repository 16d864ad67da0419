"""Answers of the server by path, for the OpenAPI document: media types and JSON schemas.

A schema has the fields that an answer always has. Answers may have more, as in the original APIs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

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
_IDS: Schema = {"anyOf": [_list(_WHOLE), _list(_record(id=_WHOLE, piece=_STRING))]}
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
    "/tokenize": {JSON: _record(count=_WHOLE, max_model_len=_WHOLE, tokens=_IDS)},
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
