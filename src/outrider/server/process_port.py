"""An `EnginePort` over a supervised process: if the process dies or hangs, it is restarted.

A request in flight continues with the same text if its rule draws each token's noise from its
position alone (greedy, match, coupled): the tokens that the client has become the beginning of the
new request. Other requests end with an error. After a crash, requests continue one by one, each
only after the one before it has written something. This identifies a request that crashes the
engine: after its second crash, it and its like are refused (engine_child.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from time import monotonic

import msgspec

from outrider.api.callers import ChatIds
from outrider.api.stream import TokenDecoder
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError, OutriderError, QueueFullError, defect_in
from outrider.sched.admission import KnownBlocks
from outrider.server.calls import Call, EncodeCall, KeptOutError, ProcessStream
from outrider.server.engine_child import HANG_SECONDS, Blame, EngineChild, LoadHungError, Restarts
from outrider.server.port import (
    Cancel,
    ChatPrompt,
    Encode,
    EngineCard,
    EngineLostError,
    EngineRequest,
    EngineState,
    EngineStatus,
    Load,
    NotReadyError,
    Update,
)

_LOG = logging.getLogger(__name__)
MOST_PROMPTS = 256
"""Prompts that are being encoded or wait for it."""
# Prompts that a process encodes at a time. One of them may be long, so that a flood of long prompts
# leaves threads for short ones.
_MOST_ENCODED = 8
# Time limit for encoding a prompt, relative to that of a job.
_ENCODE_RATIO = 2.0


class ProcessPort:
    """An engine in a child process, which `start` starts. A job hangs if it takes longer than
    `hang_seconds` and ten times as long as any job before it."""

    def __init__(self, load: Load, *, hang_seconds: float = HANG_SECONDS) -> None:
        self._load, self._hang_seconds = load, hang_seconds
        self._state: EngineState = "loading"
        self._card: EngineCard | None = None
        self._tokenizer: Tokenizer | None = None
        self._status = EngineStatus(state="loading")
        self._child: EngineChild | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._numbers = count()
        self._calls: dict[int, Call] = {}
        # Calls that wait for a process, or for others that may have ended one and are tried alone.
        # The first may be running and is not proven yet.
        self._waiting: deque[Call] = deque()
        # Prompts that are no calls yet.
        self._prompts: deque[EncodeCall] = deque()
        self.blame = Blame()
        """Several ports may share it."""
        self.on_loss: Callable[[ProcessStream], bool] = lambda _: False
        """Called after a crash with each request that did not cause it. Returns whether another
        port continues the request (`adopt`)."""
        self.known = KnownBlocks()
        """The prompts' beginnings that the engine has read, for routers of several ports."""
        self.is_leaving = False
        """True while a router gives it no requests."""
        self._restarts = Restarts(hang_seconds)

    async def start(self) -> None:
        """Start the process and load the model. Raises the errors of loading."""
        self._state = "loading"
        try:
            child = await self._spawn()
            folder = Path(child.card.tokenizer)
            self._tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        except BaseException:
            self._state = "failed"
            if self._child is not None:
                self._child.kill()
            raise
        self._state = "ready"
        self._keeper = asyncio.ensure_future(self._supervise(child))

    @property
    def card(self) -> EngineCard:
        if self._card is None:
            raise NotReadyError(self._state)
        return self._card

    @property
    def status(self) -> EngineStatus:
        known = self._status if self._state == "ready" else EngineStatus(state=self._state)
        restarts = self._restarts
        return msgspec.structs.replace(
            known,
            state=self._state,
            num_restarts=restarts.num,
            is_overdue=restarts.is_overdue,
            is_bounded=restarts.is_bounded,
        )

    @property
    def is_ready(self) -> bool:
        return self._state == "ready" and not self.is_leaving

    @property
    def decoder(self) -> TokenDecoder:
        if self._tokenizer is None:
            raise NotReadyError(self._state)
        return self._tokenizer

    @property
    def process_id(self) -> int | None:
        return None if self._child is None else self._child.process_id

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        return (await self._encoded(prompt, add_special, None)).ids

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds:
        return await self._encoded("", False, chat)

    def stream(self, request: EngineRequest) -> ProcessStream:
        """Start a request. It waits while the engine restarts, and while earlier requests are tried
        one by one after a crash. Raises KeptOutError and the errors of all ports."""
        if self._state not in ("ready", "restarting"):
            raise NotReadyError(self._state)
        # Requests whose clients left end within a round, so they do not count.
        held = sum(not stream.is_left for stream in self.streams)
        if held >= self._load.max_queued:
            raise QueueFullError(held, 1)
        stream = ProcessStream(next(self._numbers), request, self.leave)
        if self.blame.refuses(stream):
            raise KeptOutError
        self._take_in(stream)
        if stream.error is not None:
            raise stream.error
        return stream

    def release(self, stream: ProcessStream) -> None:
        """Remove a request so that another port can `adopt` it."""
        del self._calls[stream.number]
        if stream.is_sent:
            self._present.send(Cancel(stream.number))
        if stream in self._waiting:
            self._waiting.remove(stream)
        stream.take_back()

    def adopt(self, stream: ProcessStream) -> None:
        """Continue a request that another port has lost or released."""
        stream.number, stream.leave = next(self._numbers), self.leave
        self._take_in(stream)

    @property
    def streams(self) -> tuple[ProcessStream, ...]:
        """Requests in flight."""
        return tuple(call for call in self._calls.values() if isinstance(call, ProcessStream))

    @property
    def num_in_flight(self) -> int:
        return len(self.streams)

    def leave(self, call: Call) -> None:
        """Cancel a call; its reader gets the end of it."""
        call.is_left = True
        if not call.is_sent:
            self._end(call, ConfigError("the request was cancelled before it started."))
        elif self._child is not None:
            self._child.send(Cancel(call.number))

    async def aclose(self) -> None:
        await self._shut("closed")

    async def unload(self) -> None:
        """Stop the process until `start` is called again."""
        await self._shut("unloaded")

    async def _shut(self, state: EngineState) -> None:
        self._state = state
        child, self._child = self._child, None
        if child is not None:
            await child.end()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        is_over = state == "closed"
        ends = NotReadyError("closed") if is_over else EngineLostError(", for it is unloaded")
        self._fail_all(ends)

    @property
    def _present(self) -> EngineChild:
        if self._child is None:
            raise NotReadyError(self._state)
        return self._child

    async def _spawn(self) -> EngineChild:
        began, limit = monotonic(), self._restarts.load_seconds
        load = msgspec.structs.replace(self._load, is_tried=self._state == "restarting")
        try:
            child = await EngineChild.started(
                load, hang_seconds=self._hang_seconds, load_seconds=limit
            )
        except LoadHungError:
            self._restarts.hung()
            raise
        self._restarts.loaded(monotonic() - began)
        self._child, self._card = child, child.card
        return child

    async def _supervise(self, child: EngineChild) -> None:
        """Run `_keep`; if it has a defect, fail all requests, so that no client waits for ever."""
        try:
            await self._keep(child)
        except Exception as error:
            self._state = "failed"
            self._fail_all(EngineLostError(f" ({type(error).__name__})"))
            raise

    async def _keep(self, child: EngineChild) -> None:
        """Process the engine's updates; restart it when it ends."""
        while True:
            async for update in child.updates():
                self._read(update)
            if self._state in ("closed", "unloaded"):
                return
            found = await self._start_again(await child.how_it_ended())
            if found is None:
                return
            child = found

    def _read(self, update: Update) -> None:
        self._status = update.status
        if update.status.state == "failed":
            # The process cannot continue after its engine failed. Its requests have not ended:
            # they may continue in the next process.
            self._present.kill()
            return
        for part in update.parts:
            call = self._calls.get(part.number)
            if call is None:
                continue
            if part.event is not None:
                self.blame.prove(call)
            else:
                del self._calls[part.number]
                if part.result is not None or part.ids is not None:
                    self.blame.clear(call)
            call.take(part)
        if self._waiting or self._prompts:
            self._go_on()

    def _end(self, call: Call, error: Exception) -> None:
        self._calls.pop(call.number, None)
        call.end(error=error)

    async def _start_again(self, how: str) -> EngineChild | None:
        """Restart the engine; return None if it is given up."""
        self._state = "restarting"
        sent = [call for call in self._calls.values() if call.is_sent]
        self._restarts.lost(is_own=not sent)
        self.blame.add(sent, is_certain=len(sent) == 1 and not self._can_move(sent[0]))
        self._sort(sent, how)
        try:
            while True:
                await self._restarts.pause()
                try:
                    child = await self._spawn()
                    break
                except Exception as error:  # noqa: BLE001 - memory may be short for a while
                    _LOG.error("the engine does not start: %s", error, exc_info=defect_in(error))
                    self._restarts.failed()
        except NotReadyError:
            self._state = "failed"
            self._fail_all(EngineLostError(f" ({how}), and again after each restart"))
            return None
        self._state = "ready"
        self._go_on()
        return child

    def _sort(self, sent: Sequence[Call], how: str) -> None:
        """Decide for each call that was in flight: refuse, end, move or continue it."""
        waiting = [call for call in self._waiting if not (call.is_sent or call.ended)]
        going: list[Call] = []
        for call in sent:
            was_proven = call.is_proven
            call.is_blamed = True
            call.take_back()
            if self.blame.refuses(call):
                self._end(call, KeptOutError())
            elif call.ended or call.is_left:
                self._end(call, ConfigError("the request was cancelled."))
            elif not self._can_move(call):
                self._end(call, EngineLostError(f" ({how})"))
            elif not (was_proven and self._gives_up(call)):
                going.append(call)
        self._waiting.clear()
        self._wait(*going, *(call for call in waiting if not self._gives_up(call)))

    def _can_move(self, call: Call) -> bool:
        """Return whether another process can continue the call."""
        return isinstance(call, EncodeCall) or call.can_move(self.card)

    def _gives_up(self, call: Call) -> bool:
        """Offer a request to other ports; return whether one of them continues it."""
        number = call.number
        if isinstance(call, EncodeCall) or not self.on_loss(call):
            return False
        del self._calls[number]
        return True

    def _take_in(self, call: Call) -> None:
        """Submit a call, or let it wait while the engine restarts or others are tried."""
        self._calls[call.number] = call
        if self._state == "restarting" or self._waiting:
            self._wait(call)
        else:
            self._submit(call)

    def _wait(self, *calls: Call) -> None:
        """Let calls wait: prompts, which take less time, before requests."""
        self._waiting = deque(sorted(
            (*self._waiting, *calls),
            key=lambda call: (not call.is_sent, isinstance(call, ProcessStream)),
        ))  # fmt: skip

    def _go_on(self) -> None:
        """Submit waiting calls in order, up to one that must prove itself first."""
        self._admit()
        while self._waiting and self._state == "ready":
            first = self._waiting[0]
            if first.is_blamed and not first.ended:
                if not first.is_sent:
                    if isinstance(first, EncodeCall) and self._is_encoding:
                        return
                    self._submit(first)
                if not (first.is_proven or first.ended):
                    return
            self._waiting.popleft()
            if not (first.is_sent or first.ended):
                # It arrived while others were tried.
                self._submit(first)

    def _admit(self) -> None:
        """Make calls of as many prompts as may be encoded now."""
        present = [call for call in self._calls.values() if isinstance(call, EncodeCall)]
        for call in tuple(self._prompts):
            if len(present) >= _MOST_ENCODED:
                return
            if call.is_long and any(one.is_long for one in present):
                continue
            self._prompts.remove(call)
            if self.blame.refuses(call):
                call.end(error=KeptOutError())
                continue
            call.is_blamed = self.blame.knows(call)
            self._calls[call.number] = call
            self._wait(call)
            present.append(call)

    @property
    def _is_encoding(self) -> bool:
        calls = self._calls.values()
        return any(isinstance(call, EncodeCall) and call.is_sent for call in calls)

    def _submit(self, call: Call) -> None:
        """Send a call to the process. A call that cannot be sent ends with the error."""
        if isinstance(call, ProcessStream):
            own = self.card.numerics
            if call.written and call.numerics not in ("", own):
                why = ", and the one that replaced it would write another text"
                self._end(call, EngineLostError(why))
                return
            call.numerics = own
        else:
            call.limit(_ENCODE_RATIO * self._hang_seconds, self._overdue)
        call.is_sent = True
        try:
            self._present.send(call.command())
        except Exception as error:  # noqa: BLE001 - an error of this call alone
            self._end(call, error)

    async def _encoded(self, text: str, add_special: bool, chat: ChatPrompt | None) -> ChatIds:
        """Encode a prompt. Raises NotReadyError, QueueFullError if too many wait, KeptOutError,
        EngineLostError, and the errors that the process reports."""
        if self._state != "ready":
            raise NotReadyError(self._state)
        num = len(self._prompts) + len(self._calls) - self.num_in_flight
        if num >= MOST_PROMPTS:
            raise QueueFullError(num, 1)
        call = EncodeCall(Encode(next(self._numbers), text, add_special, chat))
        self._prompts.append(call)
        self._go_on()
        try:
            return await call.answer
        finally:
            if call in self._prompts:
                self._prompts.remove(call)
            elif not call.ended:
                self.leave(call)

    def _overdue(self, call: EncodeCall) -> None:
        """End a process that has not encoded a prompt in time; the prompt is blamed for its end."""
        if self._state != "ready":
            return
        # Nothing more is sent to it.
        self._state = "restarting"
        late = EngineLostError(" (its prompt was not encoded in time)")
        call.end(error=KeptOutError() if call.is_blamed else late)
        self._present.abort()

    def _fail_all(self, error: OutriderError) -> None:
        for call in (*self._calls.values(), *self._prompts):
            self._end(call, error)
        self._prompts.clear()
