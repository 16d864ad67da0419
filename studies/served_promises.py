"""Clients that leave, too many at once, very long prompts: `run.py served_promises`."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

from common import TARGET, Report, first_prompts, note, study
from options import Options

from outrider import EngineConfig
from outrider.metrics import percentile

MOST_ROUNDS, MOST_SECONDS = 2, 0.1
REFUSAL_SECONDS, GOODPUT, MOST_RATIO = 0.005, 0.9, 2.0
TIMES_CAPACITY, NUM_TOKENS, TIMEOUT_SECONDS = 5, 32, 60.0
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Write a function that adds."}]}
# Each API's own way of asking for as many tokens.
_BODIES: Sequence[tuple[str, dict[str, Any]]] = (
    ("/v1/completions", {"prompt": "def add(a, b):", "max_tokens": NUM_TOKENS}),
    ("/v1/chat/completions", _CHAT | {"max_tokens": NUM_TOKENS}),
    ("/v1/responses", {"input": "def add(a, b):", "max_output_tokens": NUM_TOKENS}),
    ("/v1/messages", _CHAT | {"max_tokens": NUM_TOKENS}),
)


@study(target=TARGET, parts=["leave", "overload", "long"], seconds=60.0, points=50, repeats=3)
def served_promises(options: Options, report: Report) -> bool:
    """Does the server keep its promises to those who stay, whatever others do?

    leave: clients disconnect at random points of all phases while others stream. Until their places
    and their sequences are gone, at most 2 rounds of the engine or 100 ms go by.
    overload: an open loop sends five times as many requests as a closed loop was answered. Each is
    let in and answered whole, or refused with 429 or 503 and a Retry-After, in 5 ms in the median;
    nobody waits in vain, and those who are let in get 0.9 of the tokens a second of the closed
    loop.
    long: a prompt as long as the window allows is read while four streams are written, whose 99th
    percentile between two pieces grows by no more than twice.
    """
    parts: Mapping[str, Callable[[Options, Report], None]] = {
        "leave": _leave,
        "overload": _overload,
        "long": _long,
    }
    for name in options.parts:
        parts[name](options, report)
    return all(cell["holds"] for cell in report["cells"])


@dataclass(slots=True)
class Stream:
    """A connection that asked for something, and what came of it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    asked: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    answered: float = 0.0
    arrivals: list[float] = field(default_factory=list[float])

    @classmethod
    async def of(cls, port: int, path: str, body: Mapping[str, Any]) -> Stream:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + data)
        return cls(reader, writer, perf_counter())

    async def head(self) -> None:
        first = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        self.answered = perf_counter()
        status, *lines = first.split("\r\n")
        self.status = int(status.split()[1])
        self.headers = dict(line.lower().split(": ", 1) for line in lines if line)

    async def pieces(self) -> None:
        """Note when each arrives, up to the end."""
        while await self.reader.read(1 << 16):
            self.arrivals.append(perf_counter())

    def leave(self) -> None:
        self.writer.transport.abort()


# Clients that leave


def _leave(options: Options, report: Report) -> None:
    found = asyncio.run(_points(options))
    rounds, seconds = [one[1] for one in found], [one[2] for one in found]
    held = [one[1] <= MOST_ROUNDS or one[2] <= MOST_SECONDS for one in found]
    note(
        report,
        part="leave",
        points=len(found),
        phases=dict(Counter(one[0] for one in found)),
        rounds=dict(sorted(Counter(rounds).items())),
        ms_median=round(1e3 * percentile(seconds, 50), 2),
        ms_p99=round(1e3 * percentile(seconds, 99), 2),
        ms_most=round(1e3 * max(seconds), 2),
        num_held=sum(held),
        holds=all(held),
    )


async def _points(options: Options) -> list[tuple[str, int, float]]:
    """Phase, rounds and seconds until nothing of a client was left, for each point."""
    rng = random.Random(1)
    number = 8 if options.quick else options.points
    async with _server_here(options.target) as (site, port):
        return [await _point(rng, site, port) for _ in range(number)]


async def _point(rng: random.Random, site: Any, port: int) -> tuple[str, int, float]:
    phase = rng.choice(("queued", "reading", "writing", "writing n", "whole"))
    body: dict[str, Any] = {
        "max_tokens": 900,
        "ignore_eos": True,
        "prompt": "def f(",
        "stream": True,
    }
    others = [
        await Stream.of(port, "/v1/completions", body | {"prompt": f"def f{i}("})
        for i in range(3 if phase == "queued" else 2)
    ]
    for one in others:
        await one.head()
    watched = asyncio.ensure_future(others[0].pieces())
    if phase == "reading":
        body["prompt"] = [rng.randrange(300, 900) for _ in range(900)]
    body |= {"n": 3} if phase == "writing n" else {}
    body |= {"stream": phase != "whole"}
    num_before = site.traffic.num_running
    client = await Stream.of(port, "/v1/completions", body)
    await client.writer.drain()
    while site.traffic.num_running == num_before:
        await asyncio.sleep(0)
    if phase.startswith("writing"):
        for _ in range(rng.randrange(1, 20)):
            await client.reader.read(1 << 16)
    else:
        await asyncio.sleep(rng.random() * (0.05 if phase == "reading" else 0.2))
    num_rounds, left = len(others[0].arrivals), perf_counter()
    client.leave()
    while site.traffic.num_running > num_before or _in_engine(site) > num_before:
        await asyncio.sleep(0.0005)
    found = phase, len(others[0].arrivals) - num_rounds, perf_counter() - left
    for one in others:
        one.leave()
    watched.cancel()
    while site.traffic.num_running or _in_engine(site):
        await asyncio.sleep(0.001)
    return found


def _in_engine(site: Any) -> int:
    return site.port.status.num_running + site.port.status.num_waiting


@asynccontextmanager
async def _server_here(target: str) -> AsyncGenerator[tuple[Any, int]]:
    """A server in this loop, whose engine has a process of its own as always."""
    from outrider.plugins.metrics import Metrics, metric_routes
    from outrider.server.access import Address, DoorRules, reserved
    from outrider.server.app import all_routes, make_app
    from outrider.server.port import Load
    from outrider.server.process_port import ProcessPort
    from outrider.server.run import run_server
    from outrider.server.site import Site

    config = EngineConfig(threads=1, batch_size=3, prefill_chunk=32)
    port = ProcessPort(Load(target, None, config, 64))
    site = Site(port=port, names=("here",))
    app = make_app(
        site, DoorRules(), all_routes(site, metric_routes(Metrics(lambda: {"here": port.status})))
    )
    address, held = reserved(Address(port=0))
    ready = asyncio.Event()
    with closing(held):
        server = asyncio.ensure_future(
            run_server(app, site, address, load=port.start, ready=ready.set)
        )
        try:
            await ready.wait()
            yield site, address.port
        finally:
            server.cancel()
            with suppress(asyncio.CancelledError):
                await server


# Too many at once


@dataclass(slots=True)
class Answers:
    """Of a load: `refusals` are the seconds that each took, `waits` those of who was let in."""

    statuses: Counter[int] = field(default_factory=Counter[int])
    refusals: list[float] = field(default_factory=list[float])
    waits: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])
    ends: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    num_timeouts: int = 0

    async def ask(self, port: int, number: int) -> None:
        path, body = _BODIES[number % len(_BODIES)]
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                asked = await Stream.of(port, path, body | {"temperature": 0})
                await asked.head()
                data = await asked.reader.read()
                asked.writer.close()
        except TimeoutError:
            self.num_timeouts += 1
            return
        except (OSError, EOFError) as error:
            self.wrong.append(f"{path}: {type(error).__name__}")
            return
        self.statuses[asked.status] += 1
        answer = json.loads(data)
        if asked.status == 200:
            self.waits.append(perf_counter() - asked.asked)
            self.ends.append((perf_counter(), _num_tokens(answer)))
        else:
            self.refusals.append(asked.answered - asked.asked)
            if not _is_refusal(path, asked, answer):
                self.wrong.append(f"{path}: {asked.status}, {data[:200]!r}")

    def rate(self, began: float, seconds: float) -> float:
        """Tokens a second of answers that ended in this time."""
        until = began + seconds
        return sum(num for end, num in self.ends if began <= end <= until) / seconds


def _num_tokens(answer: Mapping[str, Any]) -> int:
    usage: Mapping[str, int] = answer["usage"]
    return usage.get("completion_tokens", 0) or usage["output_tokens"]


def _is_refusal(path: str, asked: Stream, answer: Mapping[str, Any]) -> bool:
    if asked.status not in (429, 503) or not asked.headers.get("retry-after", "").isdecimal():
        return False
    kinds = {429: "rate_limit_error", 503: "overloaded_error"}
    if path == "/v1/messages":
        return answer["type"] == "error" and answer["error"]["type"] == kinds[asked.status]
    return set(answer["error"]) == {"message", "type", "param", "code"}


def _overload(options: Options, report: Report) -> None:
    seconds = 3.0 if options.quick else options.seconds
    flags = ("--threads", "1", "--batch-size", "8")
    with _served(options.target, *flags) as (port, _):
        asyncio.run(_closed(port, 2.0))
        before = asyncio.run(_closed(port, seconds / 4))
        found, offered, goodput = asyncio.run(_open(port, TIMES_CAPACITY * before[0], seconds))
        after = asyncio.run(_closed(port, seconds / 4))
    capacity = (before[1] + after[1]) / 2
    note(
        report,
        part="overload",
        seconds=seconds,
        capacity_tokens_per_second=[round(one[1], 1) for one in (before, after)],
        offered_per_second=round(offered, 1),
        times_capacity=round(2 * offered / (before[0] + after[0]), 2),
        statuses={str(status): number for status, number in sorted(found.statuses.items())},
        timeouts=found.num_timeouts,
        wrong=found.wrong[:10],
        goodput_share=round(goodput / capacity, 3),
        refusal_ms={
            f"p{share}": round(1e3 * percentile(found.refusals, share), 2) for share in (50, 90, 99)
        },
        admitted_seconds={
            f"p{share}": round(percentile(found.waits, share), 2) for share in (50, 99)
        },
        holds=not found.wrong
        and not found.num_timeouts
        and goodput >= GOODPUT * capacity
        and percentile(found.refusals, 50) <= REFUSAL_SECONDS,
    )


async def _closed(port: int, seconds: float) -> tuple[float, float]:
    """Requests and tokens a second, where a client asks again once it was answered."""
    found, began = Answers(), perf_counter()

    async def client(number: int) -> None:
        while perf_counter() < began + seconds:
            await found.ask(port, number)
            number += 1

    await asyncio.gather(*map(client, range(16)))
    took = perf_counter() - began
    return len(found.ends) / took, sum(num for _, num in found.ends) / took


async def _open(port: int, rate: float, seconds: float) -> tuple[Answers, float, float]:
    """What became of requests that come at random, so many a second; how many came, and the tokens
    a second of those who were let in."""
    found, rng, tasks = Answers(), random.Random(1), set[asyncio.Task[None]]()
    began = due = perf_counter()
    number = 0
    while due < began + seconds:
        await asyncio.sleep(max(0.0, due - perf_counter()))
        task = asyncio.create_task(found.ask(port, number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
        due += rng.expovariate(rate)
    took = perf_counter() - began
    goodput = found.rate(began, took)
    await asyncio.gather(*tasks)
    return found, number / took, goodput


# A long prompt


def _long(options: Options, report: Report) -> None:
    flags = ("--threads", "2", "--batch-size", "8")
    with _served(options.target, *flags) as (port, window):
        seconds = 1.0 if options.quick else min(8.0, window / 1_500)
        for turn in range(1 if options.quick else options.repeats):
            found = asyncio.run(_beside_long(port, window, turn, seconds))
            note(report, part="long", turn=turn, **found)


async def _beside_long(port: int, window: int, turn: int, seconds: float) -> dict[str, Any]:
    body = {"temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": window}
    writers = [
        await Stream.of(port, "/v1/completions", body | {"prompt": f"# {turn}\n{prompt}"})
        for prompt in first_prompts(4)[:4]
    ]
    for writer in writers:
        await writer.head()
    reading = [asyncio.ensure_future(writer.pieces()) for writer in writers]
    await asyncio.sleep(1.0)
    times = [perf_counter()]
    await asyncio.sleep(seconds)
    times.append(perf_counter())
    rng = random.Random(turn)
    ids = [rng.randrange(300, 1_000) for _ in range(window - 16)]
    last = {"prompt": ids, "max_tokens": 1, "stream": False}
    reader = await Stream.of(port, "/v1/completions", body | last)
    await reader.head()
    times.append(perf_counter())
    await asyncio.sleep(seconds)
    times.append(perf_counter())
    still = not any(task.done() for task in reading)
    for writer in writers:
        writer.leave()
    await asyncio.gather(*reading, return_exceptions=True)
    alone = _gaps(writers, times[0], times[1]) + _gaps(writers, times[2], times[3])
    beside = _gaps(writers, times[1], times[2])
    ratio = percentile(beside, 99) / percentile(alone, 99)
    return {
        "prompt_tokens": len(ids),
        "read_in_seconds": round(times[2] - times[1], 2),
        "alone_ms": {f"p{share}": round(1e3 * percentile(alone, share), 1) for share in (50, 99)},
        "beside_ms": {f"p{share}": round(1e3 * percentile(beside, share), 1) for share in (50, 99)},
        "num_gaps": [len(alone), len(beside)],
        "ratio_p99": round(ratio, 2),
        "holds": still and reader.status == 200 and ratio <= MOST_RATIO,
    }


def _gaps(streams: Sequence[Stream], began: float, ended: float) -> list[float]:
    """Seconds between two pieces of one stream that both came in this time."""
    return [
        later - sooner
        for stream in streams
        for sooner, later in pairwise(stream.arrivals)
        if began <= sooner and later <= ended
    ]


@contextmanager
def _served(target: str, *flags: str) -> Generator[tuple[int, int]]:
    """The port of `outrider serve`, and the model's window."""
    command = [sys.executable, "-m", "outrider", "serve", target, "--port", "0", "--json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("the server has no output")
            told = json.loads(process.stdout.readline())
            yield int(told["url"].rsplit(":", 1)[1]), told["window"]
        finally:
            process.terminate()
            process.wait(60)
