"""Plain replicas behind a known gateway: `run.py gateways [--gateway smg] [--output FILE]`."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
from common import TARGET, Report, note, study
from gateway_sides import GATEWAYS, KEY, Replica, answers, free_port
from options import Options

from outrider import LLM, EngineConfig, SamplingParams

NUM_FAMILIES, NUM_IN_FAMILY = 8, 4
RECOVERY_SECONDS = 60.0
# What all prompts of a family begin with, longer than what a gateway looks at.
_BEGINNING = (
    '"""Module {0} of {0}.\n\n' + "It reads lines of kind {0}, and sums what they say. " * 6
)


@dataclass(slots=True)
class Answer:
    """`is_whole` is what the client could tell: a status of 200 and an orderly end."""

    text: str = ""
    status: int = 0
    is_whole: bool = False


@study(target=TARGET, gateway=tuple(GATEWAYS), runs=10)
def gateways(options: Options, report: Report) -> bool:
    """What does a gateway promise of two servers of one model, of which one is killed?

    32 seeded requests of 8 families come at even distances, every second one as a stream. In the
    middle the server that has more of them is killed, and started again at once. Every answer
    that ends in order must be the call's text, those that break off must be a beginning of it, and
    nothing may fail that was not at the killed one. Then one server is asked to end while it has
    requests: none may be cut off. Recovery is the gateway's: from when the server that was started
    again is ready until it gets a request. `--quick` starts nothing again.
    """
    num_tokens = 64 if options.quick else 128
    families = _shuffled(NUM_FAMILIES // 2 if options.quick else NUM_FAMILIES)
    num = len(families)
    prompts = [
        f"{_BEGINNING.format(family)}request-{number}.\n" for number, family in enumerate(families)
    ]
    expected = _expected(options.target, prompts, num_tokens)
    runs: list[dict[str, Any]] = []
    for _ in range(1 if options.quick else options.runs):
        load = _Load(prompts, families, expected, num_tokens)
        runs.append(asyncio.run(_run(options, load)))
        print(json.dumps(runs[-1]), flush=True)
    note(
        report,
        requests=num,
        families=len(set(families)),
        tokens=num_tokens,
        wrong=sum(run["wrong"] for run in runs),
        broken=[run["broken"] for run in runs],
        refused=[run["refused"] for run in runs],
        asked_again=[run["asked_again"] for run in runs],
        failed_elsewhere=sum(run["failed_elsewhere"] for run in runs),
        truncated=sum(run["truncated"] for run in runs),
        affinity=statistics.fmean(run["affinity"] for run in runs),
        start_seconds=[run.get("start_seconds") for run in runs],
        recovery_seconds=[run.get("recovery_seconds") for run in runs],
        runs=runs,
    )
    bad = ("wrong", "failed_elsewhere", "truncated", "refused_at_the_end", "exit_code")
    return not any(run[name] for run in runs for name in bad) and all(
        run.get("recovery_seconds", 0) <= RECOVERY_SECONDS and run["both_served"] for run in runs
    )


def _shuffled(num: int) -> list[int]:
    """Each family as often, in an order in which turns would part what belongs together: with two
    servers they keep half of the first requests at one, 0.6 of those of eight families."""
    families = [family for family in range(num) for _ in range(NUM_IN_FAMILY)]
    random.Random(117).shuffle(families)
    return families


def _expected(target: str, prompts: list[str], num_tokens: int) -> list[str]:
    """The texts of the call; a request's seed is its number."""
    config = EngineConfig(threads=1, sampler="coupled", batch_size=16)
    asked = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.8)
    with closing(LLM(target, config=config)) as llm:
        tickets = [llm.submit(one, replace(asked, seed=n)) for n, one in enumerate(prompts)]
        while llm.has_work:
            llm.advance()
        return [ticket.result().text for ticket in tickets]


@asynccontextmanager
async def _standing(options: Options) -> AsyncGenerator[tuple[str, list[Replica]]]:
    """A gateway's address, and the replicas behind it, which are ready."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Workers of nginx may run as somebody else.
        folder.chmod(0o755)
        keys = folder / "keys"
        keys.write_text(f"{KEY}\n", "utf-8")
        replicas = [Replica(options.target, keys) for _ in range(2)]
        port, gateway = free_port(), None
        try:
            await asyncio.gather(*(replica.start() for replica in replicas))
            gateway = await GATEWAYS[options.gateway](folder, port, replicas)
            await answers(f"http://127.0.0.1:{port}/v1/models")
            yield f"http://127.0.0.1:{port}", replicas
        finally:
            if gateway is not None:
                gateway.terminate()
                await gateway.wait()
            await asyncio.gather(*(replica.aclose() for replica in replicas))


async def _run(options: Options, load: _Load) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        _standing(options) as (url, replicas),
        httpx.AsyncClient(base_url=url, timeout=600, headers=headers, trust_env=False) as client,
    ):
        load.client = client
        begun = perf_counter()
        await load.ask(0)
        # So that about six requests are under way at any time.
        gap = (perf_counter() - begun) / 3
        first = 5 * load.num // 8
        for number in range(1, first):
            load.begin(number)
            await asyncio.sleep(gap)
        lost = max(replicas, key=lambda one: len(load.pending & set(one.seen)))
        before = [list(one.seen) for one in replicas]
        at_lost = load.pending & set(lost.seen)
        lost.kill()
        killed = perf_counter()
        again = None if options.quick else asyncio.ensure_future(lost.start())
        for number in range(first, load.num):
            load.begin(number)
            await asyncio.sleep(gap)
        await load.rest()
        told = load.verdict(at_lost) | load.homes(before) | {"was_at_lost": len(at_lost)}
        told["asked_again"] = len(set(replicas[0].seen) & set(replicas[1].seen))
        if again is None:
            replicas.remove(lost)
            return told | await load.drained(replicas)
        await again
        ready = perf_counter()
        told["start_seconds"] = round(ready - killed, 2)
        told["recovery_seconds"] = round(await load.until_used(lost) - ready, 2)
        return told | await load.drained(replicas)


class _Load:
    """Requests by their numbers, and what became of them."""

    client: httpx.AsyncClient

    def __init__(
        self, prompts: list[str], families: list[int], expected: list[str], num_tokens: int
    ) -> None:
        self.num = len(prompts)
        self._prompts, self._families, self._expected = prompts, families, expected
        self._num_tokens = num_tokens
        self._answers: dict[int, Answer] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def pending(self) -> set[int]:
        return {number for number, task in self._tasks.items() if not task.done()}

    def begin(self, number: int) -> None:
        self._tasks[number] = asyncio.create_task(self.ask(number))

    async def ask(self, number: int) -> None:
        answer = self._answers[number] = Answer()
        body = {
            "prompt": self._prompts[number],
            "model": TARGET,
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": number,
            "stream": number % 2 == 1,
        }
        try:
            async with self.client.stream("POST", "/v1/completions", json=body) as got:
                answer.status = got.status_code
                if body["stream"] and got.status_code == 200:
                    await _read(got, answer)
                else:
                    text = (await got.aread()).decode()
                    if got.status_code == 200:
                        answer.text = json.loads(text)["choices"][0]["text"]
                        answer.is_whole = True
        except (httpx.HTTPError, ValueError):
            answer.is_whole = False

    async def rest(self) -> None:
        await asyncio.gather(*self._tasks.values())

    def verdict(self, at_lost: set[int]) -> dict[str, int]:
        """Refused are those that got an error before anything of them was answered."""
        counts = Counter[str](wrong=0, broken=0, refused=0, failed_elsewhere=0)
        for number, answer in self._answers.items():
            text = self._expected[number]
            if answer.is_whole:
                counts["wrong"] += answer.text != text
            else:
                counts["wrong"] += not text.startswith(answer.text)
                counts["refused" if answer.status > HTTPStatus.OK else "broken"] += 1
                counts["failed_elsewhere"] += number not in at_lost
        return dict(counts)

    def homes(self, seen: list[list[int]]) -> dict[str, Any]:
        """Of the requests before the kill: what share went where most of their family did."""
        homes: dict[int, Counter[int]] = {}
        for replica, numbers in enumerate(seen):
            for number in numbers:
                homes.setdefault(self._families[number], Counter())[replica] += 1
        most = sum(max(found.values()) for found in homes.values())
        return {
            "affinity": round(most / sum(map(len, seen)), 3),
            "both_served": all(seen),
            "by_replica": [len(numbers) for numbers in seen],
        }

    async def until_used(self, replica: Replica) -> float:
        """Ask until one that was started again gets a request."""
        num_seen = len(replica.seen)
        until = perf_counter() + 2 * RECOVERY_SECONDS
        while len(replica.seen) == num_seen and perf_counter() < until:
            await asyncio.gather(*map(self.ask, range(NUM_FAMILIES)))
        return perf_counter()

    async def drained(self, replicas: list[Replica]) -> dict[str, Any]:
        """Ask the replica that has more requests to end; where there is another one requests go on
        coming."""
        self._answers.clear()
        self._tasks.clear()
        half = self.num // 2
        before = [len(one.seen) for one in replicas]
        for number in range(half):
            self.begin(number)
        await asyncio.sleep(0.1)
        ending = max(replicas, key=lambda one: len(one.seen) - before[replicas.index(one)])
        num_held = len(self.pending & set(ending.seen))
        begun = perf_counter()
        stopped = asyncio.ensure_future(ending.end())
        for number in range(half, self.num if len(replicas) > 1 else half):
            self.begin(number)
            await asyncio.sleep(0.02)
        await self.rest()
        told = self.verdict(set())
        return {
            "held_at_the_end": num_held,
            "truncated": told["broken"] + told["wrong"],
            # Without another replica there is nobody who could take them.
            "refused_at_the_end": told["refused"] if len(replicas) > 1 else 0,
            "exit_code": await stopped,
            "drain_seconds": round(perf_counter() - begun, 2),
        }


async def _read(got: httpx.Response, answer: Answer) -> None:
    async for line in got.aiter_lines():
        if line == "data: [DONE]":
            answer.is_whole = answer.status == 200
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return
            answer.text += "".join(choice["text"] for choice in event["choices"])
