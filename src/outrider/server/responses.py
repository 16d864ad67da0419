"""POST /v1/responses: OpenAI's Responses API, without stored state between requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.core.params import SamplingParams
from outrider.server.answers import Answer
from outrider.server.asking import Asked, params_of
from outrider.server.errors import ApiError, refused
from outrider.server.evented import EventedWriter
from outrider.server.events import Step
from outrider.server.exchange import Exchange, api_route
from outrider.server.logprobs import chat_logprobs
from outrider.server.port import ChatPrompt
from outrider.server.reply import Reply
from outrider.server.response_events import ResponseEvents
from outrider.server.response_items import format_asked, new_record, tools_of, turns_of
from outrider.server.site import Site
from outrider.server.tools import tooling_of
from outrider.server.wire import json_response, read

PATH = "/v1/responses"
_LOGPROBS = "message.output_text.logprobs"
# Fields of the request that its response repeats.
_REPEATED = (
    *(
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "parallel_tool_calls",
        "temperature",
    ),
    *("prompt_cache_key", "reasoning", "safety_identifier", "text", "tool_choice", "tools"),
    *("top_logprobs", "top_p", "user"),
)
# Parameters whose values the response reports even if the request left them out.
_REPORTED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


class ResponseBody(Asked, frozen=True, kw_only=True):
    IGNORED: ClassVar[Mapping[str, str]] = {
        **Asked.IGNORED,
        "max_tool_calls": "it counts tools that a server runs; this server runs none",
    }

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None
    max_tool_calls: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    client_metadata: Any = None


def response_routes(site: Site) -> list[Route]:
    def writer(exchange: Exchange[ResponseBody]) -> EventedWriter:
        events = events_of(exchange)
        return EventedWriter(exchange, events, partial(open_response, exchange, events.record))

    async def count(request: Request) -> Response:
        body, _ = await read(ResponseBody, request, site)
        asked = site.of(body.model)
        _refuse(body)

        async def counted() -> Response:
            _params_of(asked, body)
            ids = (await asked.port.encode_chat(chat_of(body))).ids
            return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

        return Reply(asked, request, counted)

    async def stored(_: Request) -> Response:
        raise ApiError(
            404,
            "responses are not stored. Keep the one that answered the request.",
            code="not_found",
        )

    return [
        api_route(PATH, ResponseBody, _refuse, writer, site=site, api="responses"),
        Route(f"{PATH}/input_tokens", count, methods=["POST"]),
        Route(f"{PATH}/{{name}}", stored, methods=["GET", "DELETE"]),
    ]


def _refuse(body: ResponseBody) -> None:
    if body.input is None and not body.instructions and body.prompt is None:
        # An empty list is accepted: clients send it to probe a server.
        raise ApiError(400, "input: it is missing.", param="input", code="invalid_value")
    if body.previous_response_id is not None or body.conversation is not None:
        name = "conversation" if body.previous_response_id is None else "previous_response_id"
        raise refused(name, "this server stores nothing. Send the whole conversation as input.")
    if body.prompt is not None:
        raise refused("prompt", "this server stores no prompts. Send instructions and input.")
    if body.background:
        raise refused("background", "answers are not stored. Request a stream.")
    if body.truncation not in (None, "disabled"):
        raise refused("truncation", "conversations are never truncated. Send a shorter one.")
    if body.n not in (None, 1):
        raise refused("n", "the answer is one response. Send several requests.")


def chat_of(body: ResponseBody) -> ChatPrompt:
    """Return the conversation for the template. Raises ApiError."""
    tooling = tooling_of(tools_of(body.tools)[0], body.tool_choice, body.parallel_tool_calls)
    variables = dict(body.chat_template_kwargs or {})
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    turns = turns_of(body.instructions, body.input or [])
    return ChatPrompt(
        messages=turns.done(), tools=tooling.offered, variables=variables, notes=turns.notes
    )


def events_of(exchange: Exchange[ResponseBody]) -> ResponseEvents:
    body = exchange.body
    given = {name: getattr(body, name) for name in _REPEATED}
    repeated = {name: value for name, value in given.items() if value is not None}
    record = new_record(f"resp_{uuid4().hex}", exchange.site.name, repeated)

    def logprobs(step: Step) -> list[dict[str, Any]]:
        return chat_logprobs(exchange.site.port.decoder, step.logprobs, body.top_logprobs or 0)

    return ResponseEvents(record, logprobs)


def _params_of(site: Site, body: ResponseBody) -> SamplingParams:
    num_top = body.top_logprobs or 0
    limit = body.max_output_tokens
    return params_of(
        site,
        body,
        max_tokens=body.max_tokens if limit is None else limit,
        logprobs=num_top > 0 or _LOGPROBS in (body.include or ()),
        top_logprobs=num_top,
        thinking=("reasoning.max_tokens", (body.reasoning or {}).get("max_tokens")),
    )


async def open_response(exchange: Exchange[ResponseBody], record: dict[str, Any]) -> list[Answer]:
    """Start the answer, and write the values of the parameters to `record`."""
    body = exchange.body
    tools, warnings = tools_of(body.tools)
    exchange.warnings += warnings
    tooling = tooling_of(tools, body.tool_choice, body.parallel_tool_calls)
    params = _params_of(exchange.site, body)
    record |= {name: getattr(params, name) for name in _REPORTED}
    form = format_asked(body.text)
    return await exchange.converse(chat_of(body), tooling, params, form, "text.format")
