# pyright: basic, reportMissingImports=false
"""A replica: one engine in a thread of an actor, which Ray watches and restarts.

The engine needs no child process of its own: if it crashes, only the actor's process ends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from ray import serve

from outrider.api.llm import LLM
from outrider.core.errors import MachineError
from outrider.plugins.cluster.settings import read_args
from outrider.server.port import EngineCard, EngineLostError, Part, Submit, failure_of
from outrider.server.thread_port import LaneLoad, ThreadPort

# A job that takes longer is considered hung. Reading a long prompt takes many jobs.
HANG_SECONDS = 300.0


class Writer(Struct, frozen=True):
    """The replica that writes the parts of an answer: its arithmetic, number and name."""

    numerics: str
    engine: int
    replica: str


# Ray pickles arguments and results. It only gets bytes of msgpack and numbers to pickle, and
# unpickling those runs no code (ADR 0015).
packed = msgspec.msgpack.encode
SUBMITS: msgspec.msgpack.Decoder[Submit] = msgspec.msgpack.Decoder(Submit)
PARTS: msgspec.msgpack.Decoder[Part] = msgspec.msgpack.Decoder(Part)
WRITERS: msgspec.msgpack.Decoder[Writer] = msgspec.msgpack.Decoder(Writer)
CARDS: msgspec.msgpack.Decoder[EngineCard] = msgspec.msgpack.Decoder(EngineCard)


class Engine:
    """The replica's actor. The gateway calls its methods through a deployment handle
    (handle_port.py)."""

    # Ray waits for `__init__` and routes no request to the replica before.
    async def __init__(self, args: Mapping[str, Any]) -> None:  # pyright: ignore[reportGeneralTypeIssues]
        options = read_args(args)
        own = serve.get_replica_context()
        lanes = LaneLoad()
        load = partial(
            LLM, options.model, draft=options.draft, config=options.engine, on_job=lanes.note
        )
        self._port = ThreadPort(load, max_queued=2 * options.per_replica, lanes=lanes)
        await self._port.start()
        numerics = self._port.card.numerics
        self._writer = Writer(numerics, own.rank.rank, own.replica_tag)

    async def card(self) -> bytes:
        return packed(self._port.card)

    async def stream(self, submit: bytes, blocks: Sequence[int]) -> AsyncGenerator[bytes]:
        """Yield the writer and the parts of an answer, one per round. `blocks` is only for the
        router, which has read it by now (prefix_router.py)."""
        del blocks
        asked = SUBMITS.decode(submit)
        yield packed(self._writer)
        try:
            if asked.numerics not in ("", self._writer.numerics):
                raise EngineLostError(", and the next one would write another text")
            stream = self._port.stream(asked.request)
        except Exception as error:  # noqa: BLE001 - an error of a request ends that request alone
            yield packed(Part(asked.number, failure=failure_of(error)))
            return
        async with aclosing(stream.parts(asked.number)) as parts:
            async for part in parts:
                yield packed(part)

    async def check_health(self) -> None:
        """Report the engine's health; Ray calls this periodically. Raises MachineError if the
        engine has failed or hangs."""
        status = self._port.status
        if status.state == "failed" or self._port.job_seconds > HANG_SECONDS:
            raise MachineError(
                f"the engine is {status.state}; its current job has run for "
                f"{self._port.job_seconds:.0f} s."
            )
