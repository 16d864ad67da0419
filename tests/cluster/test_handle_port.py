"""A request at the gateway: whose replicas die, break, differ or are full, without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from outrider.api.result import GenerationResult, TextEvent
from outrider.core.errors import ConfigError, QueueFullError
from outrider.core.params import SamplingParams
from outrider.metrics import summarise
from outrider.plugins.cluster.engine import SUBMITS, Writer, packed
from outrider.plugins.cluster.handle_port import MOST_LOSSES, HandlePort, HandleStream
from outrider.server.port import (
    EngineCard,
    EngineLostError,
    EngineRequest,
    Failure,
    Part,
    Submit,
    failure_of,
)

CARD = EngineCard(
    model="m",
    window=64,
    vocab_size=100,
    num_parameters=1,
    drafters=("none",),
    drafter="none",
    k=0,
    sampler="block",
    exact=True,
    numerics="one kind",
)
GREEDY = SamplingParams(max_tokens=4)
DRAWN = SamplingParams(max_tokens=4, temperature=1.0, seed=1, sampler="block")
RESULT = GenerationResult(
    text="abcd",
    token_ids=(1, 2, 3, 4),
    finish_reason="length",
    stats=summarise([], drafter="", k=0, total_seconds=0.0),
)
END = Part(0, result=RESULT)
Story = list[Part | Writer | Exception]


def wrote(token: int) -> Part:
    return Part(0, TextEvent(pieces=("abcd"[token - 1],), token_ids=(token,), origins=("plain",)))


def who(numerics: str = "one kind", replica: str = "r0") -> Writer:
    return Writer(numerics, int(replica[1:]), replica)


class Calls(AsyncIterator[bytes]):
    """What one call of a replica gives."""

    def __init__(self, story: Story) -> None:
        self._story, self.is_cancelled = iter(story), False

    async def __anext__(self) -> bytes:
        for item in self._story:
            if isinstance(item, Exception):
                raise item
            return packed(item)
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """Of a deployment, whose calls go as told one after another."""

    def __init__(self, *stories: Story) -> None:
        self._stories, self.asked, self.calls = iter(stories), list[Submit](), list[Calls]()
        self.stream = self

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, submit: bytes, *, blocks: list[int]) -> Calls:
        assert blocks
        self.asked.append(SUBMITS.decode(submit))
        self.calls.append(Calls(next(self._stories)))
        return self.calls[-1]


def read(
    handle: Handle,
    params: SamplingParams = GREEDY,
    then: Callable[[HandleStream], Any] | None = None,
) -> tuple[str, HandleStream, HandlePort]:
    port = HandlePort(handle, "m")
    port._card, port._state = CARD, "ready"

    async def run() -> tuple[str, HandleStream, HandlePort]:
        request = EngineRequest(prompt_ids=[5] * 32, params=params, structure={})
        stream = port.stream(request)
        text = ""
        async for event in stream:
            text += event.text
            if then is not None:
                then(stream)
        return text, stream, port

    return asyncio.run(run())


def died() -> ActorDiedError:
    return ActorDiedError()


def test_a_stream_whose_replica_dies_goes_on_at_another() -> None:
    handle = Handle(
        [who(), wrote(1), wrote(2), died()],
        [who(replica="r1"), wrote(3), wrote(4), END],
    )
    text, stream, port = read(handle)
    assert text == "abcd"
    assert stream.result.text == "abcd"
    first, second = handle.asked
    assert (first.request.written, first.numerics) == ([], "")
    # With what the reader has, and only where the same would be written.
    assert (second.request.written, second.numerics) == ([1, 2], "one kind")
    assert stream.engine == 1
    assert (port.status.num_running, port.status.num_restarts) == (0, 1)


def test_one_that_ends_without_an_end_goes_on_too() -> None:
    ended = Handle([who(), wrote(1)], [who(), wrote(2), END])
    assert read(ended)[0] == "ab"
    broke = Part(0, failure=Failure("NotReadyError", "the engine is not ready: closed."))
    assert read(Handle([who(), wrote(1), broke], [who(), END]))[0] == "a"


def test_a_text_that_is_drawn_by_rounds_ends_with_one_error() -> None:
    handle = Handle([who(), wrote(1), died()])
    with pytest.raises(EngineLostError, match="ActorDiedError"):
        read(handle, DRAWN)
    # Nothing of it was written, so nothing can differ.
    fresh = Handle([who(), died()], [who(), wrote(1), END])
    assert read(fresh, DRAWN)[0] == "a"


def test_another_kind_of_replica_writes_no_end_to_a_text() -> None:
    other = EngineLostError(", and the next one would write another text")
    refused = Part(0, failure=failure_of(other))
    handle = Handle([who(), wrote(1), died()], [who("another kind"), refused])
    with pytest.raises(EngineLostError, match="another text"):
        read(handle)
    assert handle.asked[1].numerics == "one kind"


def test_a_request_with_which_replicas_end_is_given_up() -> None:
    handle = Handle(*([who(replica=f"r{n}"), wrote(n), died()] for n in range(1, MOST_LOSSES + 1)))
    with pytest.raises(EngineLostError, match=f"as {MOST_LOSSES - 1} did"):
        read(handle)


def test_a_full_queue_and_a_mistake_are_what_they_are() -> None:
    with pytest.raises(QueueFullError, match="7 requests"):
        read(Handle([BackPressureError(7, 7)]))
    with pytest.raises(ConfigError, match="no such drafter"):
        read(Handle([who(), Part(0, failure=Failure("ConfigError", "no such drafter"))]))


def test_who_leaves_cancels_the_call() -> None:
    handle = Handle([who(), wrote(1), wrote(2)])
    with pytest.raises(ConfigError, match="cancelled"):
        read(handle, then=HandleStream.cancel)
    assert handle.calls[0].is_cancelled
