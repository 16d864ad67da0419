"""Responses API: the events of one answer, and the object that they add up to.

Both are made of the same items, so ids, texts and order agree. Each item is added, grows, and is
done before the next one begins; events are numbered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from outrider.server.errors import ApiError
from outrider.server.evented import Event
from outrider.server.events import (
    End,
    Part,
    ReasoningDelta,
    Step,
    TextDelta,
    ToolClose,
    ToolDelta,
    ToolOpen,
)
from outrider.server.response_items import usage_record

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
