"""What serving over HTTP costs: `run.py serving [--output FILE]`.

Run as a program, `serving.py`, it is the server of a scripted engine, and an echo server beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from common import TARGET, Report, first_prompts, note, study
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import GenerationResult, TextEvent
from outrider.metrics import percentile, summarise
from outrider_lab.measure.frame import medians, paired_ratio

NUM_STREAMS = 16
TOKENS_PER_SECOND = 1_000
TOKENS_PER_ROUND = 4
CPU_BAR = 30e-6
SHARE_BAR = 0.95
START_BAR = 5.0
_PIECES = ("ab ",) * TOKENS_PER_ROUND
_ORIGINS = ("draft",) * (TOKENS_PER_ROUND - 1) + ("bonus",)
_EVENT = TextEvent(tuple(range(TOKENS_PER_ROUND)), _ORIGINS, _PIECES)  # pyright: ignore[reportArgumentType]


@study(target=TARGET, repeats=3)
def serving(options: Options, report: Report) -> bool:
    """What does the server cost, in processor time and in time between tokens?

    A scripted engine writes 16 streams at 1,000 tokens a second each, four tokens a round, and one
    client reads them: processor time of the server for a token (at most 30 microseconds), and the
    99th percentile between two pieces beside that of an echo server in the same process. Then a
    model writes the same texts by `LLM` and over HTTP, one and eight in flight, in turns: HTTP
    should have 0.95 of the speed. From the command to the first token should be at most 5 seconds;
    importing PyTorch alone is told beside it.
    """
    num_tokens, repeats = (400, 1) if options.quick else (4_000, options.repeats)
    _start(report, options.target, repeats)
    _front(report, num_tokens, repeats)
    for in_flight in (1, 8):
        _through(report, options, in_flight)
    return all(cell.get("holds", True) for cell in report["cells"])


def _start(report: Report, target: str, repeats: int) -> None:
    found = defaultdict[str, list[float]](list)
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run((sys.executable, "-c", "import torch"), check=True)
        found["torch"].append(time.perf_counter() - began)
        began = time.perf_counter()
        with served(target, *_one_thread(8)) as url:
            found["ready"].append(time.perf_counter() - began)
            _ask(url, {"prompt": "def quicksort(items):", "max_tokens": 1, "stream": True})
            found["first_token"].append(time.perf_counter() - began)
    values = {name: round(statistics.median(them), 2) for name, them in found.items()}
    note(
        report,
        part="start",
        target=Path(target).name,
        torch_import_seconds=values["torch"],
        ready_seconds=values["ready"],
        first_token_seconds=values["first_token"],
        holds=values["first_token"] <= START_BAR,
    )


def _front(report: Report, num_tokens: int, repeats: int) -> None:
    found = defaultdict[str, list[float]](list)
    with _child() as (process, url, echo_port):
        for _ in range(repeats):
            before = _processor_seconds(process.pid)
            gaps = asyncio.run(_read_all(_port_of(url), _request(num_tokens)))
            spent = _processor_seconds(process.pid) - before
            found["seconds_per_token"].append(spent / (NUM_STREAMS * num_tokens))
            found["gap_p99"].append(percentile(gaps, 99))
            rounds = num_tokens // TOKENS_PER_ROUND
            found["echo_gap_p99"].append(
                percentile(asyncio.run(_read_all(echo_port, b"%d\n" % rounds)), 99)
            )
    values = {name: statistics.median(them) for name, them in found.items()}
    note(
        report,
        part="front end",
        streams=NUM_STREAMS,
        tokens_per_second=TOKENS_PER_SECOND,
        microseconds_per_token=round(1e6 * values["seconds_per_token"], 2),
        gap_p99_ms=round(1e3 * values["gap_p99"], 2),
        echo_gap_p99_ms=round(1e3 * values["echo_gap_p99"], 2),
        holds=values["seconds_per_token"] <= CPU_BAR,
    )


def _request(num_tokens: int) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": num_tokens, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


async def _read_all(port: int, request: bytes) -> list[float]:
    """Seconds between pieces, of all streams."""

    async def read() -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        arrivals, last = list[float](), b""
        while piece := await reader.read(1 << 16):
            arrivals.append(time.perf_counter())
            last = piece
        writer.close()
        if b"ab" not in last and not last.endswith(b"0\r\n\r\n"):
            raise RuntimeError(f"a stream did not end well: {last[-200:]!r}")
        return [later - sooner for sooner, later in pairwise(arrivals)]

    each = await asyncio.gather(*(read() for _ in range(NUM_STREAMS)))
    return [gap for gaps in each for gap in gaps]


def _through(report: Report, options: Options, in_flight: int) -> None:
    """The same texts by a call and over HTTP, in turns."""
    prompts = first_prompts(in_flight)[:in_flight]
    num_tokens = 32 if options.quick else 256
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    config = EngineConfig(threads=1, batch_size=in_flight)
    seconds: dict[str, list[tuple[str, float]]] = {"call": [], "http": []}
    with (
        closing(LLM(options.target, config=config)) as llm,
        served(options.target, *_one_thread(in_flight)) as url,
    ):
        for turn in range(1 if options.quick else 2 * options.repeats):
            started = time.perf_counter()
            by_call = [result.text for result in llm.generate(prompts, params)]
            between = time.perf_counter()
            by_http = ask_all(url, prompts, num_tokens)
            if turn:  # the first warms both
                seconds["call"].append((str(turn), between - started))
                seconds["http"].append((str(turn), time.perf_counter() - between))
            if by_http != by_call:
                raise RuntimeError("the server wrote other texts than the call")
    ratio = paired_ratio(medians(seconds["call"]), medians(seconds["http"]))
    share = None if ratio is None else round(ratio.value, 3)
    note(
        report,
        part="through HTTP",
        target=Path(options.target).name,
        in_flight=in_flight,
        share_of_speed=share,
        holds=share is None or share >= SHARE_BAR,
    )


def ask_all(url: str, prompts: Sequence[str], num_tokens: int) -> list[str]:
    """The texts of as many clients at once."""

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        return _ask(url, body | {"stream": True})

    # A thread each: pools are smaller by default.
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(ask, prompts))


def _ask(url: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    pieces: list[str] = []
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                pieces += [choice["text"] for choice in choices]
    return "".join(pieces)


def _one_thread(in_flight: int) -> tuple[str, ...]:
    return "--threads", "1", "--batch-size", str(in_flight)


@contextmanager
def served(target: str, *flags: str) -> Generator[str]:
    """The address of `outrider serve`."""
    command = [sys.executable, "-m", "outrider", "serve", target, "--port", "0", "--json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(_line(process))["url"]
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def _child() -> Generator[tuple[subprocess.Popen[str], str, int]]:
    """The scripted server, its address, and the port of its echo."""
    command = [sys.executable, str(Path(__file__).resolve())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            told = json.loads(_line(process))
            yield process, told["url"], told["echo_port"]
        finally:
            process.terminate()
            process.wait(60)


def _line(process: subprocess.Popen[str]) -> str:
    if process.stdout is None:
        raise RuntimeError("the server has no output")
    return process.stdout.readline()


def _port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def _processor_seconds(number: int) -> float:
    """User and system time of a process."""
    words = Path(f"/proc/{number}/stat").read_text("utf-8").rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class Rounds:
    """A thread that ends a round of all streams at a time, and tells the loop once."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        threading.Thread(target=self._run, args=(loop,), daemon=True).start()

    async def next(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        await future

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        due = time.perf_counter()
        while True:
            due += TOKENS_PER_ROUND / TOKENS_PER_SECOND
            time.sleep(max(0.0, due - time.perf_counter()))
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class PacedStream(AsyncIterator[TextEvent]):
    engine = None

    def __init__(self, rounds: Rounds, num_tokens: int) -> None:
        self._rounds, self._num_tokens, self._left = rounds, num_tokens, num_tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextEvent:
        if self._left <= 0:
            raise StopAsyncIteration
        await self._rounds.next()
        self._left -= TOKENS_PER_ROUND
        return _EVENT

    @property
    def result(self) -> GenerationResult:
        stats = summarise((), drafter="none", k=0, total_seconds=1.0)
        ids = tuple(range(self._num_tokens))
        return GenerationResult("ab " * self._num_tokens, ids, "length", stats, seed=1)

    def cancel(self) -> None:
        self._left = 0


class PacedPort:
    """An EnginePort whose engine only keeps time."""

    def __init__(self, rounds: Rounds) -> None:
        from outrider.server.port import EngineCard, EngineStatus

        self._rounds, self.decoder = rounds, None
        self.card = EngineCard(
            model="paced",
            window=1 << 20,
            vocab_size=1 << 20,
            num_parameters=1,
            drafters=("none",),
            drafter="none",
            k=0,
            sampler="coupled",
            exact=True,
        )
        self.status = EngineStatus(state="ready")

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        del add_special
        return [ord(letter) for letter in prompt]

    def stream(self, request: Any) -> PacedStream:
        return PacedStream(self._rounds, request.params.max_tokens)

    async def start(self) -> None:
        return

    async def aclose(self) -> None:
        return


async def _serve() -> None:
    """The scripted server and the echo, until a signal."""
    from outrider.plugins.metrics import Metrics, metric_routes
    from outrider.server.access import Address, DoorRules, reserved
    from outrider.server.app import all_routes, make_app
    from outrider.server.run import run_server
    from outrider.server.site import Site

    rounds = Rounds()
    rounds.start(asyncio.get_running_loop())
    port: Any = PacedPort(rounds)
    site = Site(port=port, names=("paced",))
    metrics = Metrics(lambda: {"paced": port.status})
    site.observers.append(metrics)
    address, held = reserved(Address(port=0))

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(int(await reader.readline())):
            await rounds.next()
            writer.write(b"data: " + b"ab " * 60 + b"\n\n")
            await writer.drain()
        writer.close()

    echoing = await asyncio.start_server(echo, "127.0.0.1", 0)
    number = echoing.sockets[0].getsockname()[1]

    def ready() -> None:
        print(json.dumps({"url": address.url, "echo_port": number}), flush=True)

    app = make_app(site, DoorRules(), all_routes(site, metric_routes(metrics)))
    with closing(held):
        await run_server(app, site, address, load=port.start, ready=ready, also=[metrics.keep()])


if __name__ == "__main__":
    asyncio.run(_serve())
