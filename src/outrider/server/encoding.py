"""What the objects of OpenAI's two APIs have in common, and how they are cut into events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from outrider.server.events import Usage
from outrider.server.wire import encode


class Frame:
    """The fields around choices: the same in each chunk of a stream, so they are written once."""

    def __init__(self, kind: str, name: str, model: str, *, chunk_kind: str = "") -> None:
        self._fields = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        shown = self._fields | {"object": chunk_kind or f"{kind}.chunk"}
        self._before = b"data: " + encode(shown)[:-1] + b',"choices":['

    def record(self) -> dict[str, Any]:
        return dict(self._fields)

    def chunk(self, choice: Mapping[str, Any], more: bytes = b"") -> bytes:
        """`more` are further fields of the chunk, as JSON without its braces."""
        return self._before + encode(choice) + (b"]," + more if more else b"]") + b"}\n\n"

    def usage_so_far(self, num_prompt: int, num_tokens: int) -> bytes:
        return b'"usage":' + encode(usage_record(Usage(num_prompt, num_tokens)))

    def usage_chunk(self, usage: Mapping[str, Any]) -> bytes:
        return self._before + b'],"usage":' + encode(usage) + b"}\n\n"


def usage_record(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.accepted_prediction_tokens is not None:
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        }
    return found
