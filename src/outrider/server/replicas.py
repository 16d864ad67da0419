"""An `EnginePort` over several engine processes of one model: the router of one machine.

A request goes to the engine that has cached most of its prompt's beginning, unless that engine is
clearly busier than another; then it goes to the least busy one. When an engine dies, requests that
have written something continue at another engine of the same numerics, with the same text. Requests
that may have caused the crash wait for the engine's restart, where they are tried one by one.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from functools import partial
from itertools import count

import msgspec

from outrider.api.prompts import ChatIds
from outrider.api.stream import TokenDecoder
from outrider.core.errors import ConfigError, with_hint
from outrider.sched.admission import best_known, blocks_of, least_busy
from outrider.server.calls import ProcessStream
from outrider.server.engine_child import Blame
from outrider.server.port import (
    ChatPrompt,
    EngineCard,
    EngineRequest,
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


async def replace_on_hangup(ports: Sequence[ReplicasPort], seconds: float) -> None:
    """Restart all engines in turn at each SIGHUP (`systemctl reload`), each in `seconds`."""
    hangup, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        while True:
            await hangup.wait()
            hangup.clear()
            for port in ports:
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
            _LOG.error("engine %d does not start: %s", number, with_hint(error))


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
