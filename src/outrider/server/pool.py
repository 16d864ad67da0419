"""Engines in processes of their own for a program that is no server: batches and lists of prompts.

What an `LLM` has of its own process, as its models, masks by a function, controllers that are
objects, an `EnginePool` has not: all that reaches an engine is plain values.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar, Unpack, cast

from outrider.api.prompts import Message, Prompt, conversation, one_prompt, several_prompts
from outrider.api.result import GenerationResult
from outrider.api.structure import RequestOptions, StructureOptions, sampling_of, structure_in
from outrider.api.tokenizer import Tokenizer
from outrider.api.turns import OfOneProcess
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.options import EngineOptions
from outrider.core.params import SamplingParams, engine_config, params_for_each
from outrider.server.frames import Load
from outrider.server.placement import Placement, device_of, placements
from outrider.server.port import ChatPrompt, EngineCard, EngineLostError, EngineRequest
from outrider.server.process_port import ProcessPort
from outrider.server.replicas import ReplicasPort

T = TypeVar("T")
# How often a request is begun anew whose engine died and whose text cannot go on: with its seed it
# is the same text.
_MOST_BEGUN = 3


class PooledRequest:
    """A request, and its result once it has ended. `has_read` says that its prompt is in memory."""

    def __init__(self) -> None:
        self.has_read, self.done = False, False
        self.error: Exception | None = None
        self._result: GenerationResult | None = None

    def events(self) -> tuple[()]:
        """Of those that an `LLM` would keep for its caller, none."""
        return ()

    def end(self, result: GenerationResult | None, error: Exception | None) -> None:
        self._result, self.error, self.done = result, error, True

    def result(self) -> GenerationResult:
        """Raises what the request failed of."""
        if self.error is not None:
            raise self.error
        if self._result is None:
            raise ConfigError("the request has not ended.", hint="EnginePool.advance until it has")
        return self._result


class EnginePool(OfOneProcess):
    """Engines of one model, `replicas` in number or one on each of `devices` (`cuda:0`, `cuda:1`).
    Options are those of `LLM`. It is for one thread; `close` ends its processes."""

    def __init__(
        self,
        model: str = "outrider/embedded",
        *,
        draft: str | None = None,
        replicas: int = 1,
        devices: Sequence[str] = (),
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = engine_config(config, cast("Mapping[str, object]", options))
        config = replace(config, device=device_of(devices, config.device))
        places = placements(replicas, devices, config)
        self._open(model, draft, config, places)

    @classmethod
    def of(
        cls, model: str, draft: str | None, config: EngineConfig, places: Sequence[Placement]
    ) -> Self:
        """At these places."""
        found = cls.__new__(cls)
        found._open(model, draft, config, places)
        return found

    def _open(
        self, model: str, draft: str | None, config: EngineConfig, places: Sequence[Placement]
    ) -> None:
        self.config = config
        # One more than run at once may wait at each engine, so that none is idle for a moment.
        self._most = len(places) * (config.most_batch + 1)
        # When one is lost, another may have all of them.
        most_queued = self._most + config.max_waiting
        loads = [Load(model, draft, config, most_queued, one) for one in places]
        self._port = ReplicasPort(list(map(ProcessPort, loads)))
        # The one is counted by the caller's thread, the other by the engines'.
        self._num_submitted, self._num_ended = 0, 0
        self._news = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="outrider-pool", daemon=True
        )
        self._thread.start()
        try:
            self._run(self._port.start())
        except BaseException:
            self._stop()
            raise

    @property
    def card(self) -> EngineCard:
        return self._port.card

    @property
    def tokenizer(self) -> Tokenizer:
        return cast("Tokenizer", self._port.decoder)

    @property
    def process_ids(self) -> tuple[int | None, ...]:
        """Of the engines."""
        return tuple(replica.port.process_id for replica in self._port.replicas)

    @property
    def has_free_place(self) -> bool:
        """Whether one more request would start soon."""
        return self._num_submitted - self._num_ended < self._most

    def encode(self, prompt: Prompt) -> list[int]:
        given = one_prompt(prompt)
        return self._run(self._port.encode(given)) if isinstance(given, str) else given

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        return self._run(self._port.encode_chat(ChatPrompt(messages=conversation(messages)))).ids

    def submit(
        self,
        ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        **structure: Unpack[StructureOptions],
    ) -> PooledRequest:
        """Hand a request in beside others, which run whatever the caller does."""
        asked = EngineRequest(
            prompt_ids=ids,
            params=(params or SamplingParams()).seeded(),
            structure=structure,
            sample=sample,
        )
        request = PooledRequest()
        self._num_submitted += 1
        self._loop.call_soon_threadsafe(self._begin, asked, request)
        return request

    def advance(self) -> None:
        """Wait until a request has begun or ended."""
        self._news.wait()
        self._news.clear()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]:
        """As `LLM.generate`: `n` results for each prompt, in order; one that cannot be run has a
        result with its `error`, and the first error is raised where all of them have one."""
        batch, structure = several_prompts(prompts), structure_in(options)
        each = [one.seeded() for one in params_for_each(params, len(batch), sampling_of(options))]
        asked = [
            (prompt, replace(wanted, n=1), sample)
            for prompt, wanted in zip(batch, each, strict=True)
            for sample in range(wanted.n)
        ]
        waiting, begun = deque(asked), list[PooledRequest]()
        while waiting or not all(one.done for one in begun):
            while waiting and self.has_free_place:
                begun.append(self._asked(*waiting.popleft(), structure))
            if not all(one.done for one in begun):
                self.advance()
        errors = [one.error for one in begun]
        first = next(filter(None, errors), None)
        if first is not None and all(errors):
            raise first
        return [self._result(one) for one in begun]

    def _asked(
        self, prompt: Prompt, params: SamplingParams, sample: int, structure: StructureOptions
    ) -> PooledRequest:
        """Ended at once where the prompt cannot be run."""
        try:
            return self.submit(self.encode(prompt), params, sample=sample, **structure)
        except OutriderError as error:
            failed = PooledRequest()
            failed.end(None, error)
            return failed

    def _result(self, request: PooledRequest) -> GenerationResult:
        if isinstance(request.error, OutriderError):
            card = self.card
            return GenerationResult.failed(request.error, drafter=card.drafter, k=card.k)
        return request.result()

    def close(self) -> None:
        """End the engines, and what runs."""
        if not self._loop.is_closed():
            self._run(self._port.aclose())
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, asked: EngineRequest, request: PooledRequest) -> None:
        task = self._loop.create_task(self._follow(asked, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, asked: EngineRequest, request: PooledRequest) -> None:
        result, error = None, None
        for _ in range(_MOST_BEGUN):
            try:
                stream = self._port.stream(asked)
                async for _event in stream:
                    if not request.has_read:
                        request.has_read = True
                        self._news.set()
                result, error = stream.result, None
                break
            except EngineLostError as lost:
                error = lost
            except Exception as failed:  # noqa: BLE001 - raised where its result is asked for
                error = failed
                break
        request.end(result, error)
        self._num_ended += 1
        self._news.set()
