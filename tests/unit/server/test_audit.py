"""Audits: what is run again, that it gives way, and how a difference is told."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from doubles.asgi_client import Client, Got
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import app_of, run, site_with
from outrider.plugins import metrics
from outrider.plugins.metrics import Auditor
from outrider.server.port import EngineRequest
from outrider.server.site import Site

GREEDY = {"prompt": "x", "temperature": 0}
SECRET = "a secret text"


def answer(request: EngineRequest) -> tuple[str, ...]:
    """Only what a mistake in verification would change: drafts make another text of `differ`."""
    if request.params.speculative is not False and request.prompt_ids[-1] == ord("d"):
        return (SECRET, "x")
    return (SECRET, "y")


def nothing(_: EngineRequest) -> tuple[str, ...]:
    return ()


class Audited:
    """A server over a scripted engine that audits everything, unless `draw` says otherwise."""

    def __init__(self, port: ScriptedPort, draw: Callable[[], float] = lambda: 0.0) -> None:
        self.port, self.outcomes = port, Counter[str]()
        self.site: Site = site_with(port)
        self.app = app_of(self.site)
        self.auditor = Auditor(self.site, 0.5, self._tell, draw)
        self.site.observers.append(self.auditor)

    def _tell(self, outcome: str, model: str) -> None:
        assert model == "scripted"
        self.outcomes[outcome] += 1

    async def ask(self, **more: Any) -> Got:
        return await Client(self.app).ask("/v1/completions", GREEDY | more)

    @property
    def audits(self) -> list[EngineRequest]:
        return [one for one in self.port.requests if one.params.speculative is False]


def audited(work: Callable[[Audited], Awaitable[None]], port: ScriptedPort | None = None) -> None:
    async def once() -> None:
        server = Audited(port or ScriptedPort(answer))
        running = asyncio.ensure_future(server.auditor.run())
        try:
            await work(server)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    run(once())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_the_same_text_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: Audited) -> None:
        for seed in range(30):
            await server.ask(seed=seed, temperature=seed % 2)
        await until(lambda: server.outcomes["same"] == 30)
        assert "warning" not in (await Client(server.app).ask("/health")).json()

    audited(work)
    assert not caplog.records


def test_another_text_is_told_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: Audited) -> None:
        got = await server.ask(prompt="d", seed=5)
        await until(lambda: server.outcomes["different"] == 1)
        assert got.headers["x-request-id"] in caplog.text
        assert (await Client(server.app).ask("/health")).json()["warning"].startswith("1 audited")

    with caplog.at_level(logging.ERROR):
        audited(work)
    assert f"from token {len(SECRET)} of {len(SECRET) + 1} on" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1},
        {"speculative": False},
        {"temperature": 1, "seed": 1, "speculative": {"sampler": "block"}},
    ],
    ids=str,
)
def test_what_is_not_promised_is_not_audited(asked: dict[str, Any]) -> None:
    async def work(server: Audited) -> None:
        if asked.get("speculative") is False:
            # Nothing was drafted.
            server.port.answer = nothing
        await server.ask(**asked)
        await asyncio.sleep(0.05)
        assert not server.outcomes
        assert not any(server.audits) or asked == {"speculative": False}

    audited(work)


def test_only_the_share_is_audited() -> None:
    numbers = iter([0.4, 0.6, 0.49, 0.5] * 5)

    async def work(server: Audited) -> None:
        for _ in range(20):
            await server.ask()
        await until(lambda: server.outcomes["same"] == 10)

    async def once() -> None:
        server = Audited(ScriptedPort(answer), lambda: next(numbers))
        running = asyncio.ensure_future(server.auditor.run())
        await work(server)
        running.cancel()
        assert len(server.audits) == 10

    run(once())


def test_an_audit_gives_way_and_comes_again() -> None:
    async def work(server: Audited) -> None:
        port = await _begun(server)
        with server.site.slot(""):
            await until(lambda: port.streams[-1].was_cancelled)
            await asyncio.sleep(0.05)
            assert len(server.audits) == 1
        assert port.pause is not None
        port.pause.set()
        await until(lambda: server.outcomes["same"] == 1)
        assert len(server.audits) == 2

    audited(work)


def test_who_is_always_interrupted_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MOST_TRIES", 1)

    async def work(server: Audited) -> None:
        await _begun(server)
        with server.site.slot(""):
            await until(lambda: server.outcomes["dropped"] == 1)

    audited(work)


async def _begun(server: Audited) -> ScriptedPort:
    """An audit has begun, and is at its first round."""
    with server.site.slot(""):
        await server.ask()
        server.port.pause = asyncio.Event()
    await until(lambda: len(server.audits) == 1)
    return server.port


def test_few_wait_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MOST_WAITING", 3)

    async def work(server: Audited) -> None:
        with server.site.slot(""):
            for _ in range(9):
                await server.ask()
            await asyncio.sleep(0.05)
            assert not server.audits
        # One of them had been taken from those that wait.
        await until(lambda: server.outcomes.total() == 9)
        assert server.outcomes["dropped"] in (5, 6)

    audited(work)


def test_an_engine_that_fails_an_audit_fails_nothing_else() -> None:
    async def work(server: Audited) -> None:
        await server.ask()
        server.port.error = RuntimeError("the engine ended")
        await until(lambda: server.outcomes["failed"] == 1)
        server.port.error = None
        await server.ask()
        await until(lambda: server.outcomes["same"] == 1)

    audited(work)


def test_an_audit_asks_for_the_text_alone() -> None:
    async def work(server: Audited) -> None:
        more = {"logprobs": 2, "speculative": {"drafter": "ngram", "k": 2, "trace": True}}
        await server.ask(seed=3, temperature=1, max_time=9, **more)
        await until(lambda: server.outcomes["same"] == 1)
        asked, plain = server.port.requests
        assert (plain.params.seed, plain.params.sampler) == (3, "coupled")
        assert plain.prompt_ids == asked.prompt_ids
        assert (plain.params.logprobs, plain.params.round_events) == (False, False)
        assert plain.params.max_time == 0
        assert (plain.params.drafter, plain.params.k) == (None, None)

    audited(work)
