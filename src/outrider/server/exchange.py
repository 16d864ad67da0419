"""One request of any API, from its body to its answer: the code that all APIs share.

An API is an `api_route`: the type of its bodies, a function that refuses bodies, and the `Writer`
of an exchange, which knows this API's format of prompts and answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.api.chat_template import switched
from outrider.api.structure import KEYS, StructureOptions, structure_of
from outrider.core.fields import WHOLE, shown
from outrider.core.params import SamplingParams
from outrider.server.answers import Answer, Ask, metrics_of, open_answers, written
from outrider.server.errors import ApiError, refused
from outrider.server.events import End, OutputParser, PlainParser, Step
from outrider.server.models import keep_alive_of
from outrider.server.port import ChatPrompt, EngineCard
from outrider.server.reply import EventReply, Reply, Waiting
from outrider.server.site import Api, Site, key_of, learns_of_all, request_id_of
from outrider.server.tools import Tooling, read_with, schema_paths
from outrider.server.wire import MOST_WARNINGS, encode, json_response, read

# Request parameters that all OpenAI-style APIs share, and their translation to SamplingParams.
#
# A parameter that this server cannot honour is refused by name.
# Fields of SamplingParams that have the same name and meaning in a request body.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "n", "max_time"),
    *("skip_special_tokens", "cache_salt"),
)


# Parameters of other servers that would change the text; ignoring them would be wrong.
_UNKNOWN = {
    "stop_token_ids": "this server stops at strings only. Send them as stop.",
    "include_stop_str_in_output": "texts never include the stop string. Append it yourself.",
    "truncate_prompt_tokens": "prompts are never truncated. Shorten it yourself.",
}


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculative(Struct, frozen=True, forbid_unknown_fields=True):
    """A request's own speculation settings. Omitted ones are those of the server."""

    drafter: str | None = None
    k: int | None = None
    tree: int | None = None
    trace: bool = False
    sampler: str | None = None


class Asked(Struct, frozen=True, kw_only=True):
    """Parameters of all APIs. None is the same as leaving a parameter out. Those in `IGNORED` are
    accepted without effect, each with the reason, which the answer's warnings report."""

    IGNORED: ClassVar[Mapping[str, str]] = {"store": "this server stores no answers"}

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    max_time: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: bool | Speculative | None = None
    best_of: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    cache_salt: str | None = None
    keep_alive: str | float | None = None
    thinking_budget: int | None = None
    thinking_budget_tokens: int | None = None
    thinking_token_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = None
    truncate_prompt_tokens: Any = None
    # Parameters of other servers' services: accepted, and without meaning here.
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    chat_template: str | UnsetType | None = UNSET


def params_of(
    site: Site,
    asked: Asked,
    *,
    max_tokens: int | None,
    thinking: tuple[str, object] = ("", None),
    **more: object,
) -> SamplingParams:
    """Return the SamplingParams of a request. `thinking` is the API's own parameter for a thinking
    budget, with its value. Raises ApiError, and ConfigError for values out of bounds."""
    _refuse(asked)
    asked = _as_openai(asked)
    card = site.port.card
    values: dict[str, Any] = {}
    for name in _SAME:
        given = getattr(asked, name)
        values[name] = site.default(name) if given is None else given
    values["max_tokens"] = _limit(site, max_tokens)
    values["thinking_budget"] = _budget(site, asked, thinking)
    if asked.min_tokens is None:
        values["min_tokens"] = min(values["min_tokens"], values["max_tokens"])
    stop = asked.stop if asked.stop is not None else site.default("stop")
    values["stop"] = stop if isinstance(stop, str) else tuple(cast("list[str]", stop))
    values["bad_words"] = tuple(asked.bad_words or cast("list[str]", site.default("bad_words")))
    if asked.logit_bias:
        values["logit_bias"] = {_token_id(key): bias for key, bias in asked.logit_bias.items()}
    values.update(_speculation(card, asked.speculative, keeps_apart=site.keeps_apart))
    values.update(more)
    params = SamplingParams(**values)
    if asked.seed is None or params.greedy or params.sampler is not None or not card.exact:
        return params
    # The client chose a seed, so it expects the same text from any drafter.
    return replace(params, sampler="coupled")


def _as_openai(asked: Asked) -> Asked:
    """Translate conventions of other servers: in vLLM a top_k of -1 keeps all tokens; in
    llama-server a seed of -1 means a random seed, and other negative seeds are valid."""
    changed: dict[str, int | None] = {}
    if asked.top_k == -1:
        changed["top_k"] = 0
    if asked.seed is not None and asked.seed < 0:
        changed["seed"] = None if asked.seed == -1 else asked.seed % 2**63
    return msgspec.structs.replace(asked, **changed) if changed else asked


def _limit(site: Site, given: int | None) -> int:
    """Return max_tokens; WHOLE means the rest of the context window. Raises ApiError."""
    if given is None:
        return cast("int", site.defaults.get("max_tokens", WHOLE))
    if given < 1:
        raise ApiError(
            400, f"max_tokens: at least 1, got {given}.", param="max_tokens", code="invalid_value"
        )
    return given


# Names of the thinking budget in llama-server, vLLM and others.
_BUDGETS = ("thinking_budget_tokens", "thinking_token_budget", "reasoning_budget_tokens")


def _budget(site: Site, asked: Asked, own: tuple[str, object]) -> object:
    """Return the maximum number of thought tokens; None means no limit. Raises ApiError."""
    named = (own, *((name, getattr(asked, name)) for name in (*_BUDGETS, "thinking_budget")))
    for name, given in named:
        if given is None:
            continue
        if isinstance(given, bool) or not isinstance(given, int) or not -1 <= given <= WHOLE:
            words = f"{name}: a number of tokens from 0 to {WHOLE}, or -1 for no limit"
            text = f"{words}; got {shown(given)}. Send such a number, or leave it out."
            raise ApiError(400, text, param=name, code="invalid_value")
        return None if given == -1 else given
    return site.default("thinking_budget")


def _token_id(key: str) -> int:
    if key.isascii() and key.isdecimal() and len(key) < 10:
        return int(key)
    raise ApiError(
        400, f"logit_bias: {key[:40]!r} is no token id.", param="logit_bias", code="invalid_value"
    )


def _refuse(asked: Asked) -> None:
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise refused("best_of", "all completions are returned. Send n, and choose yourself.")
    if asked.chat_template is not UNSET and asked.chat_template is not None:
        raise refused(
            "chat_template", "only the model's own template is used. Leave it out, or use prompts."
        )
    for name, why in _UNKNOWN.items():
        if getattr(asked, name):
            raise refused(name, why)
    if asked.cache_salt == "":
        raise refused("cache_salt", "it must not be empty. Leave it out to share the prefix cache.")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(
            400,
            "stream_options: only allowed with stream.",
            param="stream_options",
            code="invalid_value",
        )


def structure_asked(
    asked: Asked, response_format: Mapping[str, Any] | None = None, *, name: str = "response_format"
) -> StructureOptions:
    """Return the requested structure; empty if the text is free. `response_format` is for an API
    that has the format in another field, called `name`."""
    body = {name: getattr(asked, name) for name in KEYS}
    if response_format is not None:
        body["response_format"] = response_format
    return structure_of(body, format_name=name)


def ignored_fields(asked: Asked) -> list[str]:
    """Return a warning for each parameter of the request that has no effect."""
    why = asked.IGNORED
    return [f"{name}: {why[name]}" for name in why if getattr(asked, name) not in (None, False)]


def kept(site: Site, asked: Asked, warnings: list[str]) -> Site:
    """Return `site` with the request's `keep_alive` for its model. Raises ConfigError."""
    if asked.keep_alive is None:
        return site
    seconds = keep_alive_of(asked.keep_alive)
    if site.held is not nullcontext and not site.keeps_apart:
        return replace(site, held=partial(site.held, seconds))
    warnings.append("keep_alive: ignored; the server's --keep-alive applies to all requests")
    return site


def traced(asked: Asked) -> bool:
    """Return whether the client requested the rounds of its completions."""
    return isinstance(asked.speculative, Speculative) and asked.speculative.trace


def _speculation(
    card: EngineCard, given: bool | Speculative | None, *, keeps_apart: bool
) -> Mapping[str, object]:
    """Return the speculation as fields of SamplingParams. Raises ApiError if unsupported."""
    if not isinstance(given, Speculative):
        return {} if given is None else {"speculative": given}
    if given.drafter is not None and given.drafter not in card.drafters:
        known = ", ".join(card.drafters)
        raise refused("speculative.drafter", f"this server has {known}.")
    if keeps_apart and given.drafter and learns_of_all(given.drafter):
        why = "it learns from requests of other keys. The server's --shared-prefixes allows it."
        raise refused("speculative.drafter", why)
    if given.tree is not None:
        raise refused(
            "speculative.tree", "it is a setting of the engine, for all requests. Leave it out."
        )
    return {
        "drafter": given.drafter,
        "k": given.k,
        "sampler": given.sampler,
        "round_events": given.trace,
    }


B = TypeVar("B", bound=Asked)


@dataclass(slots=True, kw_only=True)
class Exchange(Generic[B]):
    """A parsed body, and the name of its API `key`. `warnings` report ignored fields."""

    site: Site
    body: B
    key: str
    request_id: str
    trace_parent: str
    api: Api
    warnings: list[str]

    async def converse(
        self,
        chat: ChatPrompt,
        tooling: Tooling,
        params: SamplingParams,
        form: Mapping[str, Any] | None = None,
        form_name: str = "response_format",
    ) -> list[Answer]:
        """Start completions of a conversation. `form` is the required format of the answer, if the
        API has its own parameter for it; `form_name` is that parameter's name."""
        ids, notes = await self.site.port.encode_chat(chat)
        structure = structure_asked(self.body, form, name=form_name)
        paths = schema_paths(getattr(self.body, "tools", None))
        reading = await read_with(self.site, ids, tooling, params, structure, paths)
        template = self.site.port.card.chat_template
        known = switched(template, chat.variables)[0]
        unknown = (name for name in known if name not in template)
        few = islice(unknown, MOST_WARNINGS)
        self.warnings += [f"{shown(name)}: the chat template has no such variable" for name in few]
        self.warnings += [*chat.notes, *notes, *reading.warnings]
        return self.complete(ids, reading.params, reading.structure, reading.make_parser)

    def complete(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        structure: StructureOptions,
        make_parser: Callable[[], OutputParser] = PlainParser,
        *,
        only_prompt: bool = False,
    ) -> list[Answer]:
        """Start completions of a prompt."""
        ask = Ask(
            prompt_ids=ids,
            params=params,
            structure=structure,
            make_parser=make_parser,
            trace=traced(self.body),
            key=self.key,
            request_id=self.request_id,
            trace_parent=self.trace_parent,
            api=self.api,
            only_prompt=only_prompt,
        )
        return open_answers(self.site, ask)

    def extras(self, ends: Sequence[End]) -> dict[str, Any]:
        """Return the fields of an answer that the original APIs do not have."""
        found: dict[str, Any] = {"metrics": metrics_of(ends)}
        if ends[0].seed is not None:
            found["seed"] = ends[0].seed
        notes = [note for end in ends for note in end.notes]
        warnings = list(dict.fromkeys([*self.warnings, *notes]))
        return found | ({"warnings": warnings} if warnings else {})


class Writer(Waiting, Protocol):
    """Writes the answer of one exchange."""

    async def open(self) -> list[Answer]:
        """Submit the request. Raises ApiError and the errors of the port."""
        ...

    async def whole(self, answers: Sequence[Answer]) -> Mapping[str, Any]: ...

    def pieces(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]: ...


def api_route(
    path: str,
    kind: type[B],
    check: Callable[[B], None],
    writer_of: Callable[[Exchange[B]], Writer],
    *,
    site: Site,
    api: Api,
) -> Route:
    """Return the route POST `path`."""

    async def answer(request: Request) -> Response:
        body, warnings = await read(kind, request, site)
        asked = site.of(body.model)
        check(body)
        warnings += ignored_fields(body)
        asked = kept(asked, body, warnings)
        writer = writer_of(
            Exchange(
                site=asked,
                body=body,
                key=key_of(request),
                request_id=request_id_of(request),
                trace_parent=request.headers.get("traceparent", ""),
                api=api,
                warnings=warnings,
            )
        )

        async def opened() -> list[Answer]:
            # Middleware, such as spans.py, reads the answers from the scope.
            answers = request.scope["outrider.answers"] = await writer.open()
            # A function, as the engine may not be known before the answer begins.
            request.scope["outrider.engine"] = lambda: answers[0].engine
            return answers

        async def whole() -> Response:
            return json_response(await writer.whole(await opened()))

        async def stream() -> AsyncGenerator[bytes]:
            return writer.pieces(await opened())

        if body.stream:
            return EventReply(asked, request, stream, writer)
        return Reply(asked, request, whole)

    return Route(path, answer, methods=["POST"])


Event: TypeAlias = dict[str, Any]


class Events(Protocol):
    """The events of one answer. `record` is the object so far."""

    record: dict[str, Any]

    def begin(self, num_prompt: int) -> list[Event]: ...

    def take(self, step: Step) -> list[Event]: ...

    def end(self, end: End, extras: Mapping[str, Any]) -> list[Event]:
        """The last events. `extras` are fields that the original API does not have."""
        ...

    def wait(self) -> Event:
        """An event that changes nothing, as a heartbeat."""
        ...

    def fail(self, error: ApiError) -> list[Event]:
        """The events of an error that occurs after the first event."""
        ...


class EventedWriter:
    """Writes `events` of the one answer that `ask` opens."""

    def __init__(
        self, exchange: Exchange[Any], events: Events, ask: Callable[[], Awaitable[list[Answer]]]
    ) -> None:
        self._exchange, self._events, self._ask = exchange, events, ask
        self._num_prompt, self._has_begun = 0, False

    async def open(self) -> list[Answer]:
        return await self._ask()

    async def whole(self, answers: Sequence[Answer]) -> Mapping[str, Any]:
        async with aclosing(self._steps(answers)) as steps:
            async for _ in steps:
                pass
        return self._events.record

    async def pieces(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]:
        async with aclosing(self._steps(answers)) as steps:
            async for events in steps:
                yield framed(events)

    async def _steps(self, answers: Sequence[Answer]) -> AsyncGenerator[list[Event]]:
        """Yield the events of each step; the first ones include the beginning of the answer."""
        self._num_prompt = len(answers[0].request.prompt_ids)
        async with aclosing(written(answers)) as steps:
            async for _, item in steps:
                begun = self._begin()
                if isinstance(item, Step):
                    events = self._events.take(item)
                else:
                    events = self._events.end(item, self._exchange.extras([item]))
                yield [*begun, *events]

    def waiting(self) -> bytes:
        return framed(self._begin() or [self._events.wait()])

    def failure(self, error: ApiError) -> bytes:
        return framed(self._events.fail(error))

    def _begin(self) -> list[Event]:
        """Return the first events, unless they were sent before."""
        if self._has_begun:
            return []
        self._has_begun = True
        return self._events.begin(self._num_prompt)


def framed(events: Sequence[Event]) -> bytes:
    """Encode events as server-sent events, each with its type in the `event` field."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"
        for event in events
    )
