"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API.

The events of an answer and the message that they add up to are made of the same blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, cast
from uuid import uuid4

from starlette.requests import Request

from outrider.core.params import SamplingParams
from outrider.plugins.apis.events import Evented
from outrider.server.errors import ANTHROPIC_PATHS, ApiError, error_body, invalid, refused
from outrider.server.exchange import Event, thought_details
from outrider.server.params import Asked, Tooling, params_of
from outrider.server.parts import Part, ReasoningDelta, ToolOpen
from outrider.server.port import ChatPrompt
from outrider.server.reply import encode
from outrider.server.site import End, Site, Step, Usage

Block: TypeAlias = Mapping[str, Any]
# Messages for chat templates, built from the items and blocks of this API and of Responses.
#
# Templates expect one system message, at the beginning, and turns that alternate. Instructions are
# therefore joined, and all items of an assistant's turn (thoughts, text, calls) become one message.
# Agents send several user messages in a row, and instructions in the middle of a conversation,
# which templates reject: these become one user message.
Message: TypeAlias = dict[str, Any]
_SYSTEM = ("system", "developer")


class Turns:
    """The messages so far, and notes about parts of the request that were changed or left out."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.notes: list[str] = []

    def system(self, text: str) -> None:
        """Add instructions: to the system message at the beginning, later to a user message."""
        if text:
            begins = not self.messages or self.messages[-1]["role"] == "system"
            self._join("system" if begins else "user", text)
            if not begins:
                self.notes.append("instructions within the conversation became user messages")

    def skip(self, where: str, kind: object) -> None:
        """Leave out an item that cannot be read, such as a search that OpenAI's server ran."""
        self.notes.append(f"{where}: an item of type {str(kind)[:40]!r} was left out")

    def text(self, content: object, where: str) -> str:
        """Return the text of a tool's output or of an earlier answer, which may have any form: for
        a list, the texts of its parts; for other values, their JSON. Parts without text are left
        out."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            return encode(content).decode()
        found: list[str] = []
        for part in cast("list[object]", content):
            entry = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {"text": part})
            text = entry.get("text", entry.get("refusal"))
            if not isinstance(text, str) and "type" not in entry:
                text = encode(entry).decode()
            elif not isinstance(text, str):
                self.notes.append(
                    f"{where}: a part of type {str(entry.get('type'))[:40]!r} was left out"
                )
                text = f"[{str(entry.get('type'))[:40]} left out]"
            found.append(text)
        return "".join(found)

    def say(self, role: str, text: str) -> None:
        if role in _SYSTEM:
            self.system(text)
        elif role == "assistant":
            message = self._assistant()
            message["content"] = (message["content"] or "") + text
        elif role == "user":
            self._join(role, text)
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Add the assistant's thoughts, which come before its text and calls."""
        message = self._assistant(anew=True)
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: object) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """Add a tool's output, with the name from its call."""
        calls = (call for message in self.messages for call in message.get("tool_calls", ()))
        name = next((one["function"]["name"] for one in calls if one["id"] == call_id), None)
        found: Message = {"role": "tool", "tool_call_id": call_id, "content": text}
        self.messages.append(found if name is None else found | {"name": name})

    def done(self) -> list[Message]:
        """Return all messages; an empty conversation, which is a probe, has an empty one."""
        for message in self.messages:
            if message["content"] is None and not message.get("tool_calls"):
                message["content"] = ""
        if not self.messages:
            return [{"role": "user", "content": ""}]
        return self.messages

    def _join(self, role: str, text: str) -> None:
        """Append to the last message if it has this role, else add a message."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == role:
            last["content"] += "\n\n" + text
        else:
            self.messages.append({"role": role, "content": text})

    def _assistant(self, *, anew: bool = False) -> Message:
        """Return the last, assistant's message, or a new one; with `anew`, never one with text."""
        last = self.messages[-1] if self.messages else None
        said = last is not None and (last.get("content") or last.get("tool_calls"))
        if last is None or last["role"] != "assistant" or (anew and said):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def text_of(content: object, where: str) -> str:
    """Return text, or the joined text of a list of parts. Raises ApiError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "text or a list of parts")
    return "".join(_part(part, where) for part in cast("list[object]", content))


def _part(part: object, where: str) -> str:
    entry = mapping(part, where)
    text = entry.get("text", entry.get("refusal"))
    if not isinstance(text, str):
        raise ApiError(
            400,
            f"{where}: a part of type {str(entry.get('type'))[:40]!r}; only text can be read.",
            param=where,
            code="unsupported_parameter",
        )
    return text


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """Return `value` as a mapping. Raises ApiError if it is not an object."""
    if not isinstance(value, Mapping):
        raise wrong(where, "an object")
    return cast("Mapping[str, Any]", value)


def named(entry: Mapping[str, Any], name: str, where: str) -> str:
    """Return the string field `name` of an object. Raises ApiError if it is missing."""
    value = entry.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "text")
    return value


def wrong(where: str, wanted: str) -> ApiError:
    return ApiError(400, f"{where}: expected {wanted}.", param=where, code="invalid_type")


# Claude Code's first system block differs in every request; with it, no request could use the
# prefix cache.
_CHANGING = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_SCHEMA = "input_schema"


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


def functions_of(
    given: Sequence[Block] | None, kind: str, schema: str
) -> tuple[list[Block], list[str]]:
    """Return the tools of type `kind` in the form that templates expect, and a warning for each
    other tool: clients also offer tools that only the servers of the API's owner run. `schema` is
    the name of a tool's schema. Raises ApiError."""
    found: list[Block] = []
    warnings: list[str] = []
    for i, tool in enumerate(given or ()):
        other = tool.get("type", None if kind == "function" else kind)
        if other != kind:
            warnings.append(f"tools[{i}]: a tool of type {str(other)[:40]!r} was left out")
            continue
        function: dict[str, Any] = {"name": named(tool, "name", f"tools[{i}]")}
        if tool.get("description"):
            function["description"] = tool["description"]
        if schema == _SCHEMA or tool.get(schema):
            function["parameters"] = mapping(tool.get(schema, {}), f"tools[{i}].{schema}")
        if tool.get("strict"):
            function["strict"] = tool["strict"]
        found.append({"type": "function", "function": function})
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


class MessageExchange(Evented[MessageBody]):
    """One message."""

    kind = MessageBody
    api = "messages"

    def __init__(
        self, site: Site, body: MessageBody, request: Request, warnings: list[str]
    ) -> None:
        super().__init__(site, body, request, warnings)
        self.record = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": site.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    @staticmethod
    def refuse(body: MessageBody) -> None:
        if not body.messages:
            raise invalid("messages", "the list is empty.")
        if body.mcp_servers or body.container is not None:
            name = "mcp_servers" if body.mcp_servers else "container"
            raise refused(name, "this server calls no tools. Call them yourself.")
        if body.n not in (None, 1):
            raise refused("n", "the answer is one message. Send several requests.")

    def params(self) -> SamplingParams:
        body = self.body
        stop = {"stop": tuple(body.stop_sequences)} if body.stop_sequences else {}
        budget = ("thinking.budget_tokens", (body.thinking or {}).get("budget_tokens"))
        return params_of(self.site, body, max_tokens=body.max_tokens, thinking=budget, **stop)

    def tooling(self) -> Tooling:
        found, warnings = functions_of(self.body.tools, "custom", _SCHEMA)
        self.warnings += warnings
        given = self.body.tool_choice or {}
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
        return tooling

    def chat(self, tooling: Tooling) -> ChatPrompt:
        """Return the conversation; a last message of the assistant is continued."""
        variables = dict(self.body.chat_template_kwargs or {})
        kind = (self.body.thinking or {}).get("type")
        if kind not in (None, "enabled", "disabled", "adaptive"):
            raise refused("thinking", 'its type is "enabled", "disabled" or "adaptive".')
        if kind is not None:
            variables.setdefault("enable_thinking", kind != "disabled")
        turns = turns_of(self.body.system, self.body.messages)
        messages = turns.done()
        last = messages[-1]
        return ChatPrompt(
            messages=messages,
            tools=tooling.offered,
            variables=variables,
            continues=last["role"] == "assistant" and not last.get("tool_calls"),
            notes=turns.notes,
        )

    def form(self) -> tuple[dict[str, Any] | None, str]:
        return format_asked(self.body.output_config), "output_config.format"

    def first(self, index: int) -> list[Event]:
        num_prompt = len(self.answers[index].request.prompt_ids) if self.answers else 0
        self.record["usage"] = usage_record(Usage(num_prompt, 0))
        return [{"type": "message_start", "message": dict(self.record)}]

    def idle(self, index: int) -> Event:
        del index
        return {"type": "ping"}

    def last(self, index: int, end: End) -> list[Event]:
        del index
        extras = self.extras([end])
        found = self.close()
        delta = {"stop_reason": stop_reason(end), "stop_sequence": end.stop}
        usage = usage_record(end.usage)
        self.record |= {**delta, "usage": usage, **extras}
        found.append({"type": "message_delta", "delta": delta, "usage": usage, **extras})
        return [*found, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> bytes:
        return self.framed([error_body(error, ANTHROPIC_PATHS)])

    def item_of(self, part: Part) -> dict[str, Any]:
        if isinstance(part, ToolOpen):
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
        if isinstance(part, ReasoningDelta):
            # Clients store thoughts with a signature; this server does not need one.
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def opened(self, item: dict[str, Any]) -> list[Event]:
        return [{"type": "content_block_start", **self._index(), "content_block": dict(item)}]

    def grown(self, item: dict[str, Any], text: str, part: Part, step: Step) -> Event:
        del part, step
        if item["type"] == "tool_use":
            return self._delta("input_json_delta", partial_json=text)
        return self._delta(f"{item['type']}_delta", **{item["type"]: text})

    def closed(self, item: dict[str, Any], text: str, *, whole: bool) -> list[Event]:
        found: list[Event] = []
        if item["type"] == "tool_use":
            # Broken arguments get a key of their own: a client that parsed a part of them would
            # call the tool with that part.
            item["input"] = json.loads(text) if whole else {"arguments": text}
        else:
            item[item["type"]] = text
        if item["type"] == "thinking":
            found = [self._delta("signature_delta", signature="")]
        found.append({"type": "content_block_stop", **self._index()})
        self.record["content"] = [*self.record["content"], item]
        return found

    def _delta(self, kind: str, **more: str) -> Event:
        return {"type": "content_block_delta", **self._index(), "delta": {"type": kind, **more}}

    def _index(self) -> dict[str, int]:
        return {"index": len(self.record["content"])}
