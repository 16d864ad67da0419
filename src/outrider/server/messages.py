"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.core.params import SamplingParams
from outrider.server.answers import Answer
from outrider.server.asking import Asked, params_of
from outrider.server.errors import ANTHROPIC_PATHS as PATH
from outrider.server.errors import ApiError, refused
from outrider.server.evented import EventedWriter
from outrider.server.exchange import Exchange, api_route
from outrider.server.message_blocks import MessageEvents, tooling_asked, turns_of
from outrider.server.port import ChatPrompt
from outrider.server.reply import Reply
from outrider.server.response_items import format_asked
from outrider.server.site import Site
from outrider.server.wire import json_response, read


class MessageBody(Asked, frozen=True, kw_only=True):
    IGNORED: ClassVar[Mapping[str, str]] = {
        **Asked.IGNORED,
        "context_management": "the conversation is read as it was sent",
    }

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    context_management: Any = None
    # Parameters of Anthropic's own services: accepted, and without meaning here.
    betas: Any = None
    inference_geo: Any = None
    output_config: dict[str, Any] | None = None


def message_routes(site: Site) -> list[Route]:
    def writer(exchange: Exchange[MessageBody]) -> EventedWriter:
        events = MessageEvents(exchange.site.name)
        return EventedWriter(exchange, events, partial(open_message, exchange))

    async def count(request: Request) -> Response:
        body, _ = await read(MessageBody, request, site)
        asked = site.of(body.model)
        _refuse(body)

        async def counted() -> Response:
            _params_of(asked, body)
            ids = (await asked.port.encode_chat(chat_of(body))).ids
            return json_response({"input_tokens": len(ids)})

        return Reply(asked, request, counted)

    return [
        api_route(PATH, MessageBody, _refuse, writer, site=site, api="messages"),
        Route(f"{PATH}/count_tokens", count, methods=["POST"]),
    ]


def _refuse(body: MessageBody) -> None:
    if not body.messages:
        raise ApiError(400, "messages: the list is empty.", param="messages", code="invalid_value")
    if body.mcp_servers or body.container is not None:
        name = "mcp_servers" if body.mcp_servers else "container"
        raise refused(name, "this server calls no tools. Call them yourself.")
    if body.n not in (None, 1):
        raise refused("n", "the answer is one message. Send several requests.")


def chat_of(body: MessageBody) -> ChatPrompt:
    """Return the conversation for the template. A last message of the assistant is continued."""
    variables = dict(body.chat_template_kwargs or {})
    kind = (body.thinking or {}).get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise refused("thinking", 'its type is "enabled", "disabled" or "adaptive".')
    if kind is not None:
        variables.setdefault("enable_thinking", kind != "disabled")
    turns = turns_of(body.system, body.messages)
    messages = turns.done()
    last = messages[-1]
    continues = last["role"] == "assistant" and not last.get("tool_calls")
    return ChatPrompt(
        messages=messages,
        tools=tooling_asked(body.tools, body.tool_choice)[0].offered,
        variables=variables,
        continues=continues,
        notes=turns.notes,
    )


def _params_of(site: Site, body: MessageBody) -> SamplingParams:
    stop = {"stop": tuple(body.stop_sequences)} if body.stop_sequences else {}
    budget = ("thinking.budget_tokens", (body.thinking or {}).get("budget_tokens"))
    return params_of(site, body, max_tokens=body.max_tokens, thinking=budget, **stop)


async def open_message(exchange: Exchange[MessageBody]) -> list[Answer]:
    body = exchange.body
    tooling, warnings = tooling_asked(body.tools, body.tool_choice)
    exchange.warnings += warnings
    params = _params_of(exchange.site, body)
    form = format_asked(body.output_config)
    return await exchange.converse(chat_of(body), tooling, params, form, "output_config.format")
