"""POST /v1/responses: OpenAI's Responses API, without stored state between requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.api.result import chat_logprobs
from outrider.core.params import SamplingParams
from outrider.server.answers import Answer, thought_details
from outrider.server.errors import ApiError, refused
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
from outrider.server.site import Site
from outrider.server.tools import Turns, mapping, named, text_of, tooling_of
from outrider.server.wire import json_response, read

Item: TypeAlias = Mapping[str, Any]
# Fields of the request that the record repeats, completed with the keys that a request may omit.
_COMPLETED = ("reasoning", "text", "tools")


def turns_of(instructions: str | None, given: str | Sequence[Item]) -> Turns:
    """Translate an input. Raises ApiError for unreadable messages and for references."""
    turns = Turns()
    if instructions:
        turns.system(instructions)
    if isinstance(given, str):
        turns.say("user", given)
        return turns
    for i, item in enumerate(given):
        _add(turns, mapping(item, f"input[{i}]"), f"input[{i}]")
    return turns


def _add(turns: Turns, item: Item, where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role, content = named(item, "role", where), item.get("content")
        read = turns.text if role == "assistant" else text_of
        turns.say(role, read(content, f"{where}.content"))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary")
        turns.think(turns.text(parts, f"{where}.content"))
    elif kind == "item_reference":
        raise refused(where, "this server stores nothing. Send the item itself.")
    elif not _is_call(turns, item, str(kind), where):
        turns.skip(where, kind)


def _is_call(turns: Turns, item: Item, kind: str, where: str) -> bool:
    """Add an item if it is a call that the client ran, or its output; return whether it is."""
    call_id = item.get("call_id", item.get("id") if kind == "mcp_call" else None)
    if not isinstance(call_id, str):
        return False
    if kind.endswith("_output"):
        turns.result(call_id, turns.text(item.get("output"), f"{where}.output"))
    elif kind.endswith("_call"):
        given = item.get("arguments", "{}")
        for key in ("input", "action"):
            given = {key: item[key]} if key in item else given
        turns.call(call_id, str(item.get("name", kind.removesuffix("_call"))), given)
        if item.get("output") is not None:
            turns.result(call_id, turns.text(item["output"], f"{where}.output"))
    else:
        return False
    return True


def tools_of(given: Sequence[Item] | None) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return functions in the form that templates expect, and a warning for each tool of another
    type: clients also offer tools that only OpenAI's servers run."""
    found: list[Mapping[str, Any]] = []
    warnings: list[str] = []
    for i, tool in enumerate(given or ()):
        kind = tool.get("type")
        if kind == "function":
            name = named(tool, "name", f"tools[{i}]")
            keys = ("description", "parameters", "strict")
            function = {"name": name} | {key: tool[key] for key in keys if tool.get(key)}
            found.append({"type": "function", "function": function})
        else:
            warnings.append(f"tools[{i}]: a tool of type {str(kind)[:40]!r} was left out")
    return found, warnings


def format_asked(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `text.format` in the form of chat completions."""
    given = cast("Mapping[str, Any] | None", (text or {}).get("format"))
    if given is None:
        return None
    if not isinstance(given, dict):
        raise refused("text.format", "it is an object with a type.")
    if given.get("type") == "json_schema":
        inner = {key: value for key, value in given.items() if key != "type"}
        return {"type": "json_schema", "json_schema": inner}
    return dict(given)


def usage_record(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            **thought_details(usage, "reasoning_tokens"),
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def new_record(name: str, model: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a new response. `asked` has the request's fields that it repeats."""
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": 0.0,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None, **(asked.get("reasoning") or {})},
        "safety_identifier": None,
        "service_tier": "default",
        # Nothing is stored after the answer, even if requested.
        "store": False,
        "temperature": 1.0,
        "text": _whole_text(asked.get("text") or {}),
        "tool_choice": "auto",
        "tools": [_whole_tool(tool) for tool in asked.get("tools") or ()],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        **{name: value for name, value in asked.items() if name not in _COMPLETED},
    }


def _whole_text(text: Item) -> Item:
    """Return the `text` field with all keys that the type of its format has."""
    given: object = text.get("format")
    if isinstance(given, Mapping):
        form = cast("Item", given)
        if form.get("type") == "json_schema":
            form = {"description": None, "strict": False, **form}
        return {**text, "format": form}
    return {**text, "format": {"type": "text"}}


def _whole_tool(tool: Item) -> Item:
    """Return a tool with all keys that its type has."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}


# Responses API: the events of one answer, and the object that they add up to.
#
# Both are made of the same items, so ids, texts and order agree. Each item is added, grows, and is
# done before the next one begins; events are numbered.
# By the type of an item: the type of its part, and the name of its events.
_TEXTS = {"message": ("output_text", "output_text"), "reasoning": ("reasoning_text",) * 2}


class ResponseEvents:
    """The events of one answer."""

    def __init__(
        self, record: dict[str, Any], logprobs_of: Callable[[Step], list[dict[str, Any]]]
    ) -> None:
        self.record, self._logprobs_of = record, logprobs_of
        self._number = 0
        self._item: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def begin(self, num_prompt: int) -> list[Event]:
        del num_prompt
        return [self._event("response.created", response=dict(self.record)), self.wait()]

    def wait(self) -> Event:
        return self._event("response.in_progress", response=dict(self.record))

    def take(self, step: Step) -> list[Event]:
        logprobs = self._logprobs_of(step) if step.logprobs else []
        found: list[Event] = []
        for part in step.parts:
            found += self._part(part, logprobs)
        if step.rounds and found:
            found[0]["outrider.round"] = list(step.rounds)
        return found

    def end(self, end: End, extras: Mapping[str, Any]) -> list[Event]:
        complete = end.reason not in ("length", "timeout")
        status = "completed" if complete else "incomplete"
        found = self._closed(status)
        self.record["status"] = status
        self.record["completed_at"] = int(time.time()) if complete else None
        self.record["usage"] = usage_record(end.usage)
        if not complete:
            self.record["incomplete_details"] = {"reason": "max_output_tokens"}
        self.record |= extras
        return [*found, self._event(f"response.{status}", response=dict(self.record))]

    def fail(self, error: ApiError) -> list[Event]:
        self.record["status"] = "failed"
        self.record["error"] = {"code": error.code or error.kind, "message": error.message}
        return [self._event("response.failed", response=dict(self.record))]

    def _part(self, part: Part, logprobs: list[dict[str, Any]]) -> list[Event]:
        match part:
            case TextDelta(text):
                found = self._grown("message", text, logprobs)
                logprobs.clear()
                return found
            case ReasoningDelta(text):
                return self._grown("reasoning", text, [])
            case ToolOpen():
                return self._called(part)
            case ToolDelta(arguments=text):
                self._pieces.append(text)
                return [self._of_item("response.function_call_arguments.delta", delta=text)]
            case ToolClose(whole=whole):
                return self._closed("completed" if whole else "incomplete")

    def _grown(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        found: list[Event] = []
        if self._item is None or self._item["type"] != kind:
            found = [*self._closed("completed"), *self._text_item(kind)]
        self._pieces.append(text)
        name = _TEXTS[kind][1]
        more: dict[str, Any] = {"delta": text}
        if kind == "message":
            self._logprobs += logprobs
            more["logprobs"] = list(logprobs)
        return [*found, self._of_item(f"response.{name}.delta", content_index=0, **more)]

    def _text_item(self, kind: str) -> list[Event]:
        if kind == "message":
            item = {"id": _id("msg"), "type": kind, "status": "in_progress", "role": "assistant"}
            self._item = item | {"content": []}
        else:
            self._item = {"id": _id("rs"), "type": kind, "summary": [], "content": []}
        return [self._added(), self._of_part("added", self._text_part(""))]

    def _text_part(self, text: str) -> dict[str, Any]:
        item = self._item or {}
        if item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _called(self, part: ToolOpen) -> list[Event]:
        found = self._closed("completed")
        self._item = {
            "id": _id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": part.call_id,
            "name": part.name,
            "arguments": "",
        }
        return [*found, self._added()]

    def _closed(self, status: str) -> list[Event]:
        """Return the last events of the open item, if there is one."""
        item, text = self._item, "".join(self._pieces)
        if item is None:
            return []
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            name = "response.function_call_arguments.done"
            found = [self._of_item(name, name=item["name"], arguments=text)]
        else:
            part = self._text_part(text)
            item["content"] = [part]
            more = {"logprobs": part["logprobs"]} if kind == "message" else {}
            name = f"response.{_TEXTS[kind][1]}.done"
            found = [
                self._of_item(name, content_index=0, text=text, **more),
                self._of_part("done", part),
            ]
        if kind != "reasoning":
            item["status"] = status
        found.append(self._event("response.output_item.done", **self._index(), item=item))
        self.record["output"] = [*self.record["output"], item]
        self._item = None
        self._pieces, self._logprobs = [], []
        return found

    def _added(self) -> Event:
        item = dict(self._item or {})
        return self._event("response.output_item.added", **self._index(), item=item)

    def _of_part(self, what: str, part: dict[str, Any]) -> Event:
        return self._of_item(f"response.content_part.{what}", content_index=0, part=part)

    def _of_item(self, kind: str, **more: object) -> Event:
        item_id = (self._item or {}).get("id")
        return self._event(kind, item_id=item_id, **self._index(), **more)

    def _index(self) -> dict[str, Any]:
        return {"output_index": len(self.record["output"])}

    def _event(self, kind: str, **more: object) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


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
