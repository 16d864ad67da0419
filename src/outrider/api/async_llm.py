"""`AsyncLLM`, an LLM for asyncio: tasks stream and generate, and one thread runs the engine.

async with AsyncLLM("outrider/embedded") as llm:
    async for event in llm.stream("def quicksort(items):"):
        print(event.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar, Unpack

from outrider.api.engine_thread import AsyncRequest, EngineThread
from outrider.api.llm import EMBEDDED, LLM
from outrider.api.prompts import Message, Prompt, several_prompts
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.structure import RequestOptions, StructureOptions, sampling_of, structure_in
from outrider.api.turns import OfOneProcess
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.logits import AllowedTokens
from outrider.core.options import EngineOptions
from outrider.core.params import SamplingParams, params_for_each, params_for_one
from outrider.core.protocols import Controller

# Threads that turn prompts into ids; the tokenizer library works outside Python's lock.
_NUM_ENCODERS = 2
_Encode = Callable[[], list[int]]
_Found = TypeVar("_Found")


class AsyncTextStream(OfOneProcess, AsyncIterator[TextEvent]):
    """The events of a request, one or more rounds each: a slow reader gets fewer, larger ones, and
    no text is lost. The request starts when the first event is requested.

    Leaving the loop, cancelling the task, `aclose` or dropping the stream cancels the request
    before the engine's next job. `cancel` does so from any thread, and the loop over it ends.
    """

    def __init__(self, owner: AsyncLLM, encode: _Encode, make: Callable[..., AsyncRequest]) -> None:
        self._owner, self._encode, self._make = owner, encode, make
        self._request: AsyncRequest | None = None
        self._left = False
        self._is_asked = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextEvent:
        if self._is_asked:
            raise ConfigError("another task is waiting for this stream.", hint="one stream a task")
        self._is_asked = True
        try:
            event = await self._next()
        except BaseException:
            self.cancel()
            raise
        finally:
            self._is_asked = False
        if event is None:
            raise StopAsyncIteration
        return event

    @property
    def result(self) -> GenerationResult:
        """The result, once the loop over the stream has ended. Raises the error that ended the
        request, and ConfigError while it runs or if it never ran."""
        return _result(self._request)

    def cancel(self) -> None:
        """End the request, if it has not ended; from any thread."""
        self._left = True
        if self._request is not None and not self._request.ended:
            self._owner.engine.leave(self._request)

    async def aclose(self) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    async def _next(self) -> TextEvent | None:
        """The next event, None at the end."""
        request = self._request
        if request is None:
            if self._left:
                return None
            ids = await self._owner.encoded(self._encode)
            request = self._request = self._make(ids)
            self._owner.engine.add(request)
            if self._left:
                # Cancelled from another thread during tokenization.
                self.cancel()
        while True:
            # Read before taking an event: the last events come with the end.
            ended = request.ended
            event = self._owner.engine.take(request)
            if event is not None:
                return event
            if ended:
                if request.error is not None:
                    raise request.error
                return None
            await request.news()


class AsyncLLM(OfOneProcess):
    """An `LLM` whose callers are tasks, of one event loop or several. The constructor loads the
    models, as an LLM's does; `await asyncio.to_thread(AsyncLLM, ...)` keeps the loop running.

    `model` may be an existing LLM; `options` are fields of EngineConfig. Threads of their own turn
    prompts into ids, and one thread runs the engine, so no call blocks the loop. At most
    `max_queued` requests wait in addition to those in the engine's own queue; one more raises
    QueueFullError. `async with` closes it at the end.
    """

    def __init__(
        self,
        model: str | Path | LLM = EMBEDDED,
        *,
        draft: str | Path | None = None,
        config: EngineConfig | None = None,
        controller: Controller | str | None = None,
        max_queued: int = 100_000,
        **options: Unpack[EngineOptions],
    ) -> None:
        if isinstance(model, LLM):
            if options or any(given is not None for given in (draft, config, controller)):
                raise ConfigError(
                    "a loaded LLM has its draft model and configuration already.",
                    hint="give the LLM alone",
                )
            self.llm = model
        else:
            self.llm = LLM(model, draft=draft, config=config, controller=controller, **options)
        self.engine = EngineThread(self.llm, max_queued)
        self._encoders = ThreadPoolExecutor(_NUM_ENCODERS, "outrider-encode")
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Async{repr(self.llm).removeprefix('<')}"

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        allowed: AllowedTokens | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncTextStream:
        """The events of one completion; `allowed` and `options` are those of `LLM.stream`. The
        first event raises the error of a bad prompt."""
        wanted = params_for_one(params, sampling_of(options))
        given = structure_in(options)
        return self._stream(lambda: self.llm.encode(prompt), wanted, allowed, given)

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncTextStream:
        """The assistant's next turn, through the checkpoint's own chat template."""
        wanted = params_for_one(params, sampling_of(options))
        given = structure_in(options)
        return self._stream(lambda: self.llm.encode_chat(messages), wanted, None, given)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        allowed: AllowedTokens | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]:
        """Run all prompts. Returns `n` results for each, in order, as `LLM.generate` does: a prompt
        that cannot be run has a result with its `error`, and if none can be run the first error is
        raised. Cancelling the task cancels the requests."""
        batch = several_prompts(prompts)
        each = [one.seeded() for one in params_for_each(params, len(batch), sampling_of(options))]
        structure = structure_in(options)
        entries: list[AsyncRequest | OutriderError] = []
        try:
            for prompt, wanted in zip(batch, each, strict=True):
                entries += await self._add_all(prompt, wanted, allowed, structure)
            for entry in entries:
                while isinstance(entry, AsyncRequest) and not entry.ended:
                    await entry.news()
            failed = [
                entry.error if isinstance(entry, AsyncRequest) else entry for entry in entries
            ]
            first = next(filter(None, failed), None)
            if first is not None and all(failed):
                raise first
            return [self._outcome(entry) for entry in entries]
        finally:
            for entry in entries:
                if isinstance(entry, AsyncRequest):
                    self.engine.leave(entry)

    async def _add_all(
        self,
        prompt: Prompt,
        params: SamplingParams,
        allowed: AllowedTokens | None,
        structure: StructureOptions,
    ) -> Sequence[AsyncRequest | OutriderError]:
        """The `n` requests of a prompt, or its error `n` times."""
        try:
            ids = await self.encoded(lambda: self.llm.encode(prompt))
        except OutriderError as error:
            return [error] * params.n
        single = params if params.n == 1 else replace(params, n=1)
        loop = asyncio.get_running_loop()
        requests = [
            AsyncRequest(loop, ids, single, allowed, structure, sample, quiet=True)
            for sample in range(params.n)
        ]
        for index, request in enumerate(requests):
            try:
                self.engine.add(request)
            except OutriderError:
                for added in requests[:index]:
                    self.engine.leave(added)
                raise
        return requests

    def _outcome(self, entry: AsyncRequest | OutriderError) -> GenerationResult:
        """The result of an ended request, with its error if it failed."""
        if isinstance(entry, OutriderError):
            return self.llm.failed(entry)
        handle, error = entry.handle, entry.error
        if handle is None and isinstance(error, OutriderError):
            return self.llm.failed(error)
        if handle is not None and handle.reader.seq.error is error:
            return handle.make_result(handle.reader)
        # The engine was closed meanwhile.
        raise error or ConfigError("the request was cancelled before it started.")

    async def aclose(self) -> None:
        """Cancel running requests, whose readers get an error, and end all threads."""
        self._is_closed = True
        await asyncio.to_thread(self.engine.close)
        self._encoders.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def encoded(self, encode: Callable[[], _Found]) -> _Found:
        """The result of `encode`, called in another thread. Raises ConfigError once closed."""
        if self._is_closed:
            raise ConfigError("this AsyncLLM is closed.", hint="make another one")
        return await asyncio.get_running_loop().run_in_executor(self._encoders, encode)

    def _stream(
        self,
        encode: _Encode,
        params: SamplingParams,
        allowed: AllowedTokens | None,
        structure: StructureOptions,
    ) -> AsyncTextStream:
        def make(ids: list[int]) -> AsyncRequest:
            return AsyncRequest(asyncio.get_running_loop(), ids, params, allowed, structure)

        return AsyncTextStream(self, encode, make)


def _result(request: AsyncRequest | None) -> GenerationResult:
    if request is not None and request.error is not None:
        raise request.error
    if request is None or request.handle is None:
        raise ConfigError("the request has not started.", hint="read its events first")
    return request.handle.result()
