# pyright: basic, reportMissingImports=false
"""A replica: one engine in a thread of an actor, which Ray watches and restarts.

The engine needs no child process of its own: if it crashes, only the actor's process ends.
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

# A job that takes longer is considered hung. Reading a long prompt takes many jobs.
HANG_SECONDS = 300.0
OTHER_NUMERICS = "OtherNumerics"


class Engine:
    """The replica's actor. The gateway calls its methods through a deployment handle
    (handle_port.py)."""

    # Ray waits for `__init__` and routes no request to the replica before.
    async def __init__(self, args: Mapping[str, Any]) -> None:  # pyright: ignore[reportGeneralTypeIssues]
        options = read_args(args)
        own = serve.get_replica_context()
        self._who = partial(Piece, engine=own.rank.rank, replica=own.replica_tag)
        lanes = LaneLoad()
        load = partial(
            LLM, options.model, draft=options.draft, config=options.engine, on_job=lanes.note
        )
        self._port = ThreadPort(load, max_queued=2 * options.per_replica, lanes=lanes)
        await self._port.start()

    async def card(self) -> bytes:
        return packed(self._port.card)

    async def stream(self, handed: bytes, blocks: Sequence[int]) -> AsyncGenerator[bytes]:
        """Yield the pieces of a request, one per round. `blocks` is only for the router, which
        has read it by now (prefix_router.py)."""
        del blocks
        request = HANDED.decode(handed)
        card = self._port.card
        yield packed(self._who(numerics=card.numerics))
        if request.numerics not in ("", card.numerics):
            failure = Failure(OTHER_NUMERICS, "this engine's arithmetic differs")
            yield packed(Piece(failure=failure))
            return
        try:
            stream = self._port.stream(_request(request))
        except Exception as error:  # noqa: BLE001 - an error of a request ends that request alone
            yield packed(Piece(failure=failure_of(error)))
            return
        goes_on = is_repeatable(card, request.submit.params)
        try:
            async for event in stream:
                rounds = stream.rounds(len(event.token_ids)) if goes_on else []
                yield packed(Piece(event=event, rounds=rounds))
            last = Piece(result=stream.result)
        except Exception as error:  # noqa: BLE001 - an error of a request ends that request alone
            last = Piece(failure=failure_of(error))
        finally:
            stream.cancel()
        yield packed(last)

    async def check_health(self) -> None:
        """Report the engine's health; Ray calls this periodically. Raises MachineError if the
        engine has failed or hangs."""
        status = self._port.status
        if status.state == "failed" or self._port.job_seconds > HANG_SECONDS:
            raise MachineError(
                f"the engine is {status.state}; its current job has run for "
                f"{self._port.job_seconds:.0f} s."
            )


def _request(handed: Handed) -> EngineRequest:
    submit = handed.submit
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
