"""An `EnginePort` over several engine processes of one model: the router of one machine.

A request goes where most of its prompt's beginning was read before, unless that engine has clearly
more to do than another; then it goes to the one with the least. When an engine dies, requests that
have written something go on at another of the same kind, with the same text; those that may have
ended it wait for its next start, where each has to prove itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import count, pairwise

import msgspec

from outrider.api.stream import TokenDecoder
from outrider.core.errors import ConfigError
from outrider.sched.routing import KnownBlocks, best_known, blocks_of, least_busy
from outrider.server.port import (
    ChatPrompt,
    EngineCard,
    EngineRequest,
    EngineState,
    EngineStatus,
    NotReadyError,
)
from outrider.server.process_port import ProcessPort
from outrider.server.process_stream import ProcessStream

# What all of them are is what the first of these is that any is.
_STATES: Sequence[EngineState] = (
    *("ready", "restarting", "loading"),
    *("unloaded", "closed", "failed"),
)


class Replica:
    """One engine, and which beginnings of prompts it has read."""

    def __init__(self, port: ProcessPort) -> None:
        self.port = port
        self.known = KnownBlocks()

    @property
    def num_in_flight(self) -> int:
        return self.port.num_in_flight


class ReplicasPort:
    """Engines that load the same model; each has its own device or cores (`Load`)."""

    def __init__(self, ports: Sequence[ProcessPort]) -> None:
        if not ports:
            raise ConfigError("there is no replica.", hint="at least one")
        self.replicas = tuple(map(Replica, ports))
        self._turns = count()
        kept_out: dict[bytes, None] = {}
        for replica in self.replicas:
            replica.port.on_loss = partial(self._move, replica)
            replica.port.kept_out = kept_out

    async def start(self) -> None:
        """One after another, for each plans its memory by what is free then. Raises what loading
        raises; none runs on then."""
        try:
            for replica in self.replicas:
                await replica.port.start()
            for one, other in pairwise(self.replicas):
                _check_alike(one.port.card, other.port.card)
        except BaseException:
            await self.aclose()
            raise

    @property
    def card(self) -> EngineCard:
        """That of all; the window is the smallest one's."""
        cards = [replica.port.card for replica in self.replicas]
        facts = dict(cards[0].facts, replicas=str(len(cards)))
        window = min(card.window for card in cards)
        return msgspec.structs.replace(cards[0], window=window, facts=facts)

    @property
    def status(self) -> EngineStatus:
        """As of one engine: ready where any is, and the sums of what they do."""
        found = tuple(replica.port.status for replica in self.replicas)
        return EngineStatus(
            state=next(state for state in _STATES if any(one.state == state for one in found)),
            num_running=sum(one.num_running for one in found),
            num_waiting=sum(one.num_waiting for one in found),
            kv_usage=sum(one.kv_usage for one in found) / len(found),
            num_preempted=sum(one.num_preempted for one in found),
            num_restarts=sum(one.num_restarts for one in found),
            lanes={
                f"{number}: {lane}": does
                for number, one in enumerate(found)
                for lane, does in one.lanes.items()
            },
            engines=found,
        )

    @property
    def decoder(self) -> TokenDecoder:
        return self.replicas[0].port.decoder

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        return await self._next_ready().port.encode(prompt, add_special=add_special)

    async def encode_chat(self, chat: ChatPrompt) -> list[int]:
        return await self._next_ready().port.encode_chat(chat)

    async def decode(self, ids: Sequence[int]) -> list[str]:
        return await self.replicas[0].port.decode(ids)

    def stream(self, request: EngineRequest) -> ProcessStream:
        blocks = list(blocks_of(request.prompt_ids, request.cache_salt))
        chosen = self._chosen(blocks)
        stream = chosen.port.stream(request)
        stream.engine = self.replicas.index(chosen)
        chosen.known.note(blocks)
        return stream

    async def aclose(self) -> None:
        await asyncio.gather(*(replica.port.aclose() for replica in self.replicas))

    async def unload(self) -> None:
        """End all of them until `start` is called again."""
        await asyncio.gather(*(replica.port.unload() for replica in self.replicas))
        for replica in self.replicas:
            replica.known.forget()

    def _ready(self) -> list[Replica]:
        return [one for one in self.replicas if one.port.status.state == "ready"]

    def _next_ready(self) -> Replica:
        """By turns. Where none is ready, the first one says so."""
        ready = self._ready() or self.replicas[:1]
        return ready[next(self._turns) % len(ready)]

    def _chosen(self, blocks: Sequence[int]) -> Replica:
        """Where none is ready, one that is being started, at which requests wait."""
        known = self._ready() or [
            one for one in self.replicas if one.port.status.state == "restarting"
        ]
        if not known:
            raise NotReadyError(self.status.state)
        return best_known(known, blocks)

    def _move(self, lost: Replica, stream: ProcessStream) -> bool:
        """Whether a request of the engine that was lost goes on at another one."""
        lost.known.forget()
        others = [one for one in self._ready() if one is not lost]
        if not others:
            return False
        to = least_busy(others)
        to.port.adopt(stream)
        stream.engine = self.replicas.index(to)
        to.known.note(list(blocks_of(stream.request.prompt_ids, stream.request.cache_salt)))
        return True


def _check_alike(one: EngineCard, other: EngineCard) -> None:
    """Raises ConfigError where two engines may write different texts."""
    differing = [
        name
        for name in ("model", "vocab_size", "num_parameters", "numerics", "drafter", "exact")
        if getattr(one, name) != getattr(other, name)
    ]
    if differing:
        raise ConfigError(
            f"replicas differ in {', '.join(differing)}: a text could not go on at another.",
            hint="devices of one kind, and the same model",
        )
