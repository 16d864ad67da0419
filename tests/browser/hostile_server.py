"""The real server over a scripted engine that is hostile: its name, drafters and every token are
payloads. `python tests/browser/hostile_server.py PORT`, by the program's own Python."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

sys.path.append(str(Path(__file__).parents[1]))

from browser.hostile import PAYLOADS
from doubles import scripted_port
from doubles.scripted_port import Letters, ScriptedPort, ScriptedStream
from outrider.api.result import TextEvent
from outrider.core.draft import Budget, Choice, NodeTrace, RoundEvent, RoundTrace
from outrider.plugins.metrics import Metrics, metric_routes
from outrider.server.access import Address, DoorRules
from outrider.server.app import all_routes, make_app
from outrider.server.port import EngineCard, EngineRequest
from outrider.server.run import run_server
from outrider.server.site import Site

NAME = PAYLOADS[4]
CARD = replace(
    scripted_port.CARD,
    model=NAME,
    drafter=PAYLOADS[8],
    drafters=(PAYLOADS[8], *PAYLOADS[10:14]),
    sampler=PAYLOADS[9],
    facts={PAYLOADS[0]: PAYLOADS[1]},
    notes=(PAYLOADS[2],),
)


class Words(Letters):
    """A token is a payload."""

    def token_bytes(self, token_id: int) -> bytes | None:
        return PAYLOADS[token_id % len(PAYLOADS)].encode()

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        del skip_special
        return "".join(PAYLOADS[i % len(PAYLOADS)] for i in ids)


class HostileStream(ScriptedStream):
    """A round for each payload: another one was refused before it."""

    def _event(self, text: str) -> TextEvent:
        i = PAYLOADS.index(text)
        nodes = (
            NodeTrace((i + 1) % len(PAYLOADS), -1, 0.1, 0.5, "refused", None, 0.2, 0.9),
            NodeTrace(i, -1, 0.6, None, "recovered", None, None, 0.4),
        )
        trace = RoundTrace(0, i, PAYLOADS[i], 1, 1, 0, 1, 0, 1, 0, 1e-3, 4e-3, 1e-3)
        budget = Budget(1, why=text, choice=Choice("gain", 1.5, 0.01, 1.2))
        event = RoundEvent(trace, nodes, budget)
        return TextEvent((i,), ("recovered",), (text,), (), (event,))


class HostilePort(ScriptedPort):
    def __init__(self, answer: Callable[[EngineRequest], Sequence[str]]) -> None:
        super().__init__(answer)
        self.decoder = Words()

    @property
    def card(self) -> EngineCard:
        return CARD

    def stream(self, request: EngineRequest) -> HostileStream:
        return HostileStream(self, request)


async def main(port: int) -> None:
    engine = HostilePort(lambda _request: PAYLOADS)
    site = Site(port=engine, names=(NAME,))
    metrics = Metrics(lambda: {NAME: engine.status})
    site.observers.append(metrics)
    app = make_app(site, DoorRules(), all_routes(site, metric_routes(metrics)))
    address = Address(host="127.0.0.1", port=port)
    await run_server(app, site, address, load=_nothing, ready=_ready)


async def _nothing() -> None:
    """The engine is there."""


def _ready() -> None:
    """Whoever waits for it asks /ready."""


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
