"""Models that come and go: the bound holds, turns are fair, what fails harms nobody, and what was
not used for long is unloaded until it is named again."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from math import inf

import pytest
from starlette.types import ASGIApp

from doubles.asgi_client import Client
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import QUICK, app_of, run
from outrider.core.errors import CheckpointError, ConfigError
from outrider.plugins import several_models as models
from outrider.plugins.several_models import Models, NotLoadedError
from outrider.server.params import keep_alive_of
from outrider.server.site import Limits, Site

CHAT = {"messages": [{"role": "user", "content": "x"}]}


class House:
    """Ports that tell how many are loaded at once, and in which order that was."""

    def __init__(self, names: str, most: int, keep_alive: float = inf) -> None:
        self.loads: list[str] = []
        self.num_loaded = self.most_seen = 0
        self.gate: asyncio.Event | None = None
        self.ports = {name: LoadedPort(self, name) for name in names}
        self.models = Models(self.ports, most, keep_alive)

    async def __aenter__(self) -> House:
        await self.models.start()
        self.loop = asyncio.ensure_future(self.models.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.loop.cancel()
        with suppress(asyncio.CancelledError):
            await self.loop

    async def until(self, name: str, state: str) -> None:
        while self.ports[name].state != state:
            await asyncio.sleep(0)

    def app(self, limits: Limits = QUICK) -> ASGIApp:
        first = next(iter(self.ports))
        return app_of(
            self.models.sites(Site(port=self.ports[first], names=(first,), limits=limits))
        )

    async def use(self, name: str, steps: int = 3) -> None:
        async with self.models.held(name):
            for _ in range(steps):
                assert self.ports[name].state == "ready"
                await asyncio.sleep(0)


class LoadedPort(ScriptedPort):
    def __init__(self, house: House, name: str) -> None:
        super().__init__(lambda _: (f"of {name}",))
        self.house, self.name, self.problem = house, name, False
        self.state = "loading"

    async def start(self) -> None:
        self.state = "loading"
        await asyncio.sleep(0)
        if self.house.gate is not None:
            await self.house.gate.wait()
        if self.problem:
            self.state = "failed"
            raise CheckpointError("/secret/model: no weights")
        self.state = "ready"
        self.house.loads.append(self.name)
        self.house.num_loaded += 1
        self.house.most_seen = max(self.house.most_seen, self.house.num_loaded)

    async def unload(self) -> None:
        self.house.num_loaded -= self.state == "ready"
        self.state = "unloaded"
        await asyncio.sleep(0)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_never_more_are_loaded_than_the_bound(most: int) -> None:
    async def work() -> None:
        numbers = random.Random(most)
        async with House("abc", most) as house:

            async def ask() -> None:
                for _ in range(numbers.randrange(6)):
                    await asyncio.sleep(0)
                await house.use(numbers.choice("abc"), numbers.randrange(5))

            await asyncio.gather(*(ask() for _ in range(200)))
            assert house.most_seen == most
            assert set(house.loads) == set("abc")
            assert all(not model.num_users for model in house.models.known)

    run(work())


def test_the_one_that_was_not_used_for_longest_makes_way() -> None:
    async def work() -> None:
        async with House("abc", 2) as house:
            for name in "abac":
                await house.use(name)
            assert [house.ports[name].state for name in "abc"] == ["ready", "unloaded", "ready"]
            async with house.models.held("a"):
                # It was used before c was, but it is in use.
                await house.use("b")
            assert [house.ports[name].state for name in "abc"] == ["ready", "ready", "unloaded"]

    run(work())


def test_who_waits_is_not_starved_by_a_model_that_is_always_busy() -> None:
    async def work() -> None:
        async with House("ab", 1) as house:
            is_over = False

            async def keep_busy() -> None:
                while not is_over:
                    await house.use("a", 5)

            busy = [asyncio.ensure_future(keep_busy()) for _ in range(3)]
            await asyncio.sleep(0)
            await asyncio.wait_for(house.use("b"), 5)
            is_over = True
            await asyncio.gather(*busy)
            assert house.loads[:3] == ["a", "b", "a"]

    run(work())


def test_who_leaves_while_waiting_holds_nothing() -> None:
    async def work() -> None:
        async with House("ab", 1) as house:
            async with house.models.held("a"):
                waiting = [asyncio.ensure_future(house.use("b")) for _ in range(3)]
                for _ in range(3):
                    await asyncio.sleep(0)
                for one in waiting:
                    one.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
            # Let in and cancelled in the same moment.
            late = asyncio.ensure_future(house.use("b"))
            while house.ports["b"].state != "ready":
                await asyncio.sleep(0)
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            assert all(not model.num_users for model in house.models.known)
            await house.use("a")

    run(work())


def test_nothing_is_loaded_for_who_has_left() -> None:
    async def work() -> None:
        async with House("abc", 1) as house:
            async with house.models.held("a"):
                first = asyncio.ensure_future(house.use("b"))
                gone = asyncio.ensure_future(house.use("c"))
                await asyncio.sleep(0)
                gone.cancel()
            await asyncio.gather(first, gone, return_exceptions=True)
            await house.use("a")
            assert house.loads == ["a", "b", "a"]

    run(work())


def test_one_that_cannot_be_loaded_is_told_of_and_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with House("ab", 2) as house:
            house.ports["b"].problem = True
            app = app_of(house.models.sites(Site(port=house.ports["a"], names=("a",))))
            got = await Client(app).ask("/v1/chat/completions", CHAT | {"model": "b"})
            assert got.status == 503
            assert got.headers["retry-after"] == str(models.RETRY_SECONDS)
            assert "log says why" in got.body.decode()
            assert "secret" not in got.body.decode()
            house.ports["b"].problem = False
            with pytest.raises(NotLoadedError):
                await house.use("b")
            await house.use("a")
            monkeypatch.setattr(models, "monotonic", lambda: 1e12)
            await house.use("b")

    run(work())


def test_who_waits_when_the_server_ends_is_told_so() -> None:
    async def work() -> None:
        house = House("ab", 1)
        async with house, house.models.held("a"):
            waiting = asyncio.ensure_future(house.use("b"))
            await asyncio.sleep(0)
        with pytest.raises(Exception, match="the server ended"):
            await waiting

    run(work())


def test_each_model_answers_under_its_name() -> None:
    async def work() -> None:
        async with House("abc", 1) as house:
            first = Site(port=house.ports["a"], names=("a",), limits=QUICK)
            app = app_of(house.models.sites(first))
            for name in ("b", "a", "c", None):
                got = (await Client(app).ask("/v1/chat/completions", CHAT | {"model": name})).json()
                assert got["model"] == (name or "a")
                assert got["choices"][0]["message"]["content"] == f"of {name or 'a'}"
            told = (await Client(app).ask("/v1/models")).json()["data"]
            states = {one["id"]: one["status"]["value"] for one in told}
            assert states == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
            assert (await Client(app).ask("/ready")).status == 200
            assert (await Client(app).ask("/v1/models/c")).status == 200
            got = await Client(app).ask("/v1/chat/completions", CHAT | {"model": "d"})
            assert got.status == 404
            counted = await Client(app).ask("/v1/messages/count_tokens", CHAT | {"model": "b"})
            assert counted.json() == {"input_tokens": 2}

    run(work())


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *(("5m", 300), ("1h30m", 5400), ("0.5s", 0.5), ("250ms", 0.25), ("0", 0), (0, 0)),
        *(("90", 90), (90, 90), (1.5, 1.5), ("-1", inf), (-1, inf), ("-5m", inf)),
    ],
    ids=str,
)
def test_a_duration_is_read_as_ollama_reads_it(given: str | float, seconds: float) -> None:
    assert keep_alive_of(given) == seconds


@pytest.mark.parametrize(
    "given", ["", "-", "m", "5 minutes", "5d", "--1", "nan", "5m3", float("nan")]
)
def test_what_is_no_duration_is_refused(given: str | float) -> None:
    with pytest.raises(ConfigError, match="is no duration"):
        keep_alive_of(given)


def test_a_model_without_requests_is_unloaded_and_comes_back_for_the_next_one() -> None:
    async def work() -> None:
        async with House("a", 1, keep_alive=0.01) as house:
            # The server was started for it, so it is loaded at once, and then nobody came.
            await house.until("a", "unloaded")
            app = house.app()
            for path, told in (("/health", "unloaded"), ("/v1/models/a", {"value": "unloaded"})):
                got = (await Client(app).ask(path)).json()
                assert got["engine" if path == "/health" else "status"] == told
            assert (await Client(app).ask("/ready")).status == 200
            got = await Client(app).ask("/v1/chat/completions", CHAT)
            assert got.json()["choices"][0]["message"]["content"] == "of a"
            await house.until("a", "unloaded")
            assert house.loads == ["a", "a"]

    run(work())


def test_a_model_is_kept_for_as_long_as_a_request_runs() -> None:
    async def work() -> None:
        async with House("ab", 2, keep_alive=0) as house:
            async with house.models.held("a"):
                # All that was due is done by then.
                await house.use("b")
                await house.until("b", "unloaded")
                assert house.ports["a"].state == "ready"
            await house.until("a", "unloaded")

    run(work())


def test_who_asks_while_it_is_unloaded_has_it_loaded_again() -> None:
    async def work() -> None:
        async with House("a", 1, keep_alive=0) as house:
            numbers = random.Random(3)

            async def ask() -> None:
                for _ in range(numbers.randrange(9)):
                    await asyncio.sleep(0)
                await house.use("a", numbers.randrange(3))

            for _ in range(50):
                await asyncio.gather(*(ask() for _ in range(numbers.randrange(1, 4))))
            await house.until("a", "unloaded")
            assert len(house.loads) > 1
            assert not house.models.known[0].num_users

    run(work())


def test_streams_have_heartbeats_while_their_model_is_loaded_again() -> None:
    async def work() -> None:
        async with House("a", 1, keep_alive=0) as house:
            await house.until("a", "unloaded")
            house.gate = asyncio.Event()
            app = house.app(replace(QUICK, ping_seconds=0.01))
            client = Client(app)
            asked = asyncio.ensure_future(
                client.ask("/v1/chat/completions", CHAT | {"stream": True})
            )
            while len(client.got.events) < 3:
                await asyncio.sleep(0.001)
            # Whoever comes is answered as well, once it is loaded.
            assert house.ports["a"].state == "loading"
            assert (await Client(app).ask("/ready")).status == 200
            house.gate.set()
            got = await asked
            told = [one["choices"][0]["delta"] for one in got.events[:-1]]
            assert "".join(delta["content"] for delta in told) == "of a"
            assert got.events[-1] == "[DONE]"

    run(work())


def test_a_request_says_how_long_its_model_is_kept() -> None:
    async def work() -> None:
        async with House("a", 1, keep_alive=inf) as house:
            app = house.app()
            for value in (-1, "1h"):
                got = await Client(app).ask("/v1/chat/completions", CHAT | {"keep_alive": value})
                assert "warnings" not in got.json()
            for _ in range(9):
                await asyncio.sleep(0)
            assert house.ports["a"].state == "ready"
            await Client(app).ask("/v1/chat/completions", CHAT | {"keep_alive": 0})
            await house.until("a", "unloaded")
            got = await Client(app).ask("/v1/chat/completions", CHAT | {"keep_alive": "soon"})
            assert got.status == 400
            assert got.json()["error"]["param"] == "keep_alive"

    run(work())


@pytest.mark.parametrize("has_models", [False, True])
def test_where_no_request_may_say_so_it_is_told(has_models: bool) -> None:
    async def work() -> None:
        async with House("a", 1) as house:
            site = Site(port=house.ports["a"], names=("a",), keeps_apart=True)
            app = app_of(house.models.sites(site) if has_models else site)
            got = await Client(app).ask("/v1/chat/completions", CHAT | {"keep_alive": 0})
            (told,) = got.json()["warnings"]
            assert told.startswith("keep_alive:")
            assert "--keep-alive" in told
            for _ in range(9):
                await asyncio.sleep(0)
            assert house.ports["a"].state == "ready"

    run(work())


def test_a_server_whose_only_model_cannot_be_loaded_again_is_not_ready_but_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with House("a", 1, keep_alive=0) as house:
            await house.until("a", "unloaded")
            app, house.ports["a"].problem = house.app(), True
            assert (await Client(app).ask("/v1/chat/completions", CHAT)).status == 503
            assert (await Client(app).ask("/health")).status == 200
            assert (await Client(app).ask("/ready")).status == 503
            told = (await Client(app).ask("/v1/models/a")).json()
            assert told["status"] == {"value": "failed"}
            house.ports["a"].problem = False
            monkeypatch.setattr(models, "monotonic", lambda: 1e12)
            assert (await Client(app).ask("/ready")).status == 200
            assert (await Client(app).ask("/v1/chat/completions", CHAT)).status == 200

    run(work())


def test_the_first_model_keeps_all_its_names() -> None:
    async def work() -> None:
        async with House("a", 1, keep_alive=0) as house:
            site = house.models.sites(Site(port=house.ports["a"], names=("a", "alias")))
            got = await Client(app_of(site)).ask("/v1/chat/completions", CHAT | {"model": "alias"})
            assert got.json()["model"] == "alias"

    run(work())
