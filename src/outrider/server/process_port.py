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

from outrider.api.prompts import ChatIds
from outrider.api.result import GenerationResult
from outrider.api.stream import TokenDecoder, pieces_of
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError, OutriderError, QueueFullError
from outrider.server.encode_queue import EncodeQueue
from outrider.server.engine_child import HANG_SECONDS, Blame, EngineChild, LoadHungError, Restarts
from outrider.server.frames import Cancel, Command, Encode, Load, Update, error_of, submit_of
from outrider.server.port import (
    ChatPrompt,
    EngineCard,
    EngineLostError,
    EngineRequest,
    EngineState,
    EngineStatus,
    NotReadyError,
    is_repeatable,
)
from outrider.server.process_stream import KeptOutError, ProcessStream

_LOG = logging.getLogger(__name__)
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
        self._streams: dict[int, ProcessStream] = {}
        # Requests that continue after a crash. The first may be running and is not proven yet.
        self._suspects: deque[ProcessStream] = deque()
        # Several ports may share it.
        self.blame = Blame()
        self._prompts = EncodeQueue(
            self._send,
            self._abort,
            waits=lambda: self._is_trying,
            blame=lambda: self.blame,
            seconds=_ENCODE_RATIO * hang_seconds,
        )
        self.on_loss: Callable[[ProcessStream], bool] = lambda _: False
        """Called after a crash with each request that did not cause it. Returns whether another
        port continues the request (`adopt`)."""
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

    async def decode(self, ids: Sequence[int]) -> list[str]:
        return await asyncio.to_thread(pieces_of, self.decoder, ids)

    def stream(self, request: EngineRequest) -> ProcessStream:
        """Start a request. It waits while the engine restarts, and while earlier requests are tried
        one by one after a crash. Raises KeptOutError and the errors of all ports."""
        if self._state not in ("ready", "restarting"):
            raise NotReadyError(self._state)
        # Requests whose clients left end within a round, so they do not count.
        held = sum(not stream.is_left for stream in self._streams.values())
        if held >= self._load.max_queued:
            raise QueueFullError(held, 1)
        stream = ProcessStream(next(self._numbers), request, self.leave)
        if self.blame.kept_out and stream.kind in self.blame.kept_out:
            raise KeptOutError
        self._take_in(stream)
        return stream

    def release(self, stream: ProcessStream) -> None:
        """Remove a request so that another port can `adopt` it."""
        del self._streams[stream.number]
        if stream.is_sent:
            self._present.send(Cancel(stream.number))
        if stream in self._suspects:
            self._suspects.remove(stream)
        stream.is_sent = stream.is_proven = False

    def adopt(self, stream: ProcessStream) -> None:
        """Continue a request that another port has lost or released."""
        stream.number, stream.leave = next(self._numbers), self.leave
        self._take_in(stream)

    @property
    def streams(self) -> tuple[ProcessStream, ...]:
        """Requests in flight."""
        return tuple(self._streams.values())

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    def _take_in(self, stream: ProcessStream) -> None:
        self._streams[stream.number] = stream
        try:
            if self._state == "restarting" or self._suspects or self._prompts.is_on_trial:
                self._suspects.append(stream)
            else:
                self._submit(stream)
        except BaseException:
            del self._streams[stream.number]
            raise

    def leave(self, stream: ProcessStream) -> None:
        """Cancel a request; its reader gets the end of it."""
        stream.is_left = True
        if stream.is_sent:
            self._present.send(Cancel(stream.number))
        else:
            self._end(stream, error=ConfigError("the request was cancelled before it started."))

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

    def _send(self, command: Command) -> None:
        self._present.send(command)

    def _abort(self) -> None:
        self._present.abort()

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
        """Process the engine's reports; restart it when it ends."""
        while True:
            async for report in child.reports():
                if isinstance(report, Update):
                    self._take(report)
                else:
                    error = None if report.error is None else error_of(report.error)
                    self._prompts.answer(report.number, report.found, error)
                    self._go_on()
            if self._state in ("closed", "unloaded"):
                return
            found = await self._start_again(await child.how_it_ended())
            if found is None:
                return
            child = found

    def _take(self, report: Update) -> None:
        self._status = report.status
        if report.status.state == "failed":
            # The process cannot continue after its engine failed. Its requests have not ended:
            # they may continue in the next process.
            self._present.kill()
            return
        for wrote in report.events:
            stream = self._streams.get(wrote.number)
            if stream is not None:
                self.blame.prove(stream)
                stream.take(wrote.event, wrote.rounds)
        for number, result, failure in report.ended:
            if number in self._streams:
                error = None if failure is None else error_of(failure)
                self._end(self._streams[number], result=result, error=error)
        if self._suspects:
            self._go_on()

    def _end(
        self,
        stream: ProcessStream,
        *,
        result: GenerationResult | None = None,
        error: Exception | None,
    ) -> None:
        self._streams.pop(stream.number, None)
        stream.is_proven = True
        if result is not None:
            self.blame.clear(stream)
        stream.end(result=result, error=error)

    async def _start_again(self, how: str) -> EngineChild | None:
        """Restart the engine; return None if it is given up."""
        self._state = "restarting"
        sent = [one for one in self._streams.values() if one.is_sent]
        num = len(sent) + self._prompts.lost()
        self._restarts.lost(is_own=num == 0)
        self.blame.add(sent, is_certain=num == 1 and all(map(self._is_over, sent)))
        self._sort(sent, how)
        try:
            while True:
                await self._restarts.pause()
                try:
                    child = await self._spawn()
                    break
                except Exception as error:  # noqa: BLE001 - memory may be short for a while
                    _LOG.error("the engine does not start: %s", error)
                    self._restarts.failed()
        except NotReadyError:
            self._state = "failed"
            self._fail_all(EngineLostError(f" ({how}), and again after each restart"))
            return None
        self._state = "ready"
        self._go_on()
        return child

    def _sort(self, sent: Sequence[ProcessStream], how: str) -> None:
        """Decide for each request that was in flight: refuse, end, move or continue it."""
        waiting = [one for one in self._suspects if not one.is_sent]
        going: list[ProcessStream] = []
        for stream in sent:
            was_proven = stream.is_proven
            stream.is_blamed, stream.is_sent, stream.is_proven = True, False, False
            if stream.kind in self.blame.kept_out:
                self._end(stream, error=KeptOutError())
            elif stream.is_left:
                self._end(stream, error=ConfigError("the request was cancelled."))
            elif self._is_over(stream):
                self._end(stream, error=EngineLostError(f" ({how})"))
            elif not (was_proven and self._gives_up(stream)):
                going.append(stream)
        self._suspects = deque([*going, *(one for one in waiting if not self._gives_up(one))])

    def _is_over(self, stream: ProcessStream) -> bool:
        """Return whether no other process can continue the text."""
        return bool(stream.written) and not is_repeatable(self.card, stream.request.params)

    def _gives_up(self, stream: ProcessStream) -> bool:
        """Offer the request to other ports; return whether one of them continues it."""
        number = stream.number
        if not self.on_loss(stream):
            return False
        del self._streams[number]
        return True

    def _go_on(self) -> None:
        """Submit prompts, then suspects in order, up to one that must prove itself first."""
        if self._state == "ready":
            self._prompts.go_on()
        while self._suspects and self._state == "ready" and not self._prompts.is_on_trial:
            first = self._suspects[0]
            if first.ended:
                self._suspects.popleft()
            elif not first.is_blamed:
                # It arrived while others were tried.
                self._submit(self._suspects.popleft())
            elif not first.is_sent:
                self._submit(first)
                if not first.ended:
                    return
            elif first.is_proven:
                self._suspects.popleft()
            else:
                return
        if self._state == "ready":
            # Prompts that arrived while a request was tried.
            self._prompts.go_on()

    @property
    def _is_trying(self) -> bool:
        """Return whether a request is tried alone, when no other work may crash the engine."""
        first = self._suspects[0] if self._suspects else None
        return first is not None and first.is_sent and not (first.is_proven or first.ended)

    def _submit(self, stream: ProcessStream) -> None:
        own = self.card.numerics
        if stream.written and stream.numerics not in ("", own):
            error = EngineLostError(", and the one that replaced it would write another text")
            self._end(stream, error=error)
            return
        stream.numerics, stream.is_sent = own, True
        progress = stream.progress
        progress.hand_in()
        submit = submit_of(stream.number, stream.request, stream.written, seconds=progress.seconds)
        self._present.send(submit)

    async def _encoded(self, text: str, add_special: bool, chat: ChatPrompt | None) -> ChatIds:
        if self._state != "ready":
            raise NotReadyError(self._state)
        return await self._prompts.ids(Encode(next(self._numbers), text, add_special, chat))

    def _fail_all(self, error: OutriderError) -> None:
        for stream in list(self._streams.values()):
            self._end(stream, error=error)
        self._prompts.fail(error)
