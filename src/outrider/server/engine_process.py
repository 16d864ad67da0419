"""The engine in its own process, which placed.py starts.

Its first argument is the file descriptor of its end of a socket pair. It loads the model named by
the first frame, runs requests, and sends one frame per round. When the server's end of the pair
closes, for whatever reason, the process ends too.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, cast

from outrider.api.llm import LLM
from outrider.api.prompts import ChatIds
from outrider.api.result import GenerationResult
from outrider.api.structure import StructureOptions
from outrider.core.errors import MachineError, OutriderError, Wordless, hear_compilers, tell_of_task
from outrider.core.params import SamplingParams
from outrider.server.frames import (
    COMMANDS,
    Cancel,
    Encode,
    Encoded,
    Failure,
    Load,
    Lost,
    Ready,
    Report,
    Submit,
    Update,
    Wrote,
    failure_of,
    frame,
    read_frame,
)
from outrider.server.lane_load import LaneLoad
from outrider.server.port import EnginePort, EngineRequest, is_repeatable
from outrider.server.thread_port import ThreadPort, ThreadStream

BEAT_SECONDS = 1.0
# An engine in the midst of a long job may not end in time.
_CLOSE_SECONDS = 10.0
# The first token is of the prompt's pass; later ones are of rounds that may draft.
_TRIED_TOKENS = 4


class EngineProcess:
    """An engine that serves one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._streams: dict[int, ThreadStream] = {}
        self._events: list[Wrote] = []
        self._ended: list[tuple[int, GenerationResult | None, Failure | None]] = []
        self._has_news = asyncio.Event()
        # Cleared while the server does not read: events then wait, and merge, in the engine.
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        load = COMMANDS.decode(await read_frame(self._reader))
        if not isinstance(load, Load):
            raise EOFError("the first frame does not name a model")
        lanes = LaneLoad()
        make = partial(_opened, load, lanes)
        self._port = ThreadPort(make, max_queued=load.max_queued, lanes=lanes)
        try:
            await self._port.start()
            if load.is_tried:
                await try_out(self._port)
        except Exception as error:  # noqa: BLE001 - the server reports it
            await self._send(Lost(failure_of(error)))
            return
        await self._send(Ready(self._port.card))
        self._start(self._report())
        self._start(self._beat())
        try:
            while True:
                self._obey(COMMANDS.decode(await read_frame(self._reader)))
        finally:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._port.aclose(), _CLOSE_SECONDS)

    def _obey(self, command: object) -> None:
        match command:
            case Submit(number=number):
                # Registered immediately, so that a cancellation right after it finds it.
                try:
                    self._streams[number] = self._port.stream(_request(command))
                except Exception as error:  # noqa: BLE001 - an error of this request only
                    self._ended.append((number, None, failure_of(error)))
                    self._has_news.set()
                else:
                    goes_on = is_repeatable(self._port.card, command.params)
                    self._start(self._follow(number, self._streams[number], goes_on))
            case Cancel(number=number):
                if number in self._streams:
                    self._streams[number].cancel()
            case Encode():
                self._start(self._encode(command))
            case _:
                raise EOFError("an unexpected frame")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, number: int, stream: ThreadStream, goes_on: bool) -> None:
        result, failure = None, None
        try:
            async for event in stream:
                rounds = stream.rounds(len(event.token_ids)) if goes_on else []
                self._events.append(Wrote(number, event, rounds))
                if stream.has_ended:
                    # Sent in one frame with the end: a client with the whole text sees its end.
                    continue
                self._has_news.set()
                await self._is_open.wait()
            result = stream.result
        except Exception as error:  # noqa: BLE001 - an error of this request only
            failure = failure_of(error)
        finally:
            self._streams.pop(number, None)
        self._ended.append((number, result, failure))
        self._has_news.set()

    async def _encode(self, asked: Encode) -> None:
        try:
            if asked.chat is not None:
                found = await self._port.encode_chat(asked.chat)
            else:
                ids = await self._port.encode(asked.text, add_special=asked.add_special)
                found = ChatIds(ids)
            answer = Encoded(asked.number, found)
        except Exception as error:  # noqa: BLE001 - an error of this prompt only
            answer = Encoded(asked.number, ChatIds([]), failure_of(error))
        await self._send(answer)

    async def _report(self) -> None:
        """Send everything since the last frame in one frame, at least once a second."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            events, self._events = self._events, []
            ended, self._ended = self._ended, []
            update = Update(events, ended, self._port.status, self._port.job_seconds)
            self._is_open.clear()
            await self._send(update)
            self._is_open.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._has_news.set()

    async def _send(self, report: Report) -> None:
        self._writer.write(frame(report))
        # If the server is gone, the reader of frames notices it.
        with suppress(ConnectionError):
            await self._writer.drain()


async def try_out(port: EnginePort) -> None:
    """Generate a short text as a test. Raises MachineError if the engine fails."""
    params = SamplingParams(max_tokens=_TRIED_TOKENS, ignore_eos=True)
    ids = await port.encode("a")
    # A refused request is no failure: a drafter may require more of a request.
    with suppress(OutriderError):
        async for _ in port.stream(EngineRequest(prompt_ids=ids, params=params, structure={})):
            pass
    if port.status.state != "ready":
        raise MachineError("the engine fails at its first text.")


def _opened(load: Load, lanes: LaneLoad) -> LLM:
    config = load.placement.shared(load.config)
    return LLM(load.model, draft=load.draft, config=config, on_job=lanes.note)


def _request(asked: Submit) -> EngineRequest:
    return EngineRequest(
        prompt_ids=asked.prompt_ids,
        params=asked.params,
        structure=cast("StructureOptions", asked.structure),
        sample=asked.sample,
        cache_salt=asked.cache_salt,
        key=asked.key,
        weight=asked.weight,
        written=asked.written,
    )


async def _run(number: int) -> None:
    asyncio.get_running_loop().set_exception_handler(tell_of_task)
    end = socket.socket(fileno=number)
    reader, writer = await asyncio.open_connection(sock=end)
    with suppress(EOFError, ConnectionError):
        await EngineProcess(reader, writer).run()


def main() -> None:
    # A hung process is ended by SIGABRT; faulthandler then logs the stack of every thread.
    faulthandler.enable()
    handler = logging.StreamHandler()
    handler.addFilter(Wordless())
    logging.basicConfig(handlers=[handler], format="outrider: %(message)s")
    hear_compilers()
    status = 0
    try:
        asyncio.run(_run(int(sys.argv[1])))
    except BaseException as error:
        logging.getLogger(__name__).error("the engine's process ends", exc_info=error)
        status = 1
    sys.stderr.flush()
    # os._exit does not wait for threads that are inside native code.
    os._exit(status)
