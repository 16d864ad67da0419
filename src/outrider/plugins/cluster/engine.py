# pyright: basic, reportMissingImports=false
"""A replica: one engine in a thread of an actor, which Ray watches and starts anew.

The actor is the process that ends with its engine, so none is put below it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from ray import serve

from outrider.api.llm import LLM
from outrider.api.structure import StructureOptions
from outrider.core.errors import MachineError
from outrider.plugins.cluster.pieces import HANDED, Handed, Piece, packed
from outrider.plugins.cluster.settings import read_args
from outrider.server.frames import Failure, failure_of
from outrider.server.lane_load import LaneLoad
from outrider.server.port import EngineRequest, is_repeatable
from outrider.server.thread_port import ThreadPort

# A job that takes longer is one that hangs. Reading a long prompt is many jobs.
HANG_SECONDS = 300.0
OTHER_NUMERICS = "OtherNumerics"


class Engine:
    """Its methods are called through a deployment handle (handle_port.py)."""

    # Ray waits for it, and routes nothing here before.
    async def __init__(self, args: Mapping[str, Any]) -> None:  # pyright: ignore[reportGeneralTypeIssues]
        told = read_args(args)
        own = serve.get_replica_context()
        self._who = partial(Piece, engine=own.rank.rank, replica=own.replica_tag)
        lanes = LaneLoad()
        load = partial(LLM, told.model, draft=told.draft, config=told.engine, on_job=lanes.note)
        self._port = ThreadPort(load, max_queued=2 * told.per_replica, lanes=lanes)
        await self._port.start()

    async def card(self) -> bytes:
        return packed(self._port.card)

    async def stream(self, handed: bytes, blocks: Sequence[int]) -> AsyncGenerator[bytes]:
        """The pieces of a request, one a round; `blocks` are for the router, which has read them
        (prefix_router.py)."""
        del blocks
        asked = HANDED.decode(handed)
        card = self._port.card
        yield packed(self._who(numerics=card.numerics))
        if asked.numerics not in ("", card.numerics):
            failure = Failure(OTHER_NUMERICS, "this engine computes in another way")
            yield packed(Piece(failure=failure))
            return
        try:
            stream = self._port.stream(_request(asked))
        except Exception as error:  # noqa: BLE001 - a request's mistake is its own
            yield packed(Piece(failure=failure_of(error)))
            return
        goes_on = is_repeatable(card, asked.submit.params)
        try:
            async for event in stream:
                rounds = stream.rounds(len(event.token_ids)) if goes_on else []
                yield packed(Piece(event=event, rounds=rounds))
            last = Piece(result=stream.result)
        except Exception as error:  # noqa: BLE001 - a request's mistake is its own
            last = Piece(failure=failure_of(error))
        finally:
            stream.cancel()
        yield packed(last)

    async def check_health(self) -> None:
        """Ray asks now and then. Raises MachineError for an engine that is of no use any more."""
        status = self._port.status
        if status.state == "failed" or self._port.job_seconds > HANG_SECONDS:
            raise MachineError(f"the engine is {status.state}, and has been at a job for long.")


def _request(asked: Handed) -> EngineRequest:
    submit = asked.submit
    return EngineRequest(
        prompt_ids=submit.prompt_ids,
        params=submit.params,
        structure=cast("StructureOptions", submit.structure),
        sample=submit.sample,
        cache_salt=submit.cache_salt,
        key=submit.key,
        weight=submit.weight,
        written=submit.written,
    )
