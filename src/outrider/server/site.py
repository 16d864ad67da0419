"""State that all routes share: models and their engines, limits, and the requests in flight.

A part of the server is a function that takes a `Site` and returns routes; `app.py` combines them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct
from starlette.requests import Request

from outrider.api.result import GenerationResult
from outrider.core.errors import ConfigError
from outrider.core.fields import default_of
from outrider.core.params import ADVISED, SamplingParams
from outrider.core.plugins import KINDS
from outrider.server.admission import Admission, Bodies
from outrider.server.errors import ApiError
from outrider.server.events import Usage
from outrider.server.port import EnginePort, EngineRequest

# Completions that one request may ask for.
MOST_PROMPTS = 128
Api: TypeAlias = Literal["chat", "completions", "responses", "messages", "other"]


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
