"""Places: an idle server takes any request, a full one keeps room for who has little."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from doubles.asgi_client import Client
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import app_of, run, site_with
from outrider.server.errors import ApiError
from outrider.server.places import Places
from outrider.server.site import Limits


def held(places: Places, stack: ExitStack, key: str, num: int, most: int = 4) -> None:
    for _ in range(num):
        stack.enter_context(places.place(key, most, 256))
        places.widen(1)


def status(places: Places, key: str, most: int = 4, of_a_key: int = 256) -> int:
    try:
        with places.place(key, most, of_a_key):
            return 200
    except ApiError as error:
        return error.status if isinstance(error.retry_after, int) else 0


def test_an_idle_server_takes_any_request_whole() -> None:
    places = Places()
    with places.place("a", 4, 256):
        places.widen(100)
        places.widen(28)
        assert places.taken == {"a": 128}
        assert status(places, "a") == 503
    assert not places.taken


def test_one_key_cannot_shut_others_out_and_is_told_so() -> None:
    places = Places()
    with ExitStack() as stack:
        held(places, stack, "a", 4)
        assert status(places, "a") == 503
        held(places, stack, "b", 2)
        assert [status(places, key) for key in "abc"] == [429, 503, 200]
        held(places, stack, "c", 2)
        # Twice the places are taken: nobody comes in any more.
        assert [status(places, key) for key in "bd"] == [429, 503]
    assert not places.taken


def test_shares_follow_weights() -> None:
    places = Places(weights={"b": 3.0})
    with ExitStack() as stack:
        held(places, stack, "a", 8, most=8)
        held(places, stack, "b", 5, most=8)
        assert (status(places, "a", 8), status(places, "b", 8)) == (429, 200)


def test_places_that_others_took_meanwhile_are_gone() -> None:
    places = Places()
    with places.place("a", 4, 256):
        # Another request, which came in as well, has many completions.
        places.taken["a"] += 9
        places.widen(1)
        with pytest.raises(ApiError) as raised:
            places.widen(3)
        assert raised.value.status == 503
        assert places.taken == {"a": 10}


def test_a_key_has_its_own_bound() -> None:
    places = Places()
    with ExitStack() as stack:
        held(places, stack, "a", 2)
        found = [status(places, key, 1000, of_a_key=2) for key in "ab"]
        assert found == [429, 200]


@pytest.mark.parametrize(("prompts", "n"), [(128, 1), (8, 16)])
def test_lists_of_prompts_are_one_request(prompts: int, n: int) -> None:
    """As lm-evaluation-harness sends them, to a server of few places; the next one waits."""
    port = ScriptedPort()
    gate = port.pause = asyncio.Event()
    site = site_with(port, Limits(most_running=40))
    body = {"prompt": ["x"] * prompts, "n": n, "max_tokens": 4}

    async def work() -> list[int]:
        app = app_of(site)
        first = asyncio.ensure_future(Client(app).ask("/v1/completions", body))
        while len(port.streams) < 128:
            await asyncio.sleep(0)
        second = await Client(app).ask("/v1/completions", body)
        assert int(second.headers["retry-after"]) >= 1
        gate.set()
        got = await first
        assert len(got.json()["choices"]) == 128
        return [got.status, second.status]

    assert run(work()) == [200, 503]
    assert not site.traffic.places.taken


MESSAGES = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", MESSAGES),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
def test_counting_takes_a_place_too(path: str, body: dict[str, object]) -> None:
    site = site_with(ScriptedPort(), Limits(most_running=1))

    async def work() -> tuple[int, bool, int]:
        app = app_of(site)
        with site.place(""):
            busy = await Client(app).ask(path, body)
        free = await Client(app).ask(path, body)
        return busy.status, "retry-after" in busy.headers, free.status

    assert run(work()) == (503, True, 200)
