"""Messages and tools of a conversation: checked, and in the form that chat templates expect.

Callers write them as OpenAI's API does: content is text or a list of text parts, arguments of a
call are JSON text. Published templates want one text and objects, and have several names for what
a model thought. What no template could read raises ConfigError, which says where it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from outrider.core.errors import ConfigError
from outrider.core.fields import MESSAGES, shown

REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")
# What a template is given anyway; a caller's variable of that name would change the conversation.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatOptions(TypedDict, total=False):
    """What a chat template may be given besides messages. `continues` goes on with the last
    message, which must be the assistant's; `variables` are names that the template knows, as
    `enable_thinking` and `reasoning_effort`."""

    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    continues: bool


def checked_messages(
    messages: Sequence[Mapping[str, Any]], *, continues: bool = False
) -> list[dict[str, Any]]:
    """The messages in the templates' form."""
    found = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if continues and not (found and found[-1]["role"] == "assistant"):
        raise ConfigError(
            "only a last message of the assistant's can be gone on with.",
            hint="end the conversation with it, or ask for a new turn",
        )
    return found


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools, each `{"type": "function", "function": {"name", "description", "parameters"}}`;
    the short form that is the function alone is wrapped."""
    if len(tools) > MESSAGES.most:
        raise ConfigError(
            f"{len(tools)} tools; a conversation may offer {MESSAGES.most}.", hint="offer fewer"
        )
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def checked_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, none of which stands for something else of the template's."""
    taken = sorted(name for name in variables if name in _RESERVED or name.endswith("_token"))
    if taken:
        raise ConfigError(
            f"the chat template's {taken[0]} cannot be set by a variable.", hint="leave it out"
        )
    return dict(variables)


def content_text(content: object, where: str) -> str:
    """Text, or the text of a list of text parts; "" for None."""
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        return "".join(_part(part, where) for part in cast("Sequence[object]", content))
    return _text(content, f"{where}.content")


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = _text(message.get("role"), f"{where}.role")
    found = {**message, "role": role, "content": content_text(message.get("content"), where)}
    calls = message.get("tool_calls")
    found.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list | tuple):
            raise ConfigError(f"{where}.tool_calls: expected a list, got {shown(calls)}.")
        listed = cast("Sequence[object]", calls)
        found["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(listed)
        ]
    elif message.get("content") is None and not _reasoning(message, where):
        raise ConfigError(f"{where}: a message has content, or calls of tools.")
    if message.get("tool_call_id") is not None:
        _text(message["tool_call_id"], f"{where}.tool_call_id")
    thought = _reasoning(message, where)
    for name in REASONING:
        found.pop(name, None)
    return {**found, "reasoning_content": thought} if thought else found


def _reasoning(message: Mapping[str, Any], where: str) -> str:
    """What the model thought, under the first of the names that says something."""
    for name in REASONING:
        if message.get(name) is not None:
            return _text(message[name], f"{where}.{name}")
    return ""


def _call(call: object, where: str) -> dict[str, Any]:
    entry = _object(call, where)
    function = _object(entry.get("function"), f"{where}.function")
    name = _text(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**entry, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: object, where: str) -> dict[str, Any]:
    """As an object, which templates write in their own way."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: {shown(given)} is no JSON object.") from None
    return _object({} if given is None else given, where)


def _tool(tool: object, where: str) -> dict[str, Any]:
    entry = _object(tool, where)
    if "function" not in entry and "name" in entry:
        entry = {"type": "function", "function": {k: v for k, v in entry.items() if k != "type"}}
    if entry.get("type", "function") != "function":
        raise ConfigError(
            f"{where}: a tool of type {shown(entry['type'])}; only functions can be called.",
            hint='{"type": "function", "function": {"name": ..., "parameters": {...}}}',
        )
    function = _object(entry.get("function"), f"{where}.function")
    if not _text(function.get("name"), f"{where}.function.name"):
        raise ConfigError(f"{where}.function.name: a tool has a name.")
    if function.get("parameters") is not None:
        _object(function["parameters"], f"{where}.function.parameters")
    return {**entry, "type": "function", "function": function}


def _part(part: object, where: str) -> str:
    entry = cast("Mapping[str, object]", part if isinstance(part, Mapping) else {"type": None})
    text = entry.get("text")
    if entry.get("type", "text") not in _TEXT_PARTS or not isinstance(text, str):
        raise ConfigError(f"{where}.content: only text can be read.", hint="parts of type text")
    return text


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: expected text, got {shown(value)}.")
    return value


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected an object, got {shown(value)}.")
    return dict(cast("Mapping[str, Any]", value))
