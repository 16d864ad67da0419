"""Responses API: translation of input items to messages of a chat template, and the record of an
answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from outrider.server.answers import thought_details
from outrider.server.errors import refused
from outrider.server.events import Usage
from outrider.server.turns import Turns, mapping, named, text_of

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
