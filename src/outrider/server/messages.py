"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.server.answers import Answer, Ask, open_answers, written
from outrider.server.asking import Asked, params_of, structure_asked, traced, with_seed_rule
from outrider.server.errors import ApiError, refused
from outrider.server.events import End, Step
from outrider.server.message_blocks import Event, MessageEvents, tooling_asked, turns_of
from outrider.server.port import ChatPrompt
from outrider.server.reply import EventReply, Reply
from outrider.server.response_items import format_asked
from outrider.server.responses import framed
from outrider.server.site import Site, key_of
from outrider.server.tools import read_with
from outrider.server.wire import json_response, read


class MessageBody(Asked, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    # Of what Anthropic's servers do with requests: read, and of no meaning here.
    betas: Any = None
    context_management: Any = None
    inference_geo: Any = None
    output_config: dict[str, Any] | None = None


def message_routes(site: Site) -> list[Route]:
    async def create(request: Request) -> Response:
        body, warnings = await read(MessageBody, request)
        _refuse(body)
        run = MessageRun(site, body, site.model(body.model), warnings, key_of(request))
        if body.stream:
            return EventReply(request, run.stream, end=b"")
        return Reply(request, run.whole)

    async def count(request: Request) -> Response:
        body, _ = await read(MessageBody, request)
        site.model(body.model)
        _refuse(body)
        ids = await site.port.encode_chat(chat_of(body))
        return json_response({"input_tokens": len(ids)})

    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]


def _refuse(body: MessageBody) -> None:
    if not body.messages:
        raise ApiError(400, "messages: there is none.", param="messages", code="invalid_value")
    if body.mcp_servers or body.container is not None:
        name = "mcp_servers" if body.mcp_servers else "container"
        raise refused(name, "this server calls nobody. Call tools yourself.")
    if body.n not in (None, 1):
        raise refused("n", "a message is one. Send several requests.")


def chat_of(body: MessageBody) -> ChatPrompt:
    """The conversation for the template: a last message of the assistant's is gone on with."""
    variables = dict(body.chat_template_kwargs or {})
    kind = (body.thinking or {}).get("type")
    if kind is not None:
        variables.setdefault("enable_thinking", kind != "disabled")
    messages = turns_of(body.system, body.messages).done()
    last = messages[-1]
    continues = last["role"] == "assistant" and not last.get("tool_calls")
    return ChatPrompt(
        messages=messages,
        tools=tooling_asked(body.tools, body.tool_choice)[0].offered,
        variables=variables,
        continues=continues,
    )


class MessageRun:
    """One request, from its body to its answer."""

    def __init__(
        self, site: Site, body: MessageBody, model: str, warnings: Sequence[str], key: str
    ) -> None:
        self._site, self._body, self._key = site, body, key
        self._warnings = list(warnings)
        self._events = MessageEvents(model)

    async def _open(self) -> Answer:
        body, site = self._body, self._site
        tooling, warnings = tooling_asked(body.tools, body.tool_choice)
        asked = body
        if body.stop_sequences:
            asked = msgspec.structs.replace(body, stop=body.stop_sequences)
        if body.output_config is not None:
            asked = msgspec.structs.replace(asked, response_format=format_asked(body.output_config))
        params = params_of(site, asked, max_tokens=body.max_tokens)
        params = with_seed_rule(params, site.port.card, asked=body.seed is not None)
        ids = await site.port.encode_chat(chat_of(body))
        reading = await read_with(site, ids, tooling, params, structure_asked(asked))
        self._warnings += [*warnings, *reading.warnings]
        ask = Ask(
            prompt_ids=ids,
            params=reading.params,
            structure=reading.structure,
            make_parser=reading.make_parser,
            trace=traced(body),
            key=self._key,
            api="messages",
        )
        return open_answers(site, ask)[0]

    async def whole(self) -> Response:
        answer = await self._open()
        async with aclosing(written([answer])) as steps:
            async for _, item in steps:
                self._taken(item)
        return json_response(self._events.record)

    async def stream(self) -> AsyncGenerator[bytes]:
        answer = await self._open()
        return self._pieces(answer)

    async def _pieces(self, answer: Answer) -> AsyncGenerator[bytes]:
        begun = self._events.begin(len(answer.request.prompt_ids))
        async with aclosing(written([answer])) as steps:
            async for _, item in steps:
                yield framed([*begun, *self._taken(item)])
                begun = []

    def _taken(self, item: Step | End) -> list[Event]:
        if isinstance(item, Step):
            return self._events.take(item)
        extras: dict[str, Any] = {"metrics": item.metrics}
        if item.seed is not None:
            extras["seed"] = item.seed
        warnings = list(dict.fromkeys([*self._warnings, *item.notes]))
        return self._events.end(item, extras | ({"warnings": warnings} if warnings else {}))
