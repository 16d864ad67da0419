"""One request of any API, from its body to its answer: the code that all APIs share.

An API is a subclass of `Exchange`, which knows its format of prompts and answers, and an
`api_route`. The completions of a request are `Answer`s: iterators of Steps, the tokens of one round
or of several rounds merged. `written` reads several of them concurrently. An exchange makes its
stream and its final object from the same steps, so they cannot differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import sha256
from itertools import count, islice, zip_longest
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.api.chat_template import switched
from outrider.api.result import GenerationResult, TextEvent, round_of
from outrider.api.structure import StructureOptions
from outrider.core.draft import TokenLogprobs
from outrider.core.errors import PromptTooLongError
from outrider.core.fields import shown
from outrider.core.params import SamplingParams
from outrider.metrics import SpecMetrics, members_together, spec_metrics
from outrider.server.errors import ApiError
from outrider.server.params import (
    Asked,
    Tooling,
    ignored_fields,
    kept,
    schema_paths,
    structure_asked,
    traced,
)
from outrider.server.parts import OutputParser, Part, PlainParser, ToolClose
from outrider.server.port import ChatPrompt, EngineRequest, EngineStream
from outrider.server.reply import MOST_WARNINGS, EventReply, Reply, json_response, read
from outrider.server.site import (
    BATCH,
    Api,
    End,
    Ended,
    EndReason,
    Site,
    Step,
    Usage,
    key_of,
    request_id_of,
)

Event: TypeAlias = dict[str, Any]
B = TypeVar("B", bound=Asked)
E = TypeVar("E", bound="Exchange[Any]")


class Exchange(Generic[B]):
    """A parsed body, and the writer of its answer. `warnings` report ignored fields; `key` is the
    name of the API key."""

    kind: ClassVar[type[Asked]]
    api: ClassVar[Api]
    count_fields: ClassVar[Mapping[str, str]] = {}
    """Further fields of an answer that counts a prompt's tokens."""

    def __init__(self, site: Site, body: B, request: Request, warnings: list[str]) -> None:
        self.site, self.body, self.warnings = site, body, warnings
        self.key, self.request_id = key_of(request), request_id_of(request)
        self.trace_parent = request.headers.get("traceparent", "")
        self.answers: Sequence[Answer] = ()
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    @staticmethod
    def refuse(body: Any) -> None:
        """Check a body. Raises ApiError for values that this server cannot honour."""
        raise NotImplementedError

    def params(self) -> SamplingParams:
        raise NotImplementedError

    def tooling(self) -> Tooling:
        raise NotImplementedError

    def chat(self, tooling: Tooling) -> ChatPrompt:
        """Return the conversation for the template. Raises ApiError."""
        raise NotImplementedError

    def form(self) -> tuple[Mapping[str, Any] | None, str]:
        """Return the required format of the answer, if the API has its own parameter for it, and
        the parameter's name."""
        return None, "response_format"

    def first(self, index: int) -> list[Event] | None:
        """Return the events before the text of an answer; None while they are not known."""
        raise NotImplementedError

    def more(self, index: int, step: Step) -> list[Event]:
        raise NotImplementedError

    def last(self, index: int, end: End) -> list[Event]:
        raise NotImplementedError

    def idle(self, index: int) -> Event:
        """Return an event that changes nothing, as a heartbeat."""
        raise NotImplementedError

    def framed(self, events: Sequence[Event]) -> bytes:
        """Encode events as server-sent events."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        raise NotImplementedError

    def done(self) -> bytes:
        """Return the end of a stream."""
        return b""

    async def whole(self) -> Mapping[str, Any]:
        raise NotImplementedError

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the stream of the opened answers, the events of a step together."""
        async with aclosing(self.steps()) as steps:
            async for events in steps:
                yield self.framed(events)
        if done := self.done():
            yield done

    def waiting(self) -> bytes:
        index = next(i for i in count() if i not in self._ended)
        return self.framed(self._begin(index) or [self.idle(index)])

    async def steps(self) -> AsyncGenerator[list[Event]]:
        """Yield the events of each step of the opened answers."""
        async with aclosing(written(self.answers)) as steps:
            async for index, item in steps:
                begun = self._begin(index)
                if isinstance(item, End):
                    self._ended.add(index)
                    yield [*begun, *self.last(index, item)]
                else:
                    yield [*begun, *self.more(index, item)]

    def _begin(self, index: int) -> list[Event]:
        """Return the first events, unless they were sent before."""
        if index in self._begun or (found := self.first(index)) is None:
            return []
        self._begun.add(index)
        return found

    async def open(self) -> list[Answer]:
        """Start the completions of a conversation. Raises ApiError and the errors of the port."""
        from outrider.plugins.tools.reading import read_with

        params, tooling, (form, name) = self.params(), self.tooling(), self.form()
        chat = self.chat(tooling)
        ids, notes = await self.site.port.encode_chat(chat)
        structure = structure_asked(self.body, form, name=name)
        paths = schema_paths(getattr(self.body, "tools", None))
        params, structure, make_parser, warnings = await read_with(
            self.site, ids, tooling, params, structure, paths
        )
        template = self.site.port.card.chat_template
        known = switched(template, chat.variables)[0]
        unknown = (name for name in known if name not in template)
        few = islice(unknown, MOST_WARNINGS)
        self.warnings += [f"{shown(name)}: the chat template has no such variable" for name in few]
        self.warnings += [*chat.notes, *notes, *warnings]
        return self.complete(ids, params, structure, make_parser)

    def complete(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        structure: StructureOptions,
        make_parser: Callable[[], OutputParser] = PlainParser,
        *,
        only_prompt: bool = False,
    ) -> list[Answer]:
        """Submit the completions of a prompt, all or none. With `only_prompt`, the one token that
        the engine writes is dropped. Raises PromptTooLongError, and like the port."""
        site, num_samples = self.site, params.n
        card, admission = site.port.card, site.traffic.admission
        if len(ids) >= card.window:
            raise PromptTooLongError(len(ids), card.window)
        salt = salt_of(site, self.key, params.cache_salt)
        params = replace(params.seeded(), n=1)
        if not params.is_open:
            # Clients of HTTP may send a constant that is larger than what fits, and expect no note.
            params = replace(params, max_tokens=min(params.max_tokens, card.window - len(ids)))
        found: list[Answer] = []
        admission.widen(num_samples)
        try:
            for sample in range(num_samples):
                if sample == 1:
                    # All have the same prompt; only the first completion scores it.
                    params = replace(params, prompt_logprobs=None)
                request = EngineRequest(
                    prompt_ids=ids,
                    params=params,
                    structure=structure,
                    sample=sample,
                    cache_salt=salt,
                    key=self.key,
                    weight=admission.weight(self.key),
                )
                found.append(Answer(self, request, make_parser(), only_prompt=only_prompt))
        except BaseException:
            cancel(found)
            raise
        return found

    def extras(self, ends: Sequence[End]) -> dict[str, Any]:
        """Return the fields of an answer that the original APIs do not have."""
        found: dict[str, Any] = {"metrics": metrics_of(ends)}
        if ends[0].seed is not None:
            found["seed"] = ends[0].seed
        notes = [note for end in ends for note in end.notes]
        warnings = list(dict.fromkeys([*self.warnings, *notes]))
        return found | ({"warnings": warnings} if warnings else {})


def salt_of(site: Site, key: str, given: str) -> str:
    """Return the salt of the prefix cache: the key, and a digest of the request's own salt."""
    own = "" if site.shares_prefixes else key.removeprefix(BATCH)
    return f"{own}\n{sha256(given.encode()).hexdigest()}" if given else own


class Answer(AsyncIterator[Step]):
    """One completion while it is written. A caller that stops reading early must `cancel` it."""

    def __init__(
        self,
        exchange: Exchange[Any],
        request: EngineRequest,
        parser: OutputParser,
        *,
        only_prompt: bool,
    ) -> None:
        site = exchange.site
        self.request, self.model = request, site.names[0]
        self._exchange, self._parser, self._only_prompt = exchange, parser, only_prompt
        self._card, self._decoder = site.port.card, site.port.decoder
        self._has_rounds = traced(exchange.body)
        self._stream: EngineStream = site.port.stream(request)
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
            api=self._exchange.api,
            engine=self.engine or 0,
            usage=self._end.usage,
            request_id=self._exchange.request_id,
            trace_parent=self._exchange.trace_parent,
        )
        for observer in self._exchange.site.observers:
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
        if self._only_prompt:
            return Step((), 0)
        self._num_tokens += len(event.token_ids)
        for observer in self._exchange.site.observers:
            observer.wrote(len(event.token_ids), model=self.model, engine=self.engine or 0)
        parts = self._parser.feed(event.text) if event.text else []
        self._take(parts)
        rounds: tuple[dict[str, Any], ...] = ()
        if self._has_rounds:
            pieces = iter(event.pieces)
            rounds = tuple(round_of(one, pieces, self._decoder) for one in event.round_events)
        return Step(tuple(parts), self._num_tokens, event.logprobs, rounds)

    def _take(self, parts: Sequence[Part]) -> None:
        self._calls += [part for part in parts if isinstance(part, ToolClose)]

    def _ended(self, result: GenerationResult) -> End:
        reason = cast("EndReason", result.finish_reason or "stop")
        if self._only_prompt:
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
                completion_tokens=0 if self._only_prompt else result.num_tokens,
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
    members = members_together(one["members"] for one in found if "members" in one)
    if members:
        together["members"] = members
    return {"speculative_decoding": together}


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


async def received(kind: type[E], request: Request, site: Site) -> E:
    """Read a request. Raises ApiError."""
    body, warnings = await read(kind.kind, request, site)
    asked = site.of(body.model)
    kind.refuse(body)
    warnings += ignored_fields(body)
    return kind(kept(asked, body, warnings), body, request, warnings)


def api_route(path: str, kind: type[Exchange[Any]], site: Site) -> Route:
    """Return the route POST `path`."""

    async def answer(request: Request) -> Response:
        exchange = await received(kind, request, site)

        async def opened() -> None:
            # Middleware, such as plugins/spans.py, reads the answers from the scope.
            answers = exchange.answers = await exchange.open()
            request.scope["outrider.answers"] = answers
            # A function, as the engine may not be known before the answer begins.
            request.scope["outrider.engine"] = lambda: answers[0].engine

        async def whole() -> Response:
            await opened()
            return json_response(await exchange.whole())

        async def stream() -> AsyncGenerator[bytes]:
            await opened()
            return exchange.pieces()

        if exchange.body.stream:
            return EventReply(exchange.site, request, stream, exchange)
        return Reply(exchange.site, request, whole)

    return Route(path, answer, methods=["POST"])
