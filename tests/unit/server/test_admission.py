"""Admission: an idle server takes any request, a full one still admits keys with few requests."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from doubles.asgi_client import Client
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import app_of, run, site_with
from outrider.server.errors import ApiError
from outrider.server.site import Admission, Limits


def held(admission: Admission, stack: ExitStack, key: str, num: int, most: int = 4) -> None:
    for _ in range(num):
        stack.enter_context(admission.slot(key, most, 256))
        admission.widen(1)


def status(admission: Admission, key: str, most: int = 4, of_a_key: int = 256) -> int:
    try:
        with admission.slot(key, most, of_a_key):
            return 200
    except ApiError as error:
        return error.status if isinstance(error.retry_after, int) else 0


def test_an_idle_server_takes_any_request_whole() -> None:
    admission = Admission()
    with admission.slot("a", 4, 256):
        admission.widen(100)
        admission.widen(28)
        assert admission.taken == {"a": 128}
        assert status(admission, "a") == 503
    assert not admission.taken


def test_one_key_cannot_shut_others_out_and_is_told_so() -> None:
    admission = Admission()
    with ExitStack() as stack:
        held(admission, stack, "a", 4)
        assert status(admission, "a") == 503
        held(admission, stack, "b", 2)
        assert [status(admission, key) for key in "abc"] == [429, 503, 200]
        held(admission, stack, "c", 2)
        # Twice the number of slots is taken: no request is admitted any more.
        assert [status(admission, key) for key in "bd"] == [429, 503]
    assert not admission.taken


def test_shares_follow_weights() -> None:
    admission = Admission(weights={"b": 3.0})
    with ExitStack() as stack:
        held(admission, stack, "a", 8, most=8)
        held(admission, stack, "b", 5, most=8)
        assert (status(admission, "a", 8), status(admission, "b", 8)) == (429, 200)


def test_slots_that_others_took_meanwhile_are_gone() -> None:
    admission = Admission()
    with admission.slot("a", 4, 256):
        # Another request, which came in as well, has many completions.
        admission.taken["a"] += 9
        admission.widen(1)
        with pytest.raises(ApiError) as raised:
            admission.widen(3)
        assert raised.value.status == 503
        assert admission.taken == {"a": 10}


def test_a_key_has_its_own_bound() -> None:
    admission = Admission()
    with ExitStack() as stack:
        held(admission, stack, "a", 2)
        found = [status(admission, key, 1000, of_a_key=2) for key in "ab"]
        assert found == [429, 200]


@pytest.mark.parametrize(("prompts", "n"), [(128, 1), (8, 16)])
def test_lists_of_prompts_are_one_request(prompts: int, n: int) -> None:
    """As lm-evaluation-harness sends them, to a server of few slots; the next one waits."""
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
    assert not site.traffic.admission.taken


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
def test_counting_takes_a_slot_too(path: str, body: dict[str, object]) -> None:
    site = site_with(ScriptedPort(), Limits(most_running=1))

    async def work() -> tuple[int, bool, int]:
        app = app_of(site)
        with site.slot(""):
            busy = await Client(app).ask(path, body)
        free = await Client(app).ask(path, body)
        return busy.status, "retry-after" in busy.headers, free.status

    assert run(work()) == (503, True, 200)
