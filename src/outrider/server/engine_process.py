"""The engine's process: `python -m outrider.server.engine_process FD`.

FD is the file descriptor of its end of a socket pair. It loads the model named by the first frame,
runs requests, and sends one frame per round. When the server's end of the pair closes, for whatever
reason, the process ends too.
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
from typing import TYPE_CHECKING, Any

from outrider.api.callers import ChatIds
from outrider.core import early
from outrider.core.env import show_gpu
from outrider.core.errors import MachineError, OutriderError, Wordless, hear_compilers, tell_of_task
from outrider.core.params import SamplingParams
from outrider.core.process import keep_objects
from outrider.models.gguf.packing import packer_for
from outrider.server.port import (
    COMMANDS,
    Cancel,
    Encode,
    EnginePort,
    EngineRequest,
    Load,
    Lost,
    Part,
    Ready,
    Report,
    Submit,
    Update,
    failure_of,
    frame,
    received,
)

if TYPE_CHECKING:
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
        self._parts: list[Part] = []
        self._has_news = asyncio.Event()
        # Cleared while the server does not read: events then wait, and merge, in the engine.
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        load = await received(self._reader, COMMANDS)
        if not isinstance(load, Load):
            raise EOFError("the first frame does not name a model")
        port = _port(load)
        try:
            await port.start()
            if load.is_tried:
                await try_out(port)
        except Exception as error:  # noqa: BLE001 - the server reports it
            await self._send(Lost(failure_of(error)))
            return
        await self._send(Ready(port.card))
        keep_objects()
        self._start(self._report(port))
        self._start(self._beat())
        try:
            while True:
                self._obey(port, await received(self._reader, COMMANDS))
        finally:
            with suppress(TimeoutError):
                await asyncio.wait_for(port.aclose(), _CLOSE_SECONDS)

    def _obey(self, port: ThreadPort, command: object) -> None:
        match command:
            case Submit(number=number):
                # Registered immediately, so that a cancellation right after it finds it.
                try:
                    self._streams[number] = port.stream(command.request)
                except Exception as error:  # noqa: BLE001 - an error of this request only
                    self._tell(Part(number, failure=failure_of(error)))
                else:
                    self._start(self._follow(number, self._streams[number]))
            case Cancel(number=number):
                if number in self._streams:
                    self._streams[number].cancel()
            case Encode():
                self._start(self._encode(port, command))
            case _:
                raise EOFError("an unexpected frame")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, part: Part) -> None:
        self._parts.append(part)
        self._has_news.set()

    async def _follow(self, number: int, stream: ThreadStream) -> None:
        async for part in stream.parts(number):
            if part.event is not None and stream.has_ended:
                # Sent in one frame with the end: a client with the whole text sees its end.
                self._parts.append(part)
                continue
            self._tell(part)
            await self._is_open.wait()
        del self._streams[number]

    async def _encode(self, port: ThreadPort, asked: Encode) -> None:
        try:
            if asked.chat is not None:
                found = await port.encode_chat(asked.chat)
            else:
                found = ChatIds(await port.encode(asked.text, add_special=asked.add_special))
            self._tell(Part(asked.number, ids=found))
        except Exception as error:  # noqa: BLE001 - an error of this prompt only
            self._tell(Part(asked.number, ids=ChatIds([]), failure=failure_of(error)))

    async def _report(self, port: ThreadPort) -> None:
        """Send everything since the last frame in one frame, at least once a second."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            parts, self._parts = self._parts, []
            self._is_open.clear()
            await self._send(Update(parts, port.status, port.job_seconds))
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


def _port(load: Load) -> ThreadPort:
    """Return the port of an engine, which is not loaded yet."""
    if load.placement.gpu is not None:
        show_gpu(load.placement.gpu)
    else:
        early.load_library()
        early.begin(load.model, packer_for(load.config))
    # Imported here: PyTorch counts the available cores and GPUs when it is loaded.
    from outrider.api.llm import LLM
    from outrider.server.thread_port import LaneLoad, ThreadPort

    lanes = LaneLoad()

    def loaded() -> LLM:
        config = load.placement.shared(load.config)
        try:
            return LLM(load.model, draft=load.draft, config=config, on_job=lanes.note)
        finally:
            early.end()

    return ThreadPort(loaded, max_queued=load.max_queued, lanes=lanes)


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


if __name__ == "__main__":
    main()
