"""POST /v1/responses: OpenAI's Responses API, without stored state between requests.

The events of an answer and the object that they add up to are made of the same items, so ids, texts
and order agree. Each item is added, grows, and is done before the next one begins; events are
numbered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, cast
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from outrider.api.result import chat_logprobs
from outrider.core.params import SamplingParams
from outrider.plugins.apis.events import Evented
from outrider.plugins.apis.messages import (
    Turns,
    format_asked,
    functions_of,
    mapping,
    named,
    text_of,
)
from outrider.server.errors import ApiError, invalid, refused
from outrider.server.exchange import Event, thought_details
from outrider.server.params import Asked, Tooling, params_of, tooling_of
from outrider.server.parts import Part, ReasoningDelta, TextDelta, ToolDelta, ToolOpen
from outrider.server.port import ChatPrompt
from outrider.server.site import End, Site, Step, Usage

Item: TypeAlias = Mapping[str, Any]


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


# Fields of a response that are null unless something sets them; and those that are completed with
# the keys that a request may omit.
_NULL = (
    *("completed_at", "error", "incomplete_details", "instructions", "max_output_tokens", "usage"),
    *("max_tool_calls", "previous_response_id", "prompt_cache_key", "safety_identifier", "user"),
)
_COMPLETED = ("reasoning", "text", "tools")


def new_record(name: str, model: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a new response. `asked` has the request's fields that it repeats."""
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        "output": [],
        **dict.fromkeys(_NULL),
        "background": False,
        "metadata": {},
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None, **(asked.get("reasoning") or {})},
        "service_tier": "default",
        # Nothing is stored after the answer, even if requested.
        "store": False,
        "text": _whole_text(asked.get("text") or {}),
        "tool_choice": "auto",
        "tools": [_whole_tool(tool) for tool in asked.get("tools") or ()],
        "top_logprobs": 0,
        "truncation": "disabled",
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


_LOGPROBS = "message.output_text.logprobs"
# Fields of the request that its response repeats.
_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("prompt_cache_key", "reasoning", "safety_identifier", "temperature", "text", "tool_choice"),
    *("tools", "top_logprobs", "top_p", "user"),
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


# By the type of an item: the name of its events and of its part.
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseExchange(Evented[ResponseBody]):
    """One response; `record` repeats some fields of the request."""

    kind = ResponseBody
    api = "responses"
    count_fields: ClassVar[Mapping[str, str]] = {"object": "response.input_tokens"}

    def __init__(
        self, site: Site, body: ResponseBody, request: Request, warnings: list[str]
    ) -> None:
        super().__init__(site, body, request, warnings)
        given = {name: getattr(body, name) for name in _REPEATED}
        repeated = {name: value for name, value in given.items() if value is not None}
        self.record = new_record(_id("resp"), site.name, repeated)
        self._number = 0
        self._logprobs: list[dict[str, Any]] = []

    @staticmethod
    def refuse(body: ResponseBody) -> None:
        if body.input is None and not body.instructions and body.prompt is None:
            # An empty list is accepted: clients send it to probe a server.
            raise invalid("input", "it is missing.")
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

    def params(self) -> SamplingParams:
        body, limit = self.body, self.body.max_output_tokens
        num_top = body.top_logprobs or 0
        params = params_of(
            self.site,
            body,
            max_tokens=body.max_tokens if limit is None else limit,
            logprobs=num_top > 0 or _LOGPROBS in (body.include or ()),
            top_logprobs=num_top,
            thinking=("reasoning.max_tokens", (body.reasoning or {}).get("max_tokens")),
        )
        self.record |= {name: getattr(params, name) for name in _REPORTED}
        return params

    def tooling(self) -> Tooling:
        body = self.body
        tools, warnings = functions_of(body.tools, "function", "parameters")
        self.warnings += warnings
        return tooling_of(tools, body.tool_choice, body.parallel_tool_calls)

    def chat(self, tooling: Tooling) -> ChatPrompt:
        variables = dict(self.body.chat_template_kwargs or {})
        effort = (self.body.reasoning or {}).get("effort")
        if effort is not None:
            variables.setdefault("reasoning_effort", effort)
        turns = turns_of(self.body.instructions, self.body.input or [])
        return ChatPrompt(
            messages=turns.done(), tools=tooling.offered, variables=variables, notes=turns.notes
        )

    def form(self) -> tuple[dict[str, Any] | None, str]:
        return format_asked(self.body.text), "text.format"

    def first(self, index: int) -> list[Event]:
        return [self._event("response.created", response=dict(self.record)), self.idle(index)]

    def idle(self, index: int) -> Event:
        del index
        return self._event("response.in_progress", response=dict(self.record))

    def last(self, index: int, end: End) -> list[Event]:
        del index
        extras = self.extras([end])
        complete = end.reason not in ("length", "timeout")
        status = "completed" if complete else "incomplete"
        found = self.close(whole=complete)
        self.record["status"] = status
        self.record["completed_at"] = int(time.time()) if complete else None
        self.record["usage"] = usage_record(end.usage)
        if not complete:
            self.record["incomplete_details"] = {"reason": "max_output_tokens"}
        self.record |= extras
        return [*found, self._event(f"response.{status}", response=dict(self.record))]

    def failure(self, error: ApiError) -> bytes:
        self.record["status"] = "failed"
        self.record["error"] = {"code": error.code or error.kind, "message": error.message}
        return self.framed([self._event("response.failed", response=dict(self.record))])

    def item_of(self, part: Part) -> dict[str, Any]:
        if isinstance(part, ToolOpen):
            item: dict[str, Any] = {"id": _id("fc"), "type": "function_call"}
            call = {"call_id": part.call_id, "name": part.name, "arguments": ""}
            return item | {"status": "in_progress"} | call
        if isinstance(part, ReasoningDelta):
            return {"id": _id("rs"), "type": "reasoning", "summary": [], "content": []}
        item = {"id": _id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
        return item | {"content": []}

    def opened(self, item: dict[str, Any]) -> list[Event]:
        name = "response.output_item.added"
        found = [self._event(name, **self._index(), item=dict(item))]
        if item["type"] in _TEXTS:
            found.append(self._of_part(item, "added", self._text_part(item, "")))
        return found

    def grown(self, item: dict[str, Any], text: str, part: Part, step: Step) -> Event:
        if isinstance(part, ToolDelta):
            return self._of_item(item, "response.function_call_arguments.delta", delta=text)
        more: dict[str, Any] = {}
        if isinstance(part, TextDelta):
            # The log-probabilities of a step are those of its first text.
            first = next(one for one in step.parts if isinstance(one, TextDelta))
            items, num_top = step.logprobs if part is first else (), self.body.top_logprobs or 0
            more["logprobs"] = chat_logprobs(self.site.port.decoder, items, num_top)
            self._logprobs += more["logprobs"]
        name = f"response.{_TEXTS[item['type']]}.delta"
        return self._of_item(item, name, content_index=0, delta=text, **more)

    def closed(self, item: dict[str, Any], text: str, *, whole: bool) -> list[Event]:
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            name = "response.function_call_arguments.done"
            found = [self._of_item(item, name, name=item["name"], arguments=text)]
        else:
            part = self._text_part(item, text)
            item["content"] = [part]
            more = {"logprobs": part["logprobs"]} if kind == "message" else {}
            name = f"response.{_TEXTS[kind]}.done"
            found = [
                self._of_item(item, name, content_index=0, text=text, **more),
                self._of_part(item, "done", part),
            ]
        if kind != "reasoning":
            item["status"] = "completed" if whole else "incomplete"
        found.append(self._event("response.output_item.done", **self._index(), item=item))
        self.record["output"] = [*self.record["output"], item]
        self._logprobs = []
        return found

    def _text_part(self, item: dict[str, Any], text: str) -> dict[str, Any]:
        found: dict[str, Any] = {"type": _TEXTS[item["type"]], "text": text}
        if item["type"] == "message":
            found |= {"annotations": [], "logprobs": list(self._logprobs)}
        return found

    def _of_part(self, item: dict[str, Any], what: str, part: dict[str, Any]) -> Event:
        return self._of_item(item, f"response.content_part.{what}", content_index=0, part=part)

    def _of_item(self, item: dict[str, Any], kind: str, /, **more: object) -> Event:
        return self._event(kind, item_id=item["id"], **self._index(), **more)

    def _index(self) -> dict[str, Any]:
        return {"output_index": len(self.record["output"])}

    def _event(self, kind: str, /, **more: object) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


async def stored_response(_: Request) -> Response:
    words = "responses are not stored. Keep the one that answered the request."
    raise ApiError(404, words, code="not_found")
