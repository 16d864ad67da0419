"""Completions for all HTTP APIs, as steps that are independent of any API's format.

`open_answers` submits the completions of an `Ask` to the engine. Each `Answer` is an iterator of
Steps and has its End afterwards; `written` reads several of them concurrently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import sha256
from itertools import zip_longest
from typing import Any, Self, cast

from msgspec import Struct

from outrider.api.result import GenerationResult, TextEvent, round_of
from outrider.api.stream import TokenDecoder
from outrider.api.structure import StructureOptions
from outrider.core.draft import TokenLogprobs
from outrider.core.errors import PromptTooLongError
from outrider.core.params import SamplingParams
from outrider.metrics.summary import SpecMetrics, spec_metrics
from outrider.server.admission import BATCH
from outrider.server.errors import ApiError
from outrider.server.events import (
    End,
    EndReason,
    OutputParser,
    Part,
    PlainParser,
    Step,
    ToolClose,
    Usage,
)
from outrider.server.port import EngineRequest, EngineStream
from outrider.server.site import Api, Ended, Site


class Ask(Struct, frozen=True, kw_only=True):
    """A request for `params.n` completions of one prompt. `make_parser` makes the parser of each
    text; `trace` requests its rounds. `key` is the name of the API key: the prefix cache is
    separate for each. With `only_prompt`, the one token that the engine writes is dropped."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    structure: StructureOptions = cast("StructureOptions", {})
    make_parser: Callable[[], OutputParser] = PlainParser
    trace: bool = False
    key: str = ""
    request_id: str = ""
    trace_parent: str = ""
    api: Api = "other"
    only_prompt: bool = False


class Answer(AsyncIterator[Step]):
    """One completion while it is written. A caller that stops reading early must `cancel` it."""

    def __init__(self, site: Site, request: EngineRequest, ask: Ask) -> None:
        port = site.port
        self.request = request
        self._ask, self._observers = ask, site.observers
        self._parser, self._trace = ask.make_parser(), ask.trace
        self._card, self._decoder, self.model = port.card, port.decoder, site.names[0]
        self._stream: EngineStream = port.stream(request)
        self._num_tokens = 0
        self._calls: list[ToolClose] = []
        self._end: End | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        if self._end is not None:
            raise StopAsyncIteration
        async for event in self._stream:
            return self._step(event)
        last = self._parser.finish()
        result = self._stream.result
        self._take(last)
        self._end = self._ended(result)
        ended = Ended(
            result=result,
            request=self.request,
            model=self.model,
            api=self._ask.api,
            engine=self.engine or 0,
            usage=self._end.usage,
            request_id=self._ask.request_id,
            trace_parent=self._ask.trace_parent,
        )
        for observer in self._observers:
            observer.observe(ended)
        if not last:
            raise StopAsyncIteration
        return Step(tuple(last), self._num_tokens)

    @property
    def end(self) -> End:
        """The end of the completion. Raises ApiError before all steps have been read."""
        if self._end is None:
            raise ApiError(500, "the answer has not ended.")
        return self._end

    @property
    def engine(self) -> int | None:
        """The number of the engine that writes it; None with a single engine."""
        return self._stream.engine

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """An entry per prompt token if requested, available after the end."""
        return self._stream.result.prompt_logprobs

    def cancel(self) -> None:
        if self._end is None:
            self._stream.cancel()

    def _step(self, event: TextEvent) -> Step:
        if self._ask.only_prompt:
            return Step((), 0)
        self._num_tokens += len(event.token_ids)
        for observer in self._observers:
            observer.wrote(len(event.token_ids), model=self.model, engine=self.engine or 0)
        text = event.text
        parts = self._parser.feed(text) if text else []
        self._take(parts)
        rounds = _rounds(event, self._decoder) if self._trace else ()
        return Step(tuple(parts), self._num_tokens, event.logprobs, rounds)

    def _take(self, parts: Sequence[Part]) -> None:
        self._calls += [part for part in parts if isinstance(part, ToolClose)]

    def _ended(self, result: GenerationResult) -> End:
        reason = cast("EndReason", result.finish_reason or "stop")
        if self._ask.only_prompt:
            reason = "length"
        notes = list(result.notes)
        if not all(call.whole for call in self._calls):
            notes.append("calls: the arguments of a call are not a complete JSON object")
        elif self._calls and reason == "stop":
            reason = "tool_calls"
        if self._parser.is_cut:
            notes.append("calls: the text ends inside a call, which is returned as text")
        metrics = result.spec_metrics(adaptive=not self._card.fixed_k)
        accepted, rejected = result.prediction_tokens or (None, None)
        return End(
            reason,
            Usage(
                prompt_tokens=len(self.request.prompt_ids),
                completion_tokens=0 if self._ask.only_prompt else result.num_tokens,
                cached_tokens=result.num_cached_tokens,
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=rejected,
                reasoning_tokens=result.thought_tokens,
                budget_reached=result.thoughts_cut,
            ),
            seed=result.seed,
            stop=result.stop,
            metrics=None if metrics is None else {"speculative_decoding": metrics},
            notes=tuple(notes),
        )


def open_answers(site: Site, ask: Ask) -> list[Answer]:
    """Submit the completions of `ask`, all or none. Raises PromptTooLongError, and like the
    port."""
    card = site.port.card
    num_prompt = len(ask.prompt_ids)
    if num_prompt >= card.window:
        raise PromptTooLongError(num_prompt, card.window)
    params = replace(ask.params.seeded(), n=1)
    if not params.is_open:
        # Clients of HTTP may send a constant that is larger than what fits, and expect no note.
        params = replace(params, max_tokens=min(params.max_tokens, card.window - num_prompt))
    found: list[Answer] = []
    site.traffic.admission.widen(ask.params.n)
    try:
        for sample in range(ask.params.n):
            if sample == 1:
                # All have the same prompt; only the first completion scores it.
                params = replace(params, prompt_logprobs=None)
            request = EngineRequest(
                prompt_ids=ask.prompt_ids,
                params=params,
                structure=ask.structure,
                sample=sample,
                cache_salt=_salt(site, ask),
                key=ask.key,
                weight=site.traffic.admission.weight(ask.key),
            )
            found.append(Answer(site, request, ask))
    except BaseException:
        cancel(found)
        raise
    return found


def _salt(site: Site, ask: Ask) -> str:
    """Return the salt of the prefix cache: the key, and a digest of the request's own salt."""
    own = "" if site.shares_prefixes else ask.key.removeprefix(BATCH)
    given = ask.params.cache_salt
    return f"{own}\n{sha256(given.encode()).hexdigest()}" if given else own


def cancel(answers: Iterable[Answer]) -> None:
    for answer in answers:
        answer.cancel()


async def written(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Step | End]]:
    """Yield the steps of all answers as they come, each with the index of its answer. The last
    item of each answer is its End. An error of one answer cancels them all."""
    try:
        if len(answers) == 1:
            async for step in answers[0]:
                yield 0, step
            yield 0, answers[0].end
            return
        async with aclosing(_side_by_side(answers)) as items:
            async for item in items:
                yield item
    finally:
        cancel(answers)


async def _side_by_side(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Step | End]]:
    # The queue holds one step: if the reader is slow, the engine merges events into larger steps.
    queue: asyncio.Queue[tuple[int, Step | End | BaseException]] = asyncio.Queue(1)

    async def read(index: int, answer: Answer) -> None:
        try:
            async for step in answer:
                await queue.put((index, step))
            await queue.put((index, answer.end))
        except Exception as error:  # noqa: BLE001 - raised where it is read
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(read(*pair)) for pair in enumerate(answers)]
    left = len(tasks)
    try:
        while left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= isinstance(item, End)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage_of(answers: Sequence[Answer]) -> Usage:
    """Return the usage of all completions together. A prompt counts once for its completions."""
    all_of = [answer.end.usage for answer in answers]
    read = [answer.end.usage for answer in answers if answer.request.sample == 0]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in read),
        completion_tokens=sum(usage.completion_tokens for usage in all_of),
        cached_tokens=sum(usage.cached_tokens for usage in read),
        accepted_prediction_tokens=_sum(usage.accepted_prediction_tokens for usage in all_of),
        rejected_prediction_tokens=_sum(usage.rejected_prediction_tokens for usage in all_of),
        reasoning_tokens=_sum(usage.reasoning_tokens for usage in all_of),
        budget_reached=max(
            (one for u in all_of if (one := u.budget_reached) is not None), default=None
        ),
    )


def thought_details(usage: Usage, name: str) -> dict[str, int | bool]:
    """Return details of the completion tokens. `name` is the API's field for thought tokens."""
    details = {name: usage.reasoning_tokens, "thinking_budget_reached": usage.budget_reached}
    return {key: value for key, value in details.items() if value is not None}


def metrics_of(ends: Sequence[End]) -> dict[str, Any] | None:
    """Return the metrics of all completions together: their histograms are added up."""
    found = [
        cast("SpecMetrics", end.metrics["speculative_decoding"]) for end in ends if end.metrics
    ]
    if len(found) < 2:
        return next((end.metrics for end in ends if end.metrics), None)
    rows = zip_longest(*(one["acceptance_histogram"] for one in found), fillvalue=0)
    num_drafted = sum(one["num_draft_tokens"] for one in found)
    k = found[0].get("num_spec_tokens")
    together = spec_metrics(map(sum, rows), num_drafted=num_drafted, k=k)
    return {"speculative_decoding": together}


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rounds(event: TextEvent, decoder: TokenDecoder) -> tuple[dict[str, Any], ...]:
    pieces = iter(event.pieces)
    return tuple(round_of(one, pieces, decoder) for one in event.round_events)
