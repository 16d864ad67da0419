"""Faults of a served engine, and the server's end: `run.py served_faults [--output FILE]`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
from common import TARGET, Report, first_prompts, note, study
from options import Options

import outrider
from outrider import LLM, EngineConfig, SamplingParams

NUM_TOKENS, AT_ONCE, KILLS_OF_A_SERVER = 64, 4, 5
# So long a signal, an error or a start may take.
ERROR_SECONDS, START_SECONDS, DRAIN_SECONDS, HURRIED_SECONDS = 1.0, 10.0, 30.0, 10.0
HANG_SECONDS = 30.0
_HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 3},
    "free": {"temperature": 0.8},
}
# In the engine's process: what a file says makes it hang, and what a prompt says ends it.
_FAULTS = """
import os, sys
if "outrider.server.engine_process" in getattr(sys, "orig_argv", ()):
    import ctypes, signal, time
    from outrider.api.llm import LLM
    from outrider.api.callers import PromptReader
    advance, submit, encode = LLM.advance, LLM.submit, PromptReader.ids_of_text
    def hung(self):
        name = os.environ["SERVED_FAULTS"]
        if os.path.exists(name):
            how = open(name).read()
            os.remove(name)
            (time if how == "sleeps" else ctypes.PyDLL(None)).sleep(3600)
        return advance(self)
    def submitted(self, prompt, *args, **more):
        if list(prompt)[:13] == [7] * 13:
            os.kill(os.getpid(), signal.SIGSEGV)
        return submit(self, prompt, *args, **more)
    def encoded(self, prompt, **more):
        if prompt == "poison":
            os.kill(os.getpid(), signal.SIGSEGV)
        return encode(self, prompt, **more)
    LLM.advance, LLM.submit, PromptReader.ids_of_text = hung, submitted, encoded
"""


@dataclass(slots=True)
class Found:
    """What clients saw. `wrong` must stay empty."""

    ends: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    errors_at: list[float] = field(default_factory=list[float])

    def check(self, holds: bool, words: str) -> None:
        if not holds:
            self.wrong.append(words[:300])


@dataclass(slots=True)
class Load:
    """Clients of one server, which ask again and again until `is_over`."""

    client: httpx.AsyncClient
    expected: dict[tuple[str, str], str]
    found: Found
    is_over: bool = False
    num_begun: int = 0

    async def keep(self, number: int) -> None:
        rng = random.Random(number)
        prompts = sorted({prompt for prompt, _ in self.expected})
        while not self.is_over:
            prompt, kind = rng.choice(prompts), rng.choices([*_HOW], [3, 3, 2])[0]
            try:
                await self._one(prompt, kind)
            except httpx.TransportError as error:
                self.found.check(self.is_over, f"{kind}: {type(error).__name__}")

    async def _one(self, prompt: str, kind: str) -> None:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True, **_HOW[kind]}
        text, last = "", "nothing"
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                data = json.loads(await answer.aread())
                last = f"{answer.status_code} {data['error']['code']}"
            else:
                self.num_begun += 1
            async for line in answer.aiter_lines() if answer.status_code == 200 else _nothing():
                if not line.startswith("data: "):
                    continue
                self.found.check(last in ("nothing", "text"), f"{kind}: more after {last}")
                chunk: dict[str, Any] = {} if line == "data: [DONE]" else json.loads(line[6:])
                text += "".join(choice["text"] for choice in chunk.get("choices", ()))
                last = "text" if "choices" in chunk else "whole"
                if "error" in chunk:
                    last = f"error {chunk['error']['code']}"
                    self.found.errors_at.append(perf_counter())
        self.found.ends[f"{kind}: {last}"] += 1
        if last == "whole":
            wanted = self.expected.get((prompt, kind))
            self.found.check(wanted in (None, text), f"{kind}: {prompt[:30]!r}: {text[:80]!r}")
        elif last.startswith("error"):
            self.found.check(kind == "free" or self.is_over, f"{kind}: {last}")
        else:
            refused = ("503 not_ready", "503 ending", "503 engine_lost", "503 overloaded")
            self.found.check(last in refused, f"{kind}: {last}")
            await asyncio.sleep(0.05)


async def _nothing() -> AsyncGenerator[str]:
    return
    yield ""


@study(target=TARGET, parts=["kills", "ends", "hangs", "poison"], kills=100, ends=50, seed=1)
def served_faults(options: Options, report: Report) -> bool:
    """What becomes of requests when the engine dies, hangs, or the server is told to end?

    Four clients ask for greedy, seeded and freely drawn texts all the time. The engine is killed
    by SIGKILL and SIGSEGV at random times; it hangs in three ways; seven prompts end it each time
    that they come; the server gets SIGTERM at random times, and sometimes twice. Every text that
    ends must be the call's; what cannot go on must end with one error, within a second; the engine
    must be back within 10 seconds, with /ready at 503 meanwhile.
    """
    num_kills, num_ends = (4, 2) if options.quick else (options.kills, options.ends)
    expected = _expected(options.target, first_prompts(8)[:8])
    rng = random.Random(options.seed)
    parts: dict[str, Callable[[], Coroutine[Any, Any, dict[str, Any]]]] = {
        "kills": lambda: _kills(options.target, expected, num_kills, rng),
        "ends": lambda: _ends(options.target, expected, num_ends, rng),
        "hangs": lambda: _hangs(options.target, expected),
        "poison": lambda: _poison(options.target, expected),
    }
    num_wrong = 0
    for name in options.parts:
        told = asyncio.run(parts[name]())
        num_wrong += told["num_wrong"]
        print(*told["wrong"], sep="\n", flush=True)
        note(report, **told)
    return not num_wrong


def _expected(target: str, prompts: list[str]) -> dict[tuple[str, str], str]:
    with closing(LLM(target, config=EngineConfig(threads=1, sampler="coupled"))) as llm:
        return {
            (prompt, kind): result.text
            for kind in ("greedy", "seeded")
            for prompt, result in zip(
                prompts,
                llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, **_HOW[kind])),
                strict=True,
            )
        }


async def _kills(
    target: str, expected: dict[tuple[str, str], str], num: int, rng: random.Random
) -> dict[str, Any]:
    found, unready, back, late = Found(), list[float](), list[float](), list[float]()
    num_done = 0
    while num_done < num:
        async with _served(target) as (process, client), _loaded(client, expected, found) as load:
            for _ in range(min(KILLS_OF_A_SERVER, num - num_done)):
                begun = load.num_begun
                await _until(lambda: load.num_begun > begun + AT_ONCE)  # noqa: B023
                await asyncio.sleep(rng.uniform(0, 1))
                killed, num_errors = perf_counter(), len(found.errors_at)
                _signal_engine(process.pid, (signal.SIGKILL, signal.SIGSEGV)[num_done % 2])
                num_done += 1
                unready.append(await _ready(client, 503) - killed)
                back.append(await _ready(client, 200) - killed)
                late += [at - killed for at in found.errors_at[num_errors:]]
        print(f"{num_done} kills, {len(found.wrong)} wrong", flush=True)
    found.check(max(late, default=0) < ERROR_SECONDS, f"an error after {max(late, default=0)} s")
    found.check(max(back) < START_SECONDS, f"back after {max(back)} s")
    return _told(
        "the engine is killed",
        found,
        kills=num_done,
        error_events=len(late),
        error_seconds=_spread(late),
        unready_seconds=_spread(unready),
        back_seconds=_spread(back),
    )


async def _ends(
    target: str, expected: dict[tuple[str, str], str], num: int, rng: random.Random
) -> dict[str, Any]:
    found, drained, hurried, statuses = Found(), list[float](), list[float](), Counter[str]()
    num_cut = 0
    for number in range(num):
        is_hurried = number % 10 == 9
        seen = Found()
        async with _served(target) as (process, client), _loaded(client, expected, seen) as load:
            await _until(lambda: load.num_begun > AT_ONCE)
            await asyncio.sleep(rng.uniform(0, 1))
            began = perf_counter()
            process.send_signal(signal.SIGTERM)
            with suppress(httpx.TransportError):
                await _ready(client, 503)
            # From now on who asks is refused, or finds nobody.
            load.is_over = True
            if is_hurried:
                process.send_signal(signal.SIGTERM)
            statuses[f"status {await process.wait()}"] += 1
            (hurried if is_hurried else drained).append(perf_counter() - began)
        cut = sum(count for what, count in seen.ends.items() if "error" in what)
        num_cut += 0 if is_hurried else cut
        found.wrong += seen.wrong
        found.ends += seen.ends
        if number % 10 == 9:
            print(f"{number + 1} ends, {num_cut} cut off, {len(found.wrong)} wrong", flush=True)
    found.check(num_cut == 0, f"{num_cut} cut off")
    found.check([*statuses] == ["status 0"], str(statuses))
    found.check(max(drained) < DRAIN_SECONDS, f"{max(drained)} s")
    found.check(max(hurried, default=0) < HURRIED_SECONDS, f"{max(hurried, default=0)} s")
    return _told(
        "the server is told to end",
        found,
        signals=num,
        cut_off=num_cut,
        drain_seconds=_spread(drained),
        second_signal_seconds=_spread(hurried),
    )


async def _hangs(target: str, expected: dict[tuple[str, str], str]) -> dict[str, Any]:
    """Three ways: the engine's thread sleeps, it holds Python's lock, the process is stopped."""
    found, seconds, stacks = Found(), dict[str, float](), 0
    with tempfile.TemporaryDirectory() as folder:
        flag, log = Path(folder) / "hang", Path(folder) / "log"
        async with (
            _served(target, folder, log) as (process, client),
            _loaded(client, expected, found) as load,
        ):
            for how in ("sleeps", "holds the lock", "stopped"):
                begun = load.num_begun
                await _until(lambda: load.num_begun > begun + AT_ONCE)  # noqa: B023
                began = perf_counter()
                if how == "stopped":
                    _signal_engine(process.pid, signal.SIGSTOP)
                else:
                    flag.write_text(how)
                await _ready(client, 503)
                seconds[how] = round(perf_counter() - began, 1)
                await _ready(client, 200)
        stacks = log.read_text().count("Fatal Python error: Aborted")
    found.check(max(seconds.values()) < HANG_SECONDS + 6, str(seconds))
    found.check(min(seconds.values()) > HANG_SECONDS - 1, str(seconds))
    # Who is stopped by SIGSTOP says nothing more.
    found.check(stacks >= 2, f"{stacks} stacks in the log")
    return _told("the engine hangs", found, found_after_seconds=seconds, logged_stacks=stacks)


async def _poison(target: str, expected: dict[tuple[str, str], str]) -> dict[str, Any]:
    """Requests and a prompt that end the engine each time: two ends each, and others go on."""
    found, answers = Found(), list[str]()
    poisons = [*([7] * 13 + [number] for number in range(6)), "poison"]
    with tempfile.TemporaryDirectory() as folder:
        async with _served(target, folder) as (_, client), _loaded(client, expected, found):
            for prompt in poisons:
                for _ in range(3):
                    await _ready(client, 200)
                    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
                    got = await client.post("/v1/completions", json=body)
                    answers.append(f"{got.status_code} {got.json()['error']['message'][:60]}")
            told, health = (await client.get("/metrics")).text, await client.get("/health")
            found.check(health.status_code == 200, health.text)
    (restarts,) = [
        float(line.rsplit(" ", 1)[1])
        for line in told.splitlines()
        if line.startswith("outrider_engine_restarts_total{")
    ]
    found.check(all("ended twice" in one for one in answers), str(answers))
    found.check(restarts == 2 * len(poisons), f"{restarts} restarts")
    return _told("requests that end the engine", found, restarts=restarts, answers=answers)


def _told(what: str, found: Found, **more: Any) -> dict[str, Any]:
    ends = dict(sorted(found.ends.items()))
    return {
        "what": what,
        **more,
        "ends": ends,
        "num_wrong": len(found.wrong),
        "wrong": found.wrong[:20],
    }


def _spread(values: list[float]) -> dict[str, float]:
    ranked = sorted(values) or [0.0]
    places = {"median": len(ranked) // 2, "p90": int(0.9 * (len(ranked) - 1)), "most": -1}
    return {name: round(ranked[place], 3) for name, place in places.items()}


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.01)


async def _ready(client: httpx.AsyncClient, status: int) -> float:
    """When /ready first answers so."""
    async with asyncio.timeout(120):
        while (await client.get("/ready")).status_code != status:
            await asyncio.sleep(0.05)
    return perf_counter()


def _signal_engine(server: int, number: signal.Signals) -> None:
    for task in Path(f"/proc/{server}/task").iterdir():
        for child in (task / "children").read_text("utf-8").split():
            if b"outrider.server.engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), number)


@asynccontextmanager
async def _loaded(
    client: httpx.AsyncClient, expected: dict[tuple[str, str], str], found: Found
) -> AsyncGenerator[Load]:
    """Clients that read what they began to its end."""
    load = Load(client, expected, found)
    tasks: list[Awaitable[None]] = [asyncio.ensure_future(load.keep(i)) for i in range(AT_ONCE)]
    try:
        yield load
    finally:
        load.is_over = True
        await asyncio.gather(*tasks)


@asynccontextmanager
async def _served(
    target: str, faults: str = "", log: Path | None = None
) -> AsyncGenerator[tuple[Process, httpx.AsyncClient]]:
    """A server and a client of it; with a folder for `faults`, one whose engine has some."""
    command = [sys.executable, "-m", "outrider", "serve", target, "--port", "0", "--json"]
    command += ["--threads", "1", "--batch-size", "8", "--max-queued", "64"]
    if faults:
        (Path(faults) / "sitecustomize.py").write_text(_FAULTS)
        path = f"{faults}{os.pathsep}{Path(outrider.__file__).parents[1]}"
        command = ["env", f"PYTHONPATH={path}", f"SERVED_FAULTS={faults}/hang", *command]
    with (log or Path(os.devnull)).open("wb") as errors:
        process = await create_subprocess_exec(*command, stdout=PIPE, stderr=errors)
        try:
            if process.stdout is None:
                raise RuntimeError("the server has no output")
            url = json.loads(await process.stdout.readline())["url"]
            limits = httpx.Limits(max_connections=4 * AT_ONCE)
            async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
                yield process, client
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()
