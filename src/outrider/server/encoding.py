"""Answers of OpenAI's two older APIs: choices in one object, or in a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any, Protocol
from uuid import uuid4

from outrider.server.answers import Answer, thought_details, usage_of, written
from outrider.server.errors import ApiError, error_body
from outrider.server.events import End, Step, Usage
from outrider.server.exchange import Exchange
from outrider.server.wire import encode

FINISH = {"stop": "stop", "length": "length", "timeout": "length", "tool_calls": "tool_calls"}


class Choices(Protocol):
    """The completions of one exchange in an API's format, by their index among the choices."""

    async def open(self) -> list[Answer]: ...

    def first(self, index: int) -> list[dict[str, Any]] | None:
        """The deltas before the generated text; None while they are not known."""
        ...

    def deltas(self, index: int, step: Step) -> list[dict[str, Any]]: ...

    def last(self, index: int) -> dict[str, Any]:
        """The last delta, which gets the reason why the completion ended."""
        ...

    def take(self, index: int, step: Step) -> None:
        """Keep a step for `record`."""
        ...

    def record(self, index: int, answer: Answer) -> dict[str, Any]: ...


class ChoicesWriter:
    """Writes `choices`. The field "object" is `kind`, and in streams `chunk_kind`."""

    def __init__(
        self, exchange: Exchange[Any], choices: Choices, *, name: str, kind: str, chunk_kind: str
    ) -> None:
        self._exchange, self._choices = exchange, choices
        name = f"{name}-{uuid4().hex}"
        common = {"id": name, "created": int(time.time()), "model": exchange.site.name}
        self._fields = {**common, "object": kind}
        # Equal in each chunk of a stream, so it is encoded only once.
        shown = encode({**common, "object": chunk_kind})
        self._before = b"data: " + shown[:-1] + b',"choices":['
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    async def open(self) -> list[Answer]:
        return await self._choices.open()

    async def whole(self, answers: Sequence[Answer]) -> Mapping[str, Any]:
        async with aclosing(written(answers)) as steps:
            async for index, item in steps:
                if isinstance(item, Step):
                    self._choices.take(index, item)
        records = [
            self._finished(self._choices.record(index, answer), answer.end, answers)
            for index, answer in enumerate(answers)
        ]
        own = {"choices": records, "usage": usage_record(usage_of(answers))}
        return {**self._fields, **own, **self._exchange.extras([one.end for one in answers])}

    async def pieces(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]:
        options = self._exchange.body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        async with aclosing(written(answers)) as steps:
            async for index, item in steps:
                found = bytearray().join(map(self._chunk, self._begin(index)))
                if isinstance(item, End):
                    self._ended.add(index)
                    last = self._finished(self._choices.last(index), item, answers)
                    found += self._chunk(last, encode(self._exchange.extras([item]))[1:-1])
                else:
                    more = _usage_so_far(answers[index], item) if continuous else b""
                    for delta in self._choices.deltas(index, item):
                        found += self._chunk(delta, more)
                yield bytes(found)
        if options is not None and options.include_usage:
            usage = encode(usage_record(usage_of(answers)))
            yield self._before + b'],"usage":' + usage + b"}\n\n"
        yield b"data: [DONE]\n\n"

    def waiting(self) -> bytes:
        index = next(i for i in count() if i not in self._ended)
        deltas = self._begin(index) or [self._choices.last(index)]
        return b"".join(map(self._chunk, deltas))

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + encode(error_body(error)) + b"\n\n"

    def _begin(self, index: int) -> list[dict[str, Any]]:
        """Return the first deltas, unless they were sent before."""
        if index in self._begun or (found := self._choices.first(index)) is None:
            return []
        self._begun.add(index)
        return found

    def _finished(
        self, choice: dict[str, Any], end: End, answers: Sequence[Answer]
    ) -> dict[str, Any]:
        several = {"metrics": end.metrics} if len(answers) > 1 else {}
        return choice | {"finish_reason": FINISH[end.reason]} | several

    def _chunk(self, choice: Mapping[str, Any], more: bytes = b"") -> bytes:
        """Encode a chunk. `more` has further fields, as JSON without the braces."""
        return self._before + encode(choice) + (b"]," + more if more else b"]") + b"}\n\n"


def _usage_so_far(answer: Answer, step: Step) -> bytes:
    usage = Usage(len(answer.request.prompt_ids), step.num_tokens)
    return b'"usage":' + encode(usage_record(usage))


def usage_record(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    details: dict[str, Any] = thought_details(usage, "reasoning_tokens")
    if usage.accepted_prediction_tokens is not None:
        details |= {
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        }
    return found | ({"completion_tokens_details": details} if details else {})
