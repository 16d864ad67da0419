"""An `EnginePort` over an engine in this process: an AsyncLLM, which a thread loads.

It is for tests, embedding and small deployments: a crash of the engine ends the server too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Self, cast

from outrider.api.async_llm import AsyncLLM, EngineThread
from outrider.api.llm import LLM
from outrider.api.memory import WEIGHTS
from outrider.api.prompts import ChatIds
from outrider.api.request import AsyncRequest
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.stream import TokenDecoder, pieces_of
from outrider.core.draft import RoundTrace
from outrider.core.errors import ConfigError
from outrider.core.fields import WHOLE, size
from outrider.core.params import SamplingParams
from outrider.core.plugins import drafter_named
from outrider.estimate.forecast import forecast, sheet_like
from outrider.models.hf_config import read_sampling
from outrider.server.lane_load import LaneLoad
from outrider.server.pool import numerics_of
from outrider.server.port import (
    ChatPrompt,
    EngineCard,
    EngineRequest,
    EngineState,
    EngineStatus,
    NotReadyError,
    Promise,
)

# Tokens of a typical question and answer in a chat.
_CONTEXT, _NEW_TOKENS = 128, 128


def promise_of(llm: LLM) -> Promise | None:
    """Return the predicted speed-up of one text of the engine before it has run; None without a
    drafter or without figures for this device.

    The playground compares it with the measurement of a race. It only knows the sizes of target and
    drafter, the kind of device, and typical acceptance of such drafters, so its interval is wide.
    """
    if not llm.k:
        return None
    weights = {name: held for name, held in llm.memory.items() if name.startswith(WEIGHTS)}
    gpu = None if llm.device.type == "cpu" else str(llm.device)
    try:
        found = forecast(
            llm.spec,
            drafter_named(llm.drafter),
            llm.k,
            sheet_like(llm.device.type, gpu),
            num_bytes=sum(weights.values()) - weights.get(f"{WEIGHTS}target", 0),
            context=_CONTEXT + _NEW_TOKENS / 2,
        )
    except ConfigError:
        return None
    return Promise(speed_up=found.speed_up, low=found.low, high=found.high)


class ThreadStream(AsyncIterator[TextEvent]):
    """The events of one request of this process."""

    engine: int | None = None

    def __init__(self, engine: EngineThread, request: AsyncRequest) -> None:
        self._engine, self._request = engine, request
        self._num_rounds = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextEvent:
        request = self._request
        while True:
            # Read first: the last events may arrive together with the end.
            ended = request.ended
            event = self._engine.take(request)
            if event is not None:
                return event
            if ended:
                if request.error is None:
                    raise StopAsyncIteration
                if request.error is self._engine.broke:
                    # The engine failed, so the error is not specific to this request.
                    raise NotReadyError("closed") from request.error
                raise request.error
            try:
                await request.news()
            except BaseException:
                self.cancel()
                raise

    @property
    def has_ended(self) -> bool:
        """True if the request has ended and all its events were read."""
        return self._request.ended and not self._request.events

    def rounds(self, num_tokens: int) -> list[RoundTrace]:
        """Return the next rounds, up to those that wrote `num_tokens` more tokens; rounds that
        only read the prompt are included. Each round is returned once."""
        handle, found = self._request.handle, list[RoundTrace]()
        traces = [] if handle is None else handle.reader.traces
        while num_tokens > 0 and self._num_rounds < len(traces):
            found.append(traces[self._num_rounds])
            self._num_rounds += 1
            num_tokens -= found[-1].num_emitted
        return found

    @property
    def result(self) -> GenerationResult:
        if self._request.error is not None:
            raise self._request.error
        if self._request.handle is None:
            raise ConfigError("the request has not started.", hint="read its events first")
        return self._request.handle.result()

    def cancel(self) -> None:
        if not self._request.ended:
            self._engine.leave(self._request)


class ThreadPort:
    """An engine that `load` loads in a thread of its own; `load` passes its jobs to `lanes`."""

    def __init__(
        self, load: Callable[[], LLM], *, max_queued: int = 1_000, lanes: LaneLoad | None = None
    ) -> None:
        self._load, self._max_queued = load, max_queued
        self._lanes = lanes or LaneLoad()
        self._state: EngineState = "loading"
        self._owner: AsyncLLM | None = None
        self._card: EngineCard | None = None
        self._num_tokens = 0

    async def start(self) -> None:
        """Load the engine. Raises the errors of loading."""
        self._state = "loading"
        try:
            llm = await _in_thread(self._load)
            self._card = card_of(llm)
            # Nothing runs yet, so this is the whole capacity.
            self._num_tokens = llm.free_tokens
            self._owner = AsyncLLM(llm, max_queued=self._max_queued)
        except BaseException:
            self._state = "failed"
            raise
        self._state = "ready"

    @property
    def card(self) -> EngineCard:
        if self._card is None:
            raise NotReadyError(self._state)
        return self._card

    @property
    def status(self) -> EngineStatus:
        owner = self._owner
        if owner is None:
            return EngineStatus(state=self._state)
        counts = owner.llm.counts
        left = counts.submitted - counts.completed - counts.failed - counts.cancelled
        num_running = min(left, counts.live)
        broke = owner.engine.broke is not None and self._state == "ready"
        return EngineStatus(
            state="failed" if broke else self._state,
            num_running=num_running,
            num_waiting=left - num_running + owner.engine.num_queued,
            kv_usage=max(0.0, 1 - owner.llm.free_tokens / max(1, self._num_tokens)),
            num_preempted=counts.preempted,
            lanes=self._lanes.words,
        )

    @property
    def job_seconds(self) -> float:
        """Seconds that the current job has been running; 0 while the engine is idle."""
        return 0.0 if self._owner is None else self._owner.engine.job_seconds

    @property
    def decoder(self) -> TokenDecoder:
        return self._ready().llm.tokenizer

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        owner = self._ready()
        if add_special:
            return await owner.encoded(lambda: owner.llm.encode(prompt))

        def plain() -> list[int]:
            owner.llm.requests.check_size(prompt)
            return owner.llm.tokenizer.encode(prompt, add_special=False)

        return await owner.encoded(plain)

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds:
        owner = self._ready()
        return await owner.encoded(
            lambda: owner.llm.requests.ids_of_chat(
                chat.messages, tools=chat.tools, variables=chat.variables, continues=chat.continues
            )
        )

    async def decode(self, ids: Sequence[int]) -> list[str]:
        owner = self._ready()
        return await asyncio.to_thread(pieces_of, owner.llm.tokenizer, ids)

    def stream(self, request: EngineRequest) -> ThreadStream:
        engine = self._ready().engine
        submitted = AsyncRequest(
            asyncio.get_running_loop(),
            request.prompt_ids,
            replace(request.params, cache_salt=request.cache_salt),
            structure=request.structure,
            sample=request.sample,
            written=request.written,
            key=request.key,
            weight=request.weight,
        )
        engine.add(submitted)
        return ThreadStream(engine, submitted)

    async def aclose(self) -> None:
        await self._shut("closed")

    async def unload(self) -> None:
        """Unload the engine until `start` is called again."""
        await self._shut("unloaded")

    async def _shut(self, state: EngineState) -> None:
        self._state = state
        owner, self._owner = self._owner, None
        if owner is not None:
            await owner.aclose()

    def _ready(self) -> AsyncLLM:
        if self._owner is None or self._state != "ready":
            raise NotReadyError(self._state)
        return self._owner


async def _in_thread(load: Callable[[], LLM]) -> LLM:
    """Run `load` in a daemon thread, which does not keep an ending server alive."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[LLM] = loop.create_future()

    def notify(done: Callable[[], None]) -> None:
        def if_waited_for() -> None:
            if not loaded.done():
                done()

        # The loop may have ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(if_waited_for)

    def run() -> None:
        try:
            llm = load()
        except BaseException as error:  # noqa: BLE001 - raised by awaiting the future
            notify(partial(loaded.set_exception, error))
        else:
            notify(partial(loaded.set_result, llm))

    threading.Thread(target=run, name="outrider-load", daemon=True).start()
    return await loaded


def card_of(llm: LLM) -> EngineCard:
    """Return the card of a loaded LLM."""
    config, tokenizer = llm.config, llm.tokenizer
    files = tokenizer.config
    return EngineCard(
        model=str(llm.folder.name),
        window=llm.fitting_tokens([0], SamplingParams(max_tokens=WHOLE)) + 1,
        vocab_size=llm.spec.vocab_size,
        num_parameters=llm.spec.num_parameters,
        drafters=llm.drafters,
        drafter=llm.drafter,
        k=llm.k,
        sampler=config.sampler,
        exact=llm.exact,
        fixed_k=llm.fixed_k,
        has_chat_template=tokenizer.has_chat_template,
        chat_template=tokenizer.templates.source or "",
        tool_template=tokenizer.templates.tool_source,
        bos=_token(files.get("bos_token")),
        eos=_token(files.get("eos_token")),
        numerics=numerics_of(llm),
        tokenizer=str(tokenizer.path),
        notes=tuple(llm.notes),
        promise=promise_of(llm),
        sampling=read_sampling(llm.folder),
        response_template=tokenizer.templates.response,
        facts={
            "device": str(llm.device),
            "memory": size(sum(llm.memory.values())),
            "batch_size": str(llm.requests.plan.settings.most_batch),
            "at_once": llm.requests.plan.at_once,
        },
    )


def _token(entry: object) -> str:
    """Return a token of tokenizer_config.json, a string or an object with its content."""
    if isinstance(entry, dict):
        entry = cast("dict[str, object]", entry).get("content")
    return entry if isinstance(entry, str) else ""
