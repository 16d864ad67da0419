"""What all routes share: models and their engines, limits, and whether the server is ending.

A part of the server is a function from a `Site` to its routes; `app.py` puts them together.
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
from outrider.core.drafter_kinds import KINDS
from outrider.core.errors import ConfigError
from outrider.core.fields import default_of
from outrider.core.params import ADVISED, SamplingParams
from outrider.server.errors import ApiError
from outrider.server.events import Usage
from outrider.server.places import Bodies, Places
from outrider.server.port import EnginePort, EngineRequest

# Drafters that draft from what any request said or wrote.
LEARNS_OF_ALL = ("suffix", "recycling", "lookup", "portfolio")
# Completions that one request may ask for.
MOST_PROMPTS = 128
Api: TypeAlias = Literal["chat", "completions", "responses", "messages", "other"]


class Ended(Struct, frozen=True, kw_only=True):
    """A completion that ended, well or not. `model` is the first of its model's names, and
    `request_id` what the client was told in `x-request-id`."""

    result: GenerationResult
    request: EngineRequest
    model: str
    api: Api
    engine: int = 0
    usage: Usage | None = None
    request_id: str = ""
    trace_parent: str = ""


class Observer(Protocol):
    """Counts what happens. All is told in the event loop's thread."""

    def wrote(self, num_tokens: int, *, model: str, engine: int) -> None:
        """Tokens that a step of some request brought, of the model's engine of this number."""
        ...

    def observe(self, ended: Ended) -> None: ...

    def observe_refusal(self, status: int, api: Api) -> None:
        """An answer of status 400 or more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of what clients may take. Seconds bound what a slow one can hold."""

    body_bytes: int = 4 << 20
    header_bytes: int = 16 << 10
    body_seconds: float = 15.0
    write_seconds: float = 30.0
    begin_seconds: float = 2.0
    """How long an engine may take to refuse a request before the stream of it begins."""
    ping_seconds: float = 15.0
    drain_seconds: float = 30.0
    file_bytes: int = 0
    """Of a file that a client sends; 0 where the server takes none."""
    most_running: int = 1_000
    """Completions in flight at once, those that wait included, before a request is refused."""
    most_of_a_key: int = 256

    @property
    def most_completions(self) -> int:
        """That are ever in flight: the last request that finds a place may have many."""
        return 2 * self.most_running + MOST_PROMPTS


@dataclass(slots=True)
class Traffic:
    """Of all models of one server together."""

    ending: bool = False
    """Whether new requests are refused, because those that run are the last ones."""
    hurried: bool = False
    """Whether those are not waited for either."""
    places: Places = field(default_factory=Places)
    bodies: Bodies = field(default_factory=Bodies)
    num_alarms: int = 0
    """Audits that found another text."""

    @property
    def num_running(self) -> int:
        return self.places.taken.total()


@dataclass(slots=True, kw_only=True)
class Site:
    """A server as one of its models sees it. `defaults` are sampling parameters that its owner
    chose, by name; `names` are what its model is called, the first one in answers."""

    port: EnginePort
    names: tuple[str, ...]
    asked_as: str = ""
    others: tuple[Site, ...] = ()
    """The server's further models; one that is asked for without a name is the first."""
    held: Callable[..., AbstractAsyncContextManager[object]] = nullcontext
    """Within it the model stays loaded, and on the way in it is waited for (models.py). A number
    is for how many seconds after it the model is kept."""
    would_load: Callable[[], bool] = lambda: False
    """Whether the model is loaded for the next request, should it not be."""
    limits: Limits = field(default_factory=Limits)
    defaults: dict[str, object] = field(default_factory=dict[str, object])
    observers: list[Observer] = field(default_factory=list[Observer])
    started: float = field(default_factory=time.time)
    shares_prefixes: bool = False
    """Whether one key's requests may find what another's left in the prefix cache: who measures
    how long a first token takes would learn of it."""
    keeps_apart: bool = False
    """Whether several keys are known, of which none may learn what another's requests said."""
    traffic: Traffic = field(default_factory=Traffic)

    def of(self, asked: str | None) -> Site:
        """The same for the model that is asked for, under the name that it is asked by. Raises
        ApiError for one that is not here."""
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
        """What answers call the model; metrics call it by the first of its names."""
        return self.asked_as or self.names[0]

    @property
    def would_answer(self) -> bool:
        """Whether a request of now is answered, perhaps once the model is loaded again."""
        state = self.port.status.state
        return state == "ready" or (state in ("unloaded", "loading") and self.would_load())

    @property
    def all(self) -> tuple[Site, ...]:
        """Of each model, the first one's first."""
        return (self, *self.others)

    @contextmanager
    def place(self, key: str, *, is_in: bool = False) -> Generator[None]:
        """A place among the requests in flight, which one that `is_in` had until now. Raises
        ApiError where there is none."""
        limits, traffic = self.limits, self.traffic
        if traffic.ending and not is_in:
            raise ApiError(503, "the server is ending.", code="ending", retry_after=5)
        with traffic.places.place(key, limits.most_running, limits.most_of_a_key, is_in=is_in):
            yield

    def body(self, key: str, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """Memory for a body while it is read. Raises ApiError where there is none."""
        return self.traffic.bodies.hold(key, num_bytes, self.limits.body_seconds)

    def default(self, name: str) -> object:
        """Of a sampling parameter that a request leaves out: the owner's choice, else what the
        checkpoint's makers advise, else as in OpenAI's API, whose texts are drawn at
        temperature 1."""
        if name in self.defaults:
            return self.defaults[name]
        return self.port.card.sampling.get(name, _USUAL[name])

    @property
    def sampling(self) -> dict[str, object]:
        """Of those that a checkpoint may advise, what the owner or the checkpoint chose."""
        advised = self.port.card.sampling
        chosen = [name for name in ADVISED if name in self.defaults or name in advised]
        return {name: self.default(name) for name in chosen}


_USUAL = {item.name: default_of(item) for item in fields(SamplingParams)} | {"temperature": 1.0}


def key_of(request: Request) -> str:
    """The name of the key that the door let in; empty where none is asked for."""
    return request.scope.get("outrider.key", "")


def request_id_of(request: Request) -> str:
    return request.scope.get("outrider.request_id", "")


def learns_of_all(drafter: str) -> bool:
    """Whether it drafts from what any request said or wrote. Another package's may."""
    return drafter in LEARNS_OF_ALL or drafter not in KINDS


def check_apart(site: Site, drafter: str) -> None:
    """Raises ConfigError where keys are to be kept apart and an engine's own drafter would tell
    one what others said: its drafts are of their texts."""
    if site.keeps_apart and learns_of_all(drafter):
        raise ConfigError(
            f"several keys, and the drafter {drafter} drafts for each from what all said.",
            hint="--drafter ngram keeps to each text; --shared-prefixes lets keys share",
        )
