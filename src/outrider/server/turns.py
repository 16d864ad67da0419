"""Messages in the form of chat templates, made of what other APIs call items and blocks.

Templates know one system message, at the beginning, and turns that alternate: so instructions are
joined, and an assistant's thoughts, text and calls are one message however many items tell them.
Agents send several messages of the user's in a row, and instructions amid a conversation, which
templates refuse: all of these are one message of the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from outrider.server.errors import ApiError
from outrider.server.wire import encode

Message: TypeAlias = dict[str, Any]
_SYSTEM = ("system", "developer")


class Turns:
    """Messages so far, and notes on what of the request they do not have as it was sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.notes: list[str] = []

    def system(self, text: str) -> None:
        """Instructions: of the system at the beginning, later the user's."""
        if text:
            begins = not self.messages or self.messages[-1]["role"] == "system"
            self._join("system" if begins else "user", text)
            if not begins:
                self.notes.append("instructions amid the conversation were given as user messages")

    def skip(self, where: str, kind: object) -> None:
        """Leave an item out that cannot be read here, as a search that its maker's server ran."""
        self.notes.append(f"{where}: an item of type {str(kind)[:40]!r} was left out")

    def text(self, content: object, where: str) -> str:
        """Text of what a tool gave, or of an earlier answer, in whatever form it has: of a list the
        texts of its parts, and of other values their JSON. A part without text is left out."""
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
        """What the assistant thought before what comes next."""
        message = self._assistant(anew=True)
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: object) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """What the tool gave, with the name that its call had."""
        calls = (call for message in self.messages for call in message.get("tool_calls", ()))
        name = next((one["function"]["name"] for one in calls if one["id"] == call_id), None)
        found: Message = {"role": "tool", "tool_call_id": call_id, "content": text}
        self.messages.append(found if name is None else found | {"name": name})

    def done(self) -> list[Message]:
        """All of them. A conversation of nothing, with which clients try a server, is one of an
        empty question."""
        for message in self.messages:
            if message["content"] is None and not message.get("tool_calls"):
                message["content"] = ""
        if not self.messages:
            return [{"role": "user", "content": ""}]
        return self.messages

    def _join(self, role: str, text: str) -> None:
        """To the last message, if it is of this role."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == role:
            last["content"] += "\n\n" + text
        else:
            self.messages.append({"role": role, "content": text})

    def _assistant(self, *, anew: bool = False) -> Message:
        """The assistant's turn that is last, or a new one: thoughts begin one where the last has
        text or calls already."""
        last = self.messages[-1] if self.messages else None
        said = last is not None and (last.get("content") or last.get("tool_calls"))
        if last is None or last["role"] != "assistant" or (anew and said):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def text_of(content: object, where: str) -> str:
    """Text, or the text of a list of parts. Raises ApiError for parts of another kind."""
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
    """Raises ApiError for what is no object."""
    if not isinstance(value, Mapping):
        raise wrong(where, "an object")
    return cast("Mapping[str, Any]", value)


def named(entry: Mapping[str, Any], name: str, where: str) -> str:
    """A text of an object. Raises ApiError if it is not there."""
    value = entry.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "text")
    return value


def wrong(where: str, wanted: str) -> ApiError:
    return ApiError(400, f"{where}: wanted is {wanted}.", param=where, code="invalid_type")
