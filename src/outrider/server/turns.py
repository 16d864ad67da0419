"""Messages for chat templates, built from the items and blocks of other APIs.

Templates expect one system message, at the beginning, and turns that alternate. Instructions are
therefore joined, and all items of an assistant's turn (thoughts, text, calls) become one message.
Agents send several user messages in a row, and instructions in the middle of a conversation, which
templates reject: these become one user message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from outrider.server.errors import ApiError
from outrider.server.wire import encode

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
