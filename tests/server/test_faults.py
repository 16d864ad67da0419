"""Faults of the engine as clients of a server meet them, and a server's end: each text is whole and
the call's, or ends with one error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from doubles.live_server import Client, Live, live_server, until
from doubles.warm_python import anew
from outrider import LLM, SamplingParams
from outrider.core.config import EngineConfig
from outrider.core.draft import Draft
from outrider.core.protocols import DraftRow
from outrider.drafters.ngram import NgramDrafter
from outrider.server.port import Load
from outrider.server.process_port import ProcessPort
from outrider.server.site import Limits
from outrider.server.thread_port import ThreadPort

pytestmark = [pytest.mark.weights, pytest.mark.wide]
PATH = "/v1/completions"
PROMPTS = ("def quicksort(items):", "Once upon a time", "import os\n", "class Stack:")
CONFIG = EngineConfig(threads=1, k=3, batch_size=8)
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
FREE: dict[str, Any] = {"temperature": 0.8}


def body_of(prompt: object, how: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    limits = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    return {"prompt": prompt, **limits, **how}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Undisturbed, and without speculation."""
    with LLM(config=EngineConfig(threads=1, k=0, drafter="none")) as found:
        yield found


def expected(
    llm: LLM, prompts: Sequence[str] | list[list[int]], how: dict[str, Any], num_tokens: int
) -> list[str]:
    rule = "coupled" if "seed" in how else None
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, sampler=rule, **how)
    return [result.text for result in llm.generate(prompts, params)]


def told(data: bytes) -> list[Any]:
    """The events of a whole answer; `[DONE]` is itself."""
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(data: bytes) -> str:
    """Of a stream that has its end."""
    events = told(data)
    assert events[-1] == "[DONE]", data[-300:]
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


async def rest_of(client: Client) -> bytes:
    try:
        return await client.rest()
    finally:
        client.leave()


async def status_of(live: Live, path: str = "/ready") -> int:
    client = await Client.connected(live.number)
    await client.send(
        f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    )
    return int((await rest_of(client)).split()[1])


async def first_text(client: Client) -> bytes:
    """What comes up to the first text: on a busy machine headers, or a comment, come before it."""
    found = b""
    while b"data: " not in found:
        found += await client.piece()
    return found


def test_an_engine_that_dies_costs_no_text_that_can_go_on(llm: LLM) -> None:
    """Others end with one error, and before the engine is there again."""
    num_tokens = 96
    wanted = [text for how in (GREEDY, SEEDED) for text in expected(llm, PROMPTS, how, num_tokens)]

    async def work() -> None:
        port = ProcessPort(Load("outrider/embedded", None, CONFIG, 99))
        async with live_server(port) as live:
            going = [
                await live.ask(PATH, body_of(prompt, how, num_tokens))
                for how in (GREEDY, SEEDED)
                for prompt in PROMPTS
            ]
            lost = await live.ask(PATH, body_of(PROMPTS[0], FREE, 1_000))
            begun = [await first_text(client) for client in (*going, lost)]
            assert await status_of(live) == 200
            assert port.process_id is not None
            os.kill(port.process_id, signal.SIGSEGV)
            rest = await rest_of(lost)
            assert port.status.state == "restarting"
            assert await status_of(live) == 503
            assert await status_of(live, "/health") == 200
            *events, last = told(begun.pop() + rest)
            assert (last["error"]["code"], "error" in str(events)) == ("engine_lost", False)
            pieces = await asyncio.gather(*(rest_of(client) for client in going))
            found = [text_of(one + other) for one, other in zip(begun, pieces, strict=True)]
            assert found == wanted
            # Texts that were written before the signal end while the engine still starts.
            await until(lambda: port.status.state == "ready")
            assert await status_of(live) == 200

    # An engine that begins as a fork is there again before anybody sees that it was not.
    with anew():
        asyncio.run(work())


@pytest.mark.parametrize("is_hurried", [False, True], ids=["once", "twice"])
def test_a_signal_lets_texts_end_and_a_second_one_does_not(llm: LLM, is_hurried: bool) -> None:
    num_tokens = 2_000 if is_hurried else 128

    async def work() -> list[bytes]:
        port = ThreadPort(lambda: LLM(config=CONFIG))
        async with live_server(port, Limits(drain_seconds=240)) as live:
            streams = [
                await live.ask(PATH, body_of(prompt, GREEDY, num_tokens)) for prompt in PROMPTS
            ]
            begun = [await client.piece() for client in streams]
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: live.site.traffic.ending)
            assert (await status_of(live), await status_of(live, "/health")) == (503, 200)
            refused = await rest_of(await live.ask(PATH, body_of("x", GREEDY, 4)))
            assert (refused.split()[1], b"retry-after" in refused.lower()) == (b"503", True)
            assert live.num_places == len(PROMPTS)
            if is_hurried:
                os.kill(os.getpid(), signal.SIGTERM)
            rest = await asyncio.gather(*(rest_of(client) for client in streams))
        return [one + other for one, other in zip(begun, rest, strict=True)]

    answers = asyncio.run(work())
    if is_hurried:
        # As few tokens as were written by then, one error, and no end.
        assert [["error" in one for one in told(data)][-2:] for data in answers] == [
            [False, True]
        ] * len(PROMPTS)
    else:
        assert [*map(text_of, answers)] == expected(llm, PROMPTS, GREEDY, num_tokens)


def test_memory_that_ends_sets_the_youngest_back_and_changes_no_text(llm: LLM) -> None:
    """32 requests, an arena of eight pages for six at once: the oldest is never set back."""
    config = EngineConfig(
        threads=1, k=3, batch_size=6, page_size=16, arena_tokens=128, context=112, reserve=0.0
    )
    prompts = [f"def f{number}(" for number in range(32)]

    async def work() -> tuple[list[str], int, list[int]]:
        port = ThreadPort(lambda: LLM(config=config))
        async with live_server(port) as live:
            streams = [await live.ask(PATH, body_of(prompt, GREEDY, 40)) for prompt in prompts]
            answers = await asyncio.gather(*(rest_of(client) for client in streams))
            backs = [number for number, data in enumerate(answers) if b"pre-empted" in data]
            much = {"prompt": "word " * 60, "max_tokens": 90}
            refused = await rest_of(await live.ask(PATH, {"prompt": [9] * 112, "max_tokens": 1}))
            assert refused.split()[1] == b"400", refused
            assert b"context_length_exceeded" in refused
            clipped = await rest_of(await live.ask(PATH, much))
            assert clipped.split()[1] == b"200", clipped
            await until(lambda: port.status.kv_usage == 0)
            return [*map(text_of, answers)], port.status.num_preempted, backs

    texts, num_preempted, backs = asyncio.run(work())
    assert texts == expected(llm, prompts, GREEDY, 40)
    assert num_preempted >= len(backs) > 0
    assert 0 not in backs


FAULTS: dict[str, Callable[[DraftRow], Draft]] = {
    "raises": lambda row: Draft.chain([row.tokens[10**9]]),
    "id beyond the vocabulary": lambda _: Draft.chain([10**6]),
    "negative id": lambda _: Draft.chain([-1]),
    "longer than asked for": lambda _: Draft.chain([1] * 99),
}


def test_a_drafter_that_fails_is_told_of_and_changes_no_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only for the requests that it fails for."""
    config = EngineConfig(threads=1, k=3, drafter="ngram", fused_round=False, batch_size=8)
    prompt = "a b c d a b c d a b c d a"
    marks = dict(enumerate(FAULTS, 40))
    honest = NgramDrafter.propose

    def propose(self: NgramDrafter, rows: Sequence[DraftRow]) -> list[Draft]:
        drafts = honest(self, rows)
        return [
            FAULTS[marks[row.tokens[0]]](row) if row.tokens[0] in marks else draft
            for row, draft in zip(rows, drafts, strict=True)
        ]

    monkeypatch.setattr(NgramDrafter, "propose", propose)

    async def work() -> dict[int, Any]:
        port = ThreadPort(lambda: LLM(config=config))
        async with live_server(port) as live:
            ids = await port.encode(prompt)
            asked = {
                first: await live.ask(
                    PATH, {"prompt": [first, *ids], "max_tokens": 48, "ignore_eos": True} | GREEDY
                )
                for first in (39, *marks)
            }
            answers = {first: await rest_of(client) for first, client in asked.items()}
            return {
                first: json.loads(data.partition(b"\r\n\r\n")[2]) for first, data in answers.items()
            }

    found = asyncio.run(work())
    ids = llm.encode(prompt)
    wanted = expected(llm, [[first, *ids] for first in found], GREEDY, 48)
    for (first, answer), text in zip(found.items(), wanted, strict=True):
        assert answer["choices"][0]["text"] == text, marks.get(first)
        is_off = any("speculation was turned off" in one for one in answer.get("warnings", ()))
        assert is_off == (first in marks), (first, answer)
        num_drafted = answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
        assert (num_drafted == 0) == (first in marks)
