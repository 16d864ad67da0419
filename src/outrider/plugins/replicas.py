"""Several engine processes of one model: an `EnginePort` over them, and a pool without a server.

A request goes to the engine that has cached most of its prompt's beginning, unless that engine is
clearly busier than another; then it goes to the least busy one. When an engine dies, requests that
have written something continue at another engine of the same numerics, with the same text. Requests
that may have caused the crash wait for the engine's restart, where they are tried one by one.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Self, TypeVar, Unpack, cast

import msgspec

from outrider.api.callers import (
    ChatIds,
    Message,
    OfOneProcess,
    Prompt,
    RequestOptions,
    conversation,
    one_prompt,
    sampling_of,
    several_prompts,
    structure_in,
)
from outrider.api.result import GenerationResult
from outrider.api.stream import TokenDecoder
from outrider.api.structure import StructureOptions
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, OutriderError, defect_in, with_hint
from outrider.core.options import EngineOptions
from outrider.core.params import SamplingParams, engine_config, params_for_each
from outrider.sched.admission import best_known, blocks_of, least_busy
from outrider.server.calls import ProcessStream
from outrider.server.engine_child import Blame
from outrider.server.port import (
    ChatPrompt,
    EngineCard,
    EngineLostError,
    EnginePort,
    EngineRequest,
    Engines,
    EngineState,
    EngineStatus,
    NotReadyError,
)
from outrider.server.process_port import ProcessPort

_LOG = logging.getLogger(__name__)
# The common state is the first of these that any engine is in.
_STATES: Sequence[EngineState] = (
    *("ready", "restarting", "loading"),
    *("unloaded", "closed", "failed"),
)
_LOOK_SECONDS = 0.05


class ReplicasPort:
    """Engines that load the same model; each has its own device or cores (`Load`)."""

    def __init__(self, ports: Sequence[ProcessPort]) -> None:
        if not ports:
            raise ConfigError("there is no replica.", hint="at least one")
        self.replicas = tuple(ports)
        self._turns = count()
        self._is_starting = False
        blame = Blame()
        for replica in self.replicas:
            replica.on_loss = partial(self._move, replica)
            replica.blame = blame

    async def start(self) -> None:
        """Start the engines one after another, as each plans its memory by what is free then.
        Raises the errors of loading; then all engines are stopped."""
        self._is_starting = True
        try:
            for replica in self.replicas:
                await replica.start()
            _check_alike([replica.card for replica in self.replicas])
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._is_starting = False

    @property
    def card(self) -> EngineCard:
        """The card of all engines together; its window is the smallest one."""
        cards = [replica.card for replica in self.replicas]
        facts = dict(cards[0].facts, replicas=str(len(cards)))
        window = min(card.window for card in cards)
        notes = cards[0].notes
        if len({card.numerics for card in cards}) > 1:
            notes = (*notes, "the engines' numerics differ: no engine continues a text of another")
        return msgspec.structs.replace(cards[0], window=window, facts=facts, notes=notes)

    @property
    def status(self) -> EngineStatus:
        """The status of all engines: ready if any is, once all have started; counts are sums."""
        found = tuple(replica.status for replica in self.replicas)
        any_is: EngineState = next(
            state for state in _STATES if any(one.state == state for one in found)
        )
        return EngineStatus(
            state="loading" if self._is_starting else any_is,
            num_running=sum(one.num_running for one in found),
            num_waiting=sum(one.num_waiting for one in found),
            kv_usage=sum(one.kv_usage for one in found) / len(found),
            num_preempted=sum(one.num_preempted for one in found),
            num_restarts=sum(one.num_restarts for one in found),
            is_overdue=all(one.is_overdue or one.state == "failed" for one in found),
            is_bounded=any(one.is_bounded for one in found),
            lanes={
                f"{number}: {lane}": does
                for number, one in enumerate(found)
                for lane, does in one.lanes.items()
            },
            engines=found,
        )

    @property
    def decoder(self) -> TokenDecoder:
        return self.replicas[0].decoder

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        return await self._next_ready().encode(prompt, add_special=add_special)

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds:
        return await self._next_ready().encode_chat(chat)

    def stream(self, request: EngineRequest) -> ProcessStream:
        blocks = list(blocks_of(request.prompt_ids, request.cache_salt))
        chosen = self._chosen(blocks)
        stream = chosen.stream(request)
        stream.engine = self.replicas.index(chosen)
        chosen.known.note(blocks)
        return stream

    async def aclose(self) -> None:
        await asyncio.gather(*(replica.aclose() for replica in self.replicas))

    async def unload(self) -> None:
        """Stop all engines until `start` is called again."""
        await asyncio.gather(*(replica.unload() for replica in self.replicas))
        for replica in self.replicas:
            replica.known.forget()

    async def replace(self, number: int, seconds: float) -> None:
        """Drain an engine and restart it while the others serve. Requests that other engines can
        continue move at once; the rest has `seconds` to end. Raises the errors of loading."""
        if self._is_starting:
            raise NotReadyError("loading")
        leaving, loop = self.replicas[number], asyncio.get_running_loop()
        leaving.is_leaving, until = True, loop.time() + seconds
        try:
            for stream in leaving.streams:
                self._hand_over(leaving, stream)
            while leaving.num_in_flight and loop.time() < until:
                await asyncio.sleep(_LOOK_SECONDS)
            await leaving.unload()
            leaving.known.forget()
            await leaving.start()
        finally:
            leaving.is_leaving = False

    def _ready(self) -> list[ProcessPort]:
        return [one for one in self.replicas if one.is_ready]

    def _next_ready(self) -> ProcessPort:
        """Return the next ready engine in turn, or the first, which raises NotReadyError."""
        ready = self._ready() or self.replicas[:1]
        return ready[next(self._turns) % len(ready)]

    def _chosen(self, blocks: Sequence[int]) -> ProcessPort:
        """Return a ready engine, or one that restarts. Raises NotReadyError."""
        known = self._ready() or [one for one in self.replicas if one.status.state == "restarting"]
        if not known:
            raise NotReadyError(self.status.state)
        return best_known(known, blocks)

    def _hand_over(self, leaving: ProcessPort, stream: ProcessStream) -> None:
        can_move = stream.can_move(leaving.card)
        if can_move and not stream.is_left and self._others(leaving, stream):
            leaving.release(stream)
            self._move(leaving, stream)

    def _move(self, lost: ProcessPort, stream: ProcessStream) -> bool:
        """Move a request of a lost engine to another one; return whether there is one for it."""
        lost.known.forget()
        others = self._others(lost, stream)
        if not others:
            return False
        to = least_busy(others)
        to.adopt(stream)
        stream.engine = self.replicas.index(to)
        to.known.note(list(blocks_of(stream.request.prompt_ids, stream.request.cache_salt)))
        return True

    def _others(self, than: ProcessPort, stream: ProcessStream) -> list[ProcessPort]:
        """Return the other engines that can continue the request with the same text."""
        found = [one for one in self._ready() if one is not than]
        if not stream.written:
            return found
        return [one for one in found if one.card.numerics == stream.numerics]


async def replace_on_hangup(ports: Iterable[EnginePort], seconds: float) -> None:
    """Restart all engines in turn at each SIGHUP (`systemctl reload`), each in `seconds`."""
    hangup, loop = asyncio.Event(), asyncio.get_running_loop()
    several = [port for port in ports if isinstance(port, ReplicasPort)]
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        while True:
            await hangup.wait()
            hangup.clear()
            for port in several:
                await _replace_all(port, seconds)
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def _replace_all(port: ReplicasPort, seconds: float) -> None:
    """Restart each engine, provided that another one serves in the meantime."""
    for number in range(len(port.replicas)):
        others = [one for one in port.replicas if one is not port.replicas[number]]
        if not any(one.is_ready for one in others):
            _LOG.error("engine %d is not replaced: no other one is ready", number)
            continue
        _LOG.warning("engine %d is being replaced", number)
        try:
            await port.replace(number, seconds)
        except Exception as error:  # noqa: BLE001 - the others go on serving
            words, defect = with_hint(error), defect_in(error)
            _LOG.error("engine %d does not start: %s", number, words, exc_info=defect)


def _check_alike(cards: Sequence[EngineCard]) -> None:
    """Check that all engines have the same model on devices of one kind. Raises ConfigError."""
    first, *others = [
        {
            "device": card.facts.get("device", "").partition(":")[0],
            "model": card.model,
            "vocabulary": str(card.vocab_size),
            "parameters": str(card.num_parameters),
            "drafter": card.drafter,
            "exactness": str(card.exact),
        }
        for card in cards
    ]
    for other in others:
        differing = [
            f"{name} ({mine}, {other[name]})" for name, mine in first.items() if mine != other[name]
        ]
        if differing:
            raise ConfigError(
                f"the engines differ in {', '.join(differing)}.",
                hint="devices of one kind, as many as --replicas says; and the same model",
            )


# Engines in child processes for programs without a server: batches and lists of prompts.
#
# An `EnginePool` sends only plain values to its engines. It therefore lacks those features of `LLM`
# that need objects of the same process: its models, mask functions and controller objects.

T = TypeVar("T")
# How often a request is restarted if its engine dies and its text cannot be continued. Its seed
# makes it the same text.
_MOST_BEGUN = 3


@dataclass(eq=False, slots=True)
class PooledRequest:
    """A request, and the future of its result. `has_read` is true once its prompt was read."""

    answer: Future[GenerationResult] = field(default_factory=Future[GenerationResult])
    has_read: bool = False

    @property
    def done(self) -> bool:
        return self.answer.done()

    def events(self) -> tuple[()]:
        """Return no events: unlike an `LLM`, a pool does not keep them."""
        return ()

    def result(self) -> GenerationResult:
        """Return the result. Raises the error of a failed request."""
        if not self.done:
            raise ConfigError("the request has not ended.", hint="EnginePool.advance until it has")
        return self.answer.result()


class EnginePool(OfOneProcess):
    """Engines of one model: `replicas` of them, or one on each of `devices` (`cuda:0`, `cuda:1`).
    Options are those of `LLM`. A pool is for use from one thread; `close` ends its processes."""

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
        self._open(model, draft, config, Engines.of(replicas, devices, config))

    @classmethod
    def of(cls, model: str, draft: str | None, config: EngineConfig, engines: Engines) -> Self:
        found = cls.__new__(cls)
        found._open(model, draft, config, engines)
        return found

    def _open(self, model: str, draft: str | None, config: EngineConfig, engines: Engines) -> None:
        self.config = engines.config(config)
        # One request more than the batch size waits at each engine, so that no engine idles.
        self._most = len(engines) * (config.most_batch + 1)
        # If engines are lost, one engine may have all requests.
        most_queued = self._most + config.max_waiting
        loads = engines.loads(model, draft, config, most_queued)
        self._port = ReplicasPort(list(map(ProcessPort, loads)))
        # The caller's thread writes the first count, the event loop's thread the second.
        self._num_submitted, self._num_ended = 0, 0
        self._news = threading.Event()
        self._loop = asyncio.new_event_loop()
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
        """Process ids of the engines."""
        return tuple(replica.process_id for replica in self._port.replicas)

    @property
    def has_free_slot(self) -> bool:
        """Return whether one more request would start soon."""
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
        """Submit a request. It runs in the background; `advance` waits for news of it."""
        submitted = EngineRequest(
            prompt_ids=ids,
            params=(params or SamplingParams()).seeded(),
            structure=structure,
            sample=sample,
        )
        request = PooledRequest()
        self._num_submitted += 1
        answer = self._answer(submitted, request)
        request.answer = asyncio.run_coroutine_threadsafe(answer, self._loop)
        request.answer.add_done_callback(self._note_end)
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
        """Generate like `LLM.generate`: `n` results for each prompt, in order. A request that
        cannot run has a result with its `error`; if all have one, the first error is raised."""
        batch, structure = several_prompts(prompts), structure_in(options)
        each = [one.seeded() for one in params_for_each(params, len(batch), sampling_of(options))]
        begun: list[PooledRequest] = []
        for prompt, wanted in zip(batch, each, strict=True):
            for sample in range(wanted.n):
                while not self.has_free_slot:
                    self.advance()
                begun.append(self._submit(prompt, replace(wanted, n=1), sample, structure))
        while not all(one.done for one in begun):
            self.advance()
        errors = [one.answer.exception() for one in begun]
        first = next(filter(None, errors), None)
        if first is not None and all(errors):
            raise first
        return [self._result(one) for one in begun]

    def _submit(
        self, prompt: Prompt, params: SamplingParams, sample: int, structure: StructureOptions
    ) -> PooledRequest:
        """Submit a prompt; if it cannot run, the returned request has ended with the error."""
        try:
            return self.submit(self.encode(prompt), params, sample=sample, **structure)
        except OutriderError as error:
            failed = PooledRequest()
            failed.answer.set_exception(error)
            return failed

    def _result(self, request: PooledRequest) -> GenerationResult:
        error, card = request.answer.exception(), self.card
        if isinstance(error, OutriderError):
            return GenerationResult.failed(error, drafter=card.drafter, k=card.k)
        return request.result()

    def close(self) -> None:
        """Stop the engines and all running requests."""
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

    async def _answer(self, asked: EngineRequest, request: PooledRequest) -> GenerationResult:
        num_begun = 0
        while True:
            stream, num_begun = self._port.stream(asked), num_begun + 1
            try:
                async for _ in stream:
                    if not request.has_read:
                        request.has_read = True
                        self._news.set()
                return stream.result
            except EngineLostError:
                if num_begun == _MOST_BEGUN:
                    raise

    def _note_end(self, _: object) -> None:
        self._num_ended += 1
        self._news.set()
