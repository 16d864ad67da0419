"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.core.params import SamplingParams
from outrider.server.answers import Answer, thought_details
from outrider.server.errors import ANTHROPIC_PATHS, ApiError, error_body, refused
from outrider.server.errors import ANTHROPIC_PATHS as PATH
from outrider.server.events import (
    End,
    Part,
    ReasoningDelta,
    Step,
    TextDelta,
    ToolClose,
    ToolDelta,
    ToolOpen,
    Usage,
)
from outrider.server.exchange import Asked, Event, EventedWriter, Exchange, api_route, params_of
from outrider.server.port import ChatPrompt
from outrider.server.reply import Reply
from outrider.server.responses import format_asked
from outrider.server.site import Site
from outrider.server.tools import Tooling, Turns, mapping, named, wrong
from outrider.server.wire import json_response, read

# Content blocks of Anthropic's Messages API: their translation to messages of a chat template, and
# the blocks of an answer.
#
# The events of an answer and the message that they add up to are made of the same blocks.
Block: TypeAlias = Mapping[str, Any]
# Claude Code's first system block differs in every request; with it, no request could use the
# prefix cache.
_CHANGING = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def turns_of(system: str | Sequence[Block] | None, given: Sequence[Block]) -> Turns:
    """Translate a conversation. Raises ApiError for blocks that cannot be read."""
    turns = Turns()
    if isinstance(system, str):
        turns.system(system)
    for i, block in enumerate(system if isinstance(system, list) else ()):
        text = named(mapping(block, f"system[{i}]"), "text", f"system[{i}]")
        if not text.startswith(_CHANGING):
            turns.system(text)
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        role = named(message, "role", where)
        content: object = message.get("content")
        if isinstance(content, str):
            turns.say(role, content)
        elif isinstance(content, list):
            _add(turns, role, cast("list[object]", content), f"{where}.content")
        else:
            raise wrong(f"{where}.content", "text or a list of blocks")
    return turns


def _add(turns: Turns, role: str, blocks: Sequence[object], where: str) -> None:
    text: list[str] = []
    for i, entry in enumerate(blocks):
        path = f"{where}[{i}]"
        block = mapping(entry, path)
        kind = block.get("type")
        if kind == "text":
            text.append(named(block, "text", path))
        elif kind == "thinking" and role == "assistant":
            turns.think(named(block, "thinking", path))
        elif kind in ("tool_use", "server_tool_use", "mcp_tool_use"):
            _say(turns, role, text)
            name = named(block, "name", path)
            turns.call(named(block, "id", path), name, block.get("input", {}))
        elif str(kind).endswith("tool_result"):
            content = turns.text(block.get("content"), f"{path}.content")
            turns.result(named(block, "tool_use_id", path), content)
        elif role == "assistant":
            turns.skip(path, kind)
        elif kind not in ("thinking", "redacted_thinking"):
            raise ApiError(
                400,
                f"{path}: a block of type {str(kind)[:40]!r}; text, thinking and tools are read.",
                param=path,
                code="unsupported_parameter",
            )
    _say(turns, role, text)


def _say(turns: Turns, role: str, text: list[str]) -> None:
    """Add the text of some blocks as a message, if there is any."""
    if text:
        turns.say(role, "\n".join(text))
    text.clear()


def tooling_asked(
    tools: Sequence[Block] | None, choice: Mapping[str, Any] | None
) -> tuple[Tooling, list[str]]:
    """Return the tooling, and a warning for each tool that only Anthropic's servers run."""
    found: list[Mapping[str, Any]] = []
    warnings: list[str] = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type", "custom") != "custom":
            warnings.append(f"tools[{i}]: a tool of type {str(tool['type'])[:40]!r} was left out")
            continue
        function: dict[str, Any] = {"name": named(tool, "name", f"tools[{i}]")}
        if tool.get("description"):
            function["description"] = tool["description"]
        function["parameters"] = mapping(tool.get("input_schema", {}), f"tools[{i}].input_schema")
        if tool.get("strict"):
            function["strict"] = tool["strict"]
        found.append({"type": "function", "function": function})
    given = choice or {}
    kind = given.get("type", "auto")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise refused("tool_choice", 'its type is "auto", "any", "tool" or "none".')
    name = named(given, "name", "tool_choice") if kind == "tool" else None
    tooling = Tooling(
        tools=tuple(found),
        choice=cast("Any", _CHOICES[kind]),
        named=name,
        parallel=not given.get("disable_parallel_tool_use") and name is None,
    )
    if tooling.choice == "required" and not tooling.callable:
        raise refused("tool_choice", "there is no such tool.")
    return tooling, warnings


def stop_reason(end: End) -> str:
    if end.reason == "tool_calls":
        return "tool_use"
    if end.reason in ("length", "timeout"):
        return "max_tokens"
    return "end_turn" if end.stop is None else "stop_sequence"


def usage_record(usage: Usage) -> dict[str, Any]:
    """Return the usage in Anthropic's format, which counts cached tokens separately."""
    details = thought_details(usage, "thinking_tokens")
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **({"output_tokens_details": details} if details else {}),
    }


class MessageEvents:
    """The events of one answer. `record` is the message so far; it is complete after `end`."""

    def __init__(self, model: str) -> None:
        self.record: dict[str, Any] = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._block: dict[str, Any] | None = None
        self._pieces: list[str] = []

    def begin(self, num_prompt: int) -> list[Event]:
        self.record["usage"] = usage_record(Usage(num_prompt, 0))
        return [{"type": "message_start", "message": dict(self.record)}]

    def wait(self) -> Event:
        return {"type": "ping"}

    def take(self, step: Step) -> list[Event]:
        found: list[Event] = []
        for part in step.parts:
            found += self._part(part)
        if step.rounds and found:
            found[0]["outrider.round"] = list(step.rounds)
        return found

    def end(self, end: End, extras: Mapping[str, Any]) -> list[Event]:
        found = self._closed()
        delta = {"stop_reason": stop_reason(end), "stop_sequence": end.stop}
        usage = usage_record(end.usage)
        self.record |= {**delta, "usage": usage, **extras}
        found.append({"type": "message_delta", "delta": delta, "usage": usage, **extras})
        return [*found, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[Event]:
        return [error_body(error, ANTHROPIC_PATHS)]

    def _part(self, part: Part) -> list[Event]:
        match part:
            case TextDelta(text):
                return self._grown("text", text, "text_delta", "text")
            case ReasoningDelta(text):
                return self._grown("thinking", text, "thinking_delta", "thinking")
            case ToolOpen(call_id=call_id, name=name):
                block: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": name}
                block["input"] = {}
                return [*self._closed(), self._opened(block)]
            case ToolDelta(arguments=text):
                return [self._delta("input_json_delta", "partial_json", text)]
            case ToolClose(whole=whole):
                return self._closed(whole=whole)

    def _grown(self, kind: str, text: str, delta: str, name: str) -> list[Event]:
        found: list[Event] = []
        if self._block is None or self._block["type"] != kind:
            block = {"type": kind, name: ""}
            if kind == "thinking":
                block["signature"] = ""
            found = [*self._closed(), self._opened(block)]
        return [*found, self._delta(delta, name, text)]

    def _opened(self, block: dict[str, Any]) -> Event:
        self._block = block
        return {"type": "content_block_start", **self._index(), "content_block": dict(block)}

    def _delta(self, kind: str, name: str, text: str) -> Event:
        self._pieces.append(text)
        return {"type": "content_block_delta", **self._index(), "delta": {"type": kind, name: text}}

    def _closed(self, *, whole: bool = True) -> list[Event]:
        block, text = self._block, "".join(self._pieces)
        if block is None:
            return []
        found: list[Event] = []
        if block["type"] == "tool_use":
            # Broken arguments get a key of their own: a client that parsed a part of them would
            # call the tool with that part.
            block["input"] = json.loads(text) if whole else {"arguments": text}
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            # Clients store thoughts with a signature; this server does not need one.
            signed = {"type": "signature_delta", "signature": ""}
            found = [{"type": "content_block_delta", **self._index(), "delta": signed}]
        found.append({"type": "content_block_stop", **self._index()})
        self.record["content"] = [*self.record["content"], block]
        self._block, self._pieces = None, []
        return found

    def _index(self) -> dict[str, int]:
        return {"index": len(self.record["content"])}


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
