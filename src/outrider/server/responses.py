"""POST /v1/responses: OpenAI's Responses API, without a memory between requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.server.answers import Answer, Ask, open_answers, written
from outrider.server.asking import Asked, params_of, structure_asked, traced, with_seed_rule
from outrider.server.errors import ApiError, api_error, refused
from outrider.server.events import End, Step
from outrider.server.logprobs import chat_logprobs
from outrider.server.port import ChatPrompt
from outrider.server.reply import ClientGoneError, EventReply, Reply
from outrider.server.response_events import Event, ResponseEvents
from outrider.server.response_items import format_asked, messages_of, new_record, tools_of
from outrider.server.site import Site, key_of
from outrider.server.tools import read_with, tooling_of
from outrider.server.wire import encode, json_response, read

_LOGPROBS = "message.output_text.logprobs"
# Of the request, what its response tells again.
_TOLD = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature"),
    *("prompt_cache_key", "reasoning", "safety_identifier", "text", "tool_choice", "tools"),
    *("top_logprobs", "top_p", "user"),
)


class ResponseBody(Asked, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]] = ""
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
    async def create(request: Request) -> Response:
        body, warnings = await read(ResponseBody, request)
        _refuse(body)
        run = ResponseRun(site, body, site.model(body.model), warnings, key_of(request))
        if body.stream:
            return EventReply(request, run.stream, end=b"")
        return Reply(request, run.whole)

    async def count(request: Request) -> Response:
        body, _ = await read(ResponseBody, request)
        site.model(body.model)
        ids = await site.port.encode_chat(chat_of(body))
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def stored(_: Request) -> Response:
        raise ApiError(
            404,
            "responses are not stored here. Keep the one that the request was answered with.",
            code="not_found",
        )

    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", count, methods=["POST"]),
        Route("/v1/responses/{name}", stored, methods=["GET", "DELETE"]),
    ]


def _refuse(body: ResponseBody) -> None:
    if body.previous_response_id is not None or body.conversation is not None:
        name = "conversation" if body.previous_response_id is None else "previous_response_id"
        raise refused(name, "nothing is stored here. Send the whole conversation as input.")
    if body.prompt is not None:
        raise refused("prompt", "no prompts are stored here. Send instructions and input.")
    if body.background:
        raise refused("background", "answers are not kept. Ask for a stream.")
    if body.truncation not in (None, "disabled"):
        raise refused("truncation", "no part of a conversation is left out. Send less of it.")
    if body.n not in (None, 1):
        raise refused("n", "a response is one. Send several requests.")


def chat_of(body: ResponseBody) -> ChatPrompt:
    """The conversation for the template. Raises ApiError."""
    tooling = tooling_of(tools_of(body.tools)[0], body.tool_choice, body.parallel_tool_calls)
    variables = dict(body.chat_template_kwargs or {})
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    messages = messages_of(body.instructions, body.input)
    return ChatPrompt(messages=messages, tools=tooling.offered, variables=variables)


class ResponseRun:
    """One request, from its body to its answer."""

    def __init__(
        self, site: Site, body: ResponseBody, model: str, warnings: Sequence[str], key: str
    ) -> None:
        self._site, self._body, self._key = site, body, key
        self._warnings = list(warnings)
        given = {name: getattr(body, name) for name in _TOLD}
        told = {name: value for name, value in given.items() if value is not None}
        self._events = ResponseEvents(new_record(f"resp_{uuid4().hex}", model, told))

    async def _open(self) -> Answer:
        body, site = self._body, self._site
        tools, warnings = tools_of(body.tools)
        tooling = tooling_of(tools, body.tool_choice, body.parallel_tool_calls)
        wants_logprobs = _LOGPROBS in (body.include or ())
        limit = body.max_output_tokens
        params = params_of(
            site,
            body,
            max_tokens=body.max_tokens if limit is None else limit,
            logprobs=wants_logprobs,
            top_logprobs=(body.top_logprobs or 0) if wants_logprobs else 0,
        )
        params = with_seed_rule(params, site.port.card, asked=body.seed is not None)
        form = format_asked(body.text)
        asked = body if form is None else msgspec.structs.replace(body, response_format=form)
        ids = await site.port.encode_chat(chat_of(body))
        reading = await read_with(site, ids, tooling, params, structure_asked(asked))
        self._warnings += [*warnings, *reading.warnings]
        record = self._events.record
        record["temperature"], record["top_p"] = params.temperature, params.top_p
        ask = Ask(
            prompt_ids=ids,
            params=reading.params,
            structure=reading.structure,
            make_parser=reading.make_parser,
            trace=traced(body),
            key=self._key,
            api="responses",
        )
        return open_answers(site, ask)[0]

    async def whole(self) -> Response:
        answer = await self._open()
        self._events.begin()
        async with aclosing(written([answer])) as steps:
            async for _, item in steps:
                self._taken(item)
        return json_response(self._events.record)

    async def stream(self) -> AsyncGenerator[bytes]:
        answer = await self._open()
        return self._pieces(answer)

    async def _pieces(self, answer: Answer) -> AsyncGenerator[bytes]:
        begun = self._events.begin()
        try:
            async with aclosing(written([answer])) as steps:
                async for _, item in steps:
                    yield framed([*begun, *self._taken(item)])
                    begun = []
        except ClientGoneError:
            raise
        except Exception as error:
            if begun:
                # Nothing was sent: the error has a status of its own.
                raise
            yield framed(self._events.fail(api_error(error)))

    def _taken(self, item: Step | End) -> list[Event]:
        if isinstance(item, Step):
            logprobs: Sequence[Mapping[str, Any]] = ()
            if item.logprobs:
                num_top = self._body.top_logprobs or 0
                logprobs = chat_logprobs(self._site.port.decoder, item.logprobs, num_top)
            return self._events.take(item, logprobs)
        extras: dict[str, Any] = {"metrics": item.metrics}
        if item.seed is not None:
            extras["seed"] = item.seed
        warnings = list(dict.fromkeys([*self._warnings, *item.notes]))
        return self._events.end(item, extras | ({"warnings": warnings} if warnings else {}))


def framed(events: Sequence[Event]) -> bytes:
    """As server-sent events that name themselves."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"
        for event in events
    )
