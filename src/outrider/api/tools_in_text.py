"""Tools for models whose chat template does not support them: described and called in text.

Instructions list the tools as JSON and request calls as JSON; earlier calls and their results are
in the conversation in the same form. They use roles that every template has, in alternating turns.
server/parsing reads the answers as its format `generic`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTIONS = """\
You can call these tools:

{tools}

To call one, answer with one line of JSON and nothing behind it:
{{"name": "the tool's name", "arguments": {{"its parameter": "a value"}}}}
To call several, write a line for each. What they give is in the next message. Where no tool is \
needed, answer in words."""


def has_place_for_tools(template: str) -> bool:
    return "tools" in template


def must_be_in_text(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> bool:
    """True if `template` would leave a part of tools out. If no tools are offered now, a template
    that writes earlier calls does so in its own words."""
    if has_place_for_tools(template):
        return False
    has_calls = any("tool_calls" in one or one["role"] == "tool" for one in messages)
    return bool(tools) or (has_calls and "tool" not in template)


def in_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The conversation with tools, calls and their results as text."""
    found = list[dict[str, Any]]()
    names: dict[object, str] = {}
    has_result = False
    for message in messages:
        plain = _calls_as_lines(message, names)
        is_result = plain["role"] == "tool"
        if is_result:
            plain = _result(plain, names)
        # Results, and the user's message after them, are one turn.
        if found and plain["role"] == "user" == found[-1]["role"] and (is_result or has_result):
            found[-1]["content"] += f"\n\n{plain['content']}"
        else:
            found.append(plain)
        has_result = is_result
    if tools:
        listed = "\n".join(_json(tool["function"]) for tool in tools)
        _instruct(found, _INSTRUCTIONS.format(tools=listed))
    return found


def _calls_as_lines(message: Mapping[str, Any], names: dict[object, str]) -> dict[str, Any]:
    """A message with its calls as lines, in the requested form; `names` learns names by call id."""
    plain = dict(message)
    lines = [plain["content"]]
    for call in plain.pop("tool_calls", ()):
        function = call["function"]
        names[call.get("id")] = function["name"]
        lines.append(_json({"name": function["name"], "arguments": function["arguments"]}))
    plain["content"] = "\n".join(filter(None, lines))
    return plain


def _result(message: Mapping[str, Any], names: Mapping[object, str]) -> dict[str, Any]:
    name = message.get("name") or names.get(message.get("tool_call_id"), "the tool")
    return {"role": "user", "content": f"{name} gave:\n{message['content']}"}


def _instruct(messages: list[dict[str, Any]], text: str) -> None:
    """Put instructions in front of the first message if it gives some, else of the user's first:
    some templates refuse a system message, or have one of their own."""
    for i, message in enumerate(messages):
        if message["role"] in ("system", "developer", "user"):
            messages[i]["content"] = f"{text}\n\n{message['content']}"
            return
    messages.insert(0, {"role": "user", "content": text})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
