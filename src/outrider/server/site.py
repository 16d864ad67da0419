"""State that all routes share: models and their engines, limits, and the requests in flight, whose
number is limited and shared fairly among API keys.

A part of the server is a function that takes a `Site` and returns routes; `app.py` combines them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct
from starlette.requests import Request

from outrider.api.result import GenerationResult
from outrider.core.draft import TokenLogprobs
from outrider.core.errors import ConfigError
from outrider.core.fields import default_of
from outrider.core.params import ADVISED, SamplingParams
from outrider.core.plugins import KINDS
from outrider.core.process import give_back
from outrider.server.errors import ASK_AGAIN, ApiError, overloaded
from outrider.server.parts import Part
from outrider.server.port import EnginePort, EngineRequest

# Completions that one request may ask for.
MOST_PROMPTS = 128
Api: TypeAlias = Literal["chat", "completions", "responses", "messages", "other"]


EndReason: TypeAlias = Literal["stop", "length", "tool_calls", "timeout"]


class Step(Struct, frozen=True):
    """The parts that a round added. `num_tokens` counts the answer's tokens so far. If requested,
    `logprobs` has an entry per token, `rounds` an entry per round (docs/rounds.md)."""

    parts: tuple[Part, ...]
    num_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    rounds: tuple[dict[str, Any], ...] = ()


class Usage(Struct, frozen=True):
    """Tokens of a request. `cached_tokens` of the prompt were in the prefix cache.
    `reasoning_tokens` is None for a model that does not reason; `budget_reached` says whether the
    thinking budget, if there was one, ended the reasoning."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    reasoning_tokens: int | None = None
    budget_reached: bool | None = None


class End(Struct, frozen=True):
    """The end of an answer without an error. `metrics` are those of speculation, under vLLM's
    names; None without drafts. `stop` is the stop string that ended the text, if any."""

    reason: EndReason
    usage: Usage
    seed: int | None = None
    stop: str | None = None
    metrics: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


class Ended(Struct, frozen=True, kw_only=True):
    """A completion that ended, with or without an error. `model` is the first of its model's
    names, and `request_id` is that of the header `x-request-id`."""

    result: GenerationResult
    request: EngineRequest
    model: str
    api: Api
    engine: int = 0
    usage: Usage | None = None
    request_id: str = ""
    trace_parent: str = ""


class Observer(Protocol):
    """An observer of requests. Its methods are called in the event loop's thread."""

    def wrote(self, num_tokens: int, *, model: str, engine: int) -> None:
        """A step of a request has written tokens; `engine` is the number of the model's engine."""
        ...

    def observe(self, ended: Ended) -> None: ...

    def observe_refusal(self, status: int, api: Api) -> None:
        """The server has answered with a status of 400 or more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for clients. The times limit how long a slow client can hold resources."""

    body_bytes: int = 4 << 20
    header_bytes: int = 16 << 10
    body_seconds: float = 15.0
    write_seconds: float = 30.0
    begin_seconds: float = 2.0
    """Seconds after which a stream begins if the engine has not refused the request."""
    ping_seconds: float = 15.0
    drain_seconds: float = 30.0
    file_bytes: int = 0
    """Maximum size of an uploaded file; 0 if the server takes no files."""
    most_running: int = 1_000
    """Maximum number of completions in flight, those that wait included."""
    most_of_a_key: int = 256

    @property
    def most_completions(self) -> int:
        """Upper bound of completions in flight: the last request that is admitted may have many."""
        return 2 * self.most_running + MOST_PROMPTS


# Admission control. Requests beyond the limits are refused with status 429 or 503.
#
# A request takes a slot for each of its completions, and one slot before they start. A server with
# a free slot admits any request, however many completions it has: an idle server never refuses what
# its own limits allow. A full server still admits requests of keys that have less than their share
# of the slots, so that one key alone cannot shut out the others. It never admits more than twice
# the number of slots.
@dataclass(slots=True)
class Slot:
    """The slots that one request holds, and its limits."""

    key: str
    most: int
    most_of_a_key: int
    num_completions: int = 0


# Seconds after the last body until its memory is returned to the system, which takes milliseconds.
_FREED_SECONDS = 1.0
# Requests of a batch have this prefix before their key, and this fraction of the key's weight.
BATCH, BATCH_WEIGHT = "batch/", 1 / 64
# The slot of the request that the current task answers.
_SLOT: ContextVar[Slot | None] = ContextVar("outrider_slot", default=None)


@dataclass(slots=True, kw_only=True)
class Admission:
    """Slots of all keys. Keys without an entry in `weights` have weight 1."""

    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    taken: Counter[str] = field(default_factory=Counter[str])
    """Number of slots by key; a key without a slot has no entry."""

    def weight(self, key: str) -> float:
        own = self.weights.get(key.removeprefix(BATCH), 1.0)
        return own * BATCH_WEIGHT if key.startswith(BATCH) else own

    @contextmanager
    def slot(
        self, key: str, most: int, most_of_a_key: int, *, is_in: bool = False
    ) -> Generator[None]:
        """Hold a slot for one request, of `most` in all and `most_of_a_key` for one key. Raises
        ApiError if none is free. A request that `is_in` was just admitted, and is not checked
        again."""
        slot = Slot(key, most, most_of_a_key)
        if not is_in:
            self._check(slot)
        self.taken[key] += 1
        before = _SLOT.set(slot)
        try:
            yield
        finally:
            _SLOT.reset(before)
            self.taken[key] -= max(1, slot.num_completions)
            if not self.taken[key]:
                del self.taken[key]

    def widen(self, num_completions: int) -> None:
        """Take slots for `num_completions` more completions of the current request. Raises
        ApiError if other requests have taken the slots in the meantime."""
        slot = _SLOT.get()
        if slot is None:
            return
        held = max(1, slot.num_completions)
        more = slot.num_completions + num_completions - held
        if more:
            self._check(slot, held)
        slot.num_completions += num_completions
        self.taken[slot.key] += more

    def _check(self, slot: Slot, held: int = 0) -> None:
        """Check that a slot is free, besides the request's own `held` ones. Raises ApiError."""
        key, most = slot.key, slot.most
        mine, total = self.taken[key] - held, self.taken.total() - held
        if mine >= slot.most_of_a_key:
            raise _too_many(f"{mine} completions of this key are in flight.")
        if total < most:
            return
        others = sum(map(self.weight, self.taken.keys() - {key}))
        share = most * self.weight(key) / (others + self.weight(key))
        if mine > share and others:
            raise _too_many(f"the server is full, and this key has {mine} of its completions.")
        if mine >= share or total >= 2 * most:
            raise overloaded(f"{total} completions are in flight. Ask again later.")


@dataclass(slots=True)
class Bodies:
    """Memory for bodies being read: `most` bytes in all, at most half of them for one key."""

    most: int = 64 << 20
    taken: Counter[str] = field(default_factory=Counter[str])
    """Bytes by key."""
    _waiting: dict[asyncio.Future[None], tuple[str, int]] = field(
        default_factory=dict[asyncio.Future[None], tuple[str, int]]
    )
    _num_freed: int = 0

    @asynccontextmanager
    async def hold(self, key: str, num_bytes: int, seconds: float) -> AsyncGenerator[None]:
        """Hold memory for a body. Raises ApiError if none is free within `seconds`."""
        if self._fits(key, num_bytes):
            self.taken[key] += num_bytes
        else:
            await self._turn(key, num_bytes, seconds)
        try:
            yield
        finally:
            self._release(key, num_bytes)

    def _fits(self, key: str, num_bytes: int) -> bool:
        most_of_key = self.most // 2 if key else self.most
        if self.taken[key] + num_bytes > most_of_key:
            return False
        return self.taken.total() + num_bytes <= self.most

    async def _turn(self, key: str, num_bytes: int, seconds: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = key, num_bytes
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException as error:
            if self._waiting.pop(turn, None) is None:
                self._release(key, num_bytes)
            if not isinstance(error, TimeoutError):
                raise
            words = "bodies of other requests have the memory for them. Ask again later."
            raise overloaded(words) from None

    def _release(self, key: str, num_bytes: int) -> None:
        self.taken[key] -= num_bytes
        if not self.taken[key]:
            del self.taken[key]
        for turn, (other, num) in list(self._waiting.items()):
            if not turn.done() and self._fits(other, num):
                del self._waiting[turn]
                self.taken[other] += num
                turn.set_result(None)
        self._num_freed += num_bytes
        if not self.taken and self._num_freed >= self.most // 2:
            self._num_freed = 0
            loop = asyncio.get_running_loop()
            loop.call_later(_FREED_SECONDS, loop.run_in_executor, None, give_back)


def _too_many(problem: str) -> ApiError:
    return ApiError(
        429, f"{problem} Wait for one to end.", code="rate_limit_exceeded", retry_after=ASK_AGAIN
    )


@dataclass(slots=True)
class Traffic:
    """Requests of all models of one server together."""

    ending: bool = False
    """True while the server shuts down: new requests are refused."""
    hurried: bool = False
    """True if the shutdown does not wait for running requests either."""
    admission: Admission = field(default_factory=Admission)
    bodies: Bodies = field(default_factory=Bodies)
    num_alarms: int = 0
    """Number of audits that found a different text."""

    @property
    def num_running(self) -> int:
        return self.admission.taken.total()


@dataclass(slots=True, kw_only=True)
class Site:
    """A model of a server, with the state that all models share. `defaults` are sampling parameters
    that the server's owner chose, by name. `names` are the names of the model."""

    port: EnginePort
    names: tuple[str, ...]
    asked_as: str = ""
    others: tuple[Site, ...] = ()
    """The server's other models. Requests without a model name use this one."""
    held: Callable[..., AbstractAsyncContextManager[object]] = nullcontext
    """Context that waits for the model to be loaded and keeps it loaded (models.py). Its optional
    argument is the number of seconds for which the model stays loaded afterwards."""
    would_load: Callable[[], bool] = lambda: False
    """Returns whether the next request would load the model if it is not loaded."""
    limits: Limits = field(default_factory=Limits)
    defaults: dict[str, object] = field(default_factory=dict[str, object])
    observers: list[Observer] = field(default_factory=list[Observer])
    started: float = field(default_factory=time.time)
    shares_prefixes: bool = False
    """Whether requests of all keys share the prefix cache. The time to the first token then
    reveals whether another key has used the same prompt."""
    keeps_apart: bool = False
    """Whether there are several keys whose requests must not influence each other."""
    traffic: Traffic = field(default_factory=Traffic)

    def of(self, asked: str | None) -> Site:
        """Return the site of the requested model. Raises ApiError for an unknown one."""
        if not asked:
            return self
        for one in self.all:
            if asked in one.names:
                return replace(one, asked_as=asked)
        raise ApiError(
            404,
            f"the model {asked[:100]!r} is not here. Ask for {self.names[0]!r}, or GET /v1/models.",
            param="model",
            code="model_not_found",
        )

    @property
    def name(self) -> str:
        """The model's name in answers; metrics use the first of its names."""
        return self.asked_as or self.names[0]

    @property
    def would_answer(self) -> bool:
        """True if a request would be answered now, perhaps after the model is loaded again."""
        state = self.port.status.state
        return state == "ready" or (state in ("unloaded", "loading") and self.would_load())

    @property
    def all(self) -> tuple[Site, ...]:
        """The sites of all models."""
        return (self, *self.others)

    @contextmanager
    def slot(self, key: str, *, is_in: bool = False) -> Generator[None]:
        """Hold a slot among the requests in flight. A request that `is_in` was admitted a moment
        ago and is not checked again. Raises ApiError if no slot is free."""
        limits, traffic = self.limits, self.traffic
        if traffic.ending and not is_in:
            raise ApiError(503, "the server is ending.", code="ending", retry_after=5)
        with traffic.admission.slot(key, limits.most_running, limits.most_of_a_key, is_in=is_in):
            yield

    def body(self, key: str, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """Hold memory for a body while it is read. Raises ApiError if none is free."""
        return self.traffic.bodies.hold(key, num_bytes, self.limits.body_seconds)

    def default(self, name: str) -> object:
        """Return the default of a sampling parameter: the owner's choice, else the checkpoint's
        recommendation, else the default of OpenAI's API, whose temperature is 1."""
        if name in self.defaults:
            return self.defaults[name]
        return self.port.card.sampling.get(name, _USUAL[name])

    @property
    def sampling(self) -> dict[str, object]:
        """The sampling parameters for which the owner or the checkpoint chose a default."""
        advised = self.port.card.sampling
        chosen = [name for name in ADVISED if name in self.defaults or name in advised]
        return {name: self.default(name) for name in chosen}


_USUAL = {item.name: default_of(item) for item in fields(SamplingParams)} | {"temperature": 1.0}


def key_of(request: Request) -> str:
    """Return the name of the request's API key; empty if the server has no keys."""
    return request.scope.get("outrider.key", "")


def request_id_of(request: Request) -> str:
    return request.scope.get("outrider.request_id", "")


def learns_of_all(drafter: str) -> bool:
    """Return whether a drafter learns from all requests, as those of other packages may."""
    return drafter not in KINDS or not KINDS[drafter].keeps_apart


def check_apart(site: Site, drafter: str) -> None:
    """Check that the engine's drafter keeps several keys apart. Raises ConfigError if it learns
    from the texts of all requests: its drafts could reveal one key's text to another."""
    if site.keeps_apart and learns_of_all(drafter):
        raise ConfigError(
            f"several keys, and the drafter {drafter} drafts for each from what all said.",
            hint="--drafter ngram keeps to each text; --shared-prefixes lets keys share",
        )
