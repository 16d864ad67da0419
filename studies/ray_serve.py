"""A deployment on Ray Serve that loses a replica: `run.py ray_serve [--output FILE]`.

It runs in the environment that scripts/cluster_tests makes.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from subprocess import DEVNULL
from time import perf_counter
from typing import Any

import httpx
from common import TARGET, Report, cells_before, note, study
from options import Options
from ray_cluster import Deployment, deployed, is_ready

from outrider import LLM, EngineConfig, SamplingParams
from outrider.plugins.measure.turns import rotated

NUM_FAMILIES, RECOVERY_SECONDS = 8, 60.0
_MOST_UNDER_WAY = 6
_BEGINNING = (
    '"""Module {0} of {0}.\n\n' + "It reads lines of kind {0}, and sums what they say. " * 6
)


@dataclass(slots=True)
class Answer:
    """`engine` wrote its first tokens. `is_whole` is what the client could tell: a status of 200
    and an orderly end."""

    engine: int | None = None
    status: int = 0
    text: str = ""
    is_whole: bool = False
    has_ended: bool = False


@study(target=TARGET, runs=10)
def ray_serve(options: Options, report: Report) -> bool:
    """What does a deployment on Ray Serve promise, of whose two replicas one is killed?

    32 seeded streams of 8 families come at even distances. In the middle a replica is killed. All
    answers must end in order with the call's text; those that were under way go on elsewhere. Then
    one replica is taken away while it has requests, and the application: none may be cut off.
    """
    num_tokens = 64 if options.quick else 192
    # Those of the file are kept, so that ten runs need not be at one stretch.
    before = cells_before(options.output)
    runs: list[dict[str, Any]] = [one for cell in before for one in cell.get("runs", ())]
    expected = texts_of_the_call(options.target, num_tokens)
    for _ in range(1 if options.quick else options.runs):
        runs.append(one_run(options.target, expected, num_tokens))
        print(json.dumps(runs[-1]), flush=True)
    note(report, **cost_of_ray(options.target, 3 if options.quick else 15))
    note(
        report,
        requests=len(expected),
        families=NUM_FAMILIES,
        tokens=num_tokens,
        wrong=sum(run["wrong"] for run in runs),
        moved=sum(run["moved"] for run in runs),
        truncated=sum(run["truncated"] for run in runs),
        affinity=statistics.fmean(run["affinity"] for run in runs),
        recovery_seconds=max(run["recovery_seconds"] for run in runs),
        gigabytes=max(run["gigabytes"] for run in runs),
        runs=runs,
    )
    return not any(run["wrong"] or run["truncated"] or run["exit_code"] for run in runs) and all(
        run["recovery_seconds"] <= RECOVERY_SECONDS and run["both_served"] for run in runs
    )


def prompts_of(num: int) -> list[str]:
    return [f"{_BEGINNING.format(one % NUM_FAMILIES)}request-{one}.\n" for one in range(num)]


def texts_of_the_call(target: str, num_tokens: int) -> list[str]:
    """A request's seed is its number."""
    with closing(LLM(target, config=EngineConfig(threads=1, sampler="coupled"))) as llm:
        return [
            llm.generate(
                prompt,
                SamplingParams(
                    max_tokens=num_tokens, ignore_eos=True, temperature=0.8, seed=number
                ),
            )[0].text
            for number, prompt in enumerate(prompts_of(4 * NUM_FAMILIES))
        ]


def cost_of_ray(target: str, repeats: int) -> dict[str, Any]:
    """A request alone, by turns through Ray and at `outrider serve`, each with an engine of one
    thread: medians of the milliseconds to its first token, and between its tokens."""
    words = ("serve", target, "--threads", "1", "--port", "0", "--json")
    found: dict[str, list[tuple[float, float]]] = {"ray": [], "serve": []}
    with (
        deployed(model=target) as deployment,
        subprocess.Popen(
            [sys.executable, "-m", "outrider", *words], stdout=subprocess.PIPE, stderr=DEVNULL
        ) as process,
    ):
        assert process.stdout is not None
        own = json.loads(process.stdout.readline())["url"]
        deployment.wait_until(lambda: is_ready(own), "the server does not start")
        urls = {"ray": deployment.url, "serve": own}
        for turn in range(repeats):
            for name in rotated(list(urls), turn):
                found[name].append(timed(urls[name], turn))
        process.terminate()
    told: dict[str, Any] = {"repeats": repeats}
    for name, pairs in found.items():
        # The first one of each is a warm-up.
        first, between = zip(*pairs[1:], strict=True)
        told[f"first_ms_{name}"] = round(1e3 * statistics.median(first), 2)
        told[f"between_ms_{name}"] = round(1e3 * statistics.median(between), 2)
    return told


def timed(url: str, number: int) -> tuple[float, float]:
    """Seconds to the first token, and from there on between tokens."""
    num_tokens = 128
    body = {
        "prompt": f"def part_{number}(self, items):\n",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    begun, first = perf_counter(), 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as got:
        for line in got.iter_lines():
            if line.startswith("data: ") and not first:
                first = perf_counter()
    return first - begun, (perf_counter() - first) / (num_tokens - 1)


def one_run(target: str, expected: list[str], num_tokens: int) -> dict[str, Any]:
    with deployed(model=target) as deployment:
        told = asyncio.run(_lose_one(deployment, expected, num_tokens))
        told |= asyncio.run(_drain(deployment, expected, num_tokens))
        return told | {"gigabytes": round(deployment.most_bytes / 1e9, 2)}


async def _lose_one(deployment: Deployment, expected: list[str], num_tokens: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=deployment.url, timeout=240, trust_env=False) as client:
        load = Load(client, expected, num_tokens)
        begun = perf_counter()
        await load.ask(0)
        # So that about six requests are under way at any time.
        gap = (perf_counter() - begun) / 3
        half = len(expected) // 2
        for number in range(1, half):
            # On a machine that pauses requests pile up, which the router shares out, and a family
            # has no home before its first text began.
            while load.num_under_way > _MOST_UNDER_WAY or not load.has_begun(number - NUM_FAMILIES):
                await asyncio.sleep(0.005)
            load.begin(number)
            await asyncio.sleep(gap)
        before = {number: one.engine for number, one in load.answers.items()}
        under_way = {
            number for number, one in load.answers.items() if one.text and not one.has_ended
        }
        known = set(deployment.engines())
        os.kill(min(known), signal.SIGKILL)
        killed = perf_counter()
        for number in range(half, len(expected)):
            load.begin(number)
            await asyncio.sleep(gap)
        await load.rest()
        told = load.verdict() | _homes(before)
        # Ray starts another one of the same number. Until then all is written by the other.
        after = Counter(load.answers[number].engine for number in range(half, len(expected)))
        lost = 1 - after.most_common(1)[0][0] if after else None
        told["under_way"] = len(under_way)
        told["moved"] = sum(before[number] == lost for number in under_way)
        told["restarts"] = await _restarts(client)
        while len(set(deployment.engines()) - known) < 1:
            await asyncio.sleep(0.2)
        while not await load.is_used(lost) and perf_counter() < killed + 10 * RECOVERY_SECONDS:
            await asyncio.sleep(0.2)
        told["is_back"] = any(one.engine == lost for one in load.answers.values())
        return told | {"recovery_seconds": round(perf_counter() - killed, 2)}


async def _restarts(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    found = [line for line in text.splitlines() if "restarts" in line and line[0] != "#"]
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def _drain(deployment: Deployment, expected: list[str], num_tokens: int) -> dict[str, Any]:
    """Take a replica away while it has requests, and then the application."""
    truncated: list[int] = []
    held: list[int] = []
    for config in (_with_one_replica(deployment.config), deployment.config | {"applications": []}):
        async with httpx.AsyncClient(
            base_url=deployment.url, timeout=240, trust_env=False
        ) as client:
            load = Load(client, expected, num_tokens)
            for number in range(NUM_FAMILIES):
                load.begin(number)
            while sum(bool(one.text) for one in load.answers.values()) < NUM_FAMILIES:
                await asyncio.sleep(0.01)
            deploying = asyncio.create_task(asyncio.to_thread(deployment.deploy, config))
            number = NUM_FAMILIES
            # As many as before at any time, until Ray has heard of it.
            while not deploying.done():
                for _ in range(NUM_FAMILIES - load.num_under_way):
                    load.begin(number)
                    number += 1
                await asyncio.sleep(0.02)
            held.append(load.num_under_way)
            await deploying
            await load.rest()
            # Of an application that is gone Ray says 404.
            gone = 0 if config["applications"] else load.num_refused
            truncated.append(load.verdict()["wrong"] - gone)
        wanted = 1 if config["applications"] else 0
        await asyncio.to_thread(
            deployment.wait_until,
            lambda wanted=wanted: len(deployment.engines()) == wanted,
            "replicas that are too many do not end",
        )
    return {"held": held, "truncated": sum(truncated), "exit_code": deployment.end()}


def _with_one_replica(config: Mapping[str, Any]) -> dict[str, Any]:
    told = copy.deepcopy(dict(config))
    told["applications"][0]["deployments"][1]["num_replicas"] = 1
    return told


def _homes(engines: dict[int, int | None]) -> dict[str, Any]:
    """Before the kill: what share of the requests went where most of their family did."""
    homes: dict[int, Counter[int | None]] = {}
    for number, engine in engines.items():
        if engine is not None:
            homes.setdefault(number % NUM_FAMILIES, Counter())[engine] += 1
    most = sum(max(found.values()) for found in homes.values())
    total = sum(found.total() for found in homes.values())
    used = Counter(engine for engine in engines.values() if engine is not None)
    return {
        "affinity": round(most / total, 3),
        "both_served": len(used) == 2,
        "by_replica": sorted(used.values()),
    }


class Load:
    """Requests by their numbers, and what became of them. Prompts and seeds come again."""

    def __init__(self, client: httpx.AsyncClient, expected: list[str], num_tokens: int) -> None:
        self._client, self._expected, self._num_tokens = client, expected, num_tokens
        self._prompts = prompts_of(len(expected))
        self.answers: dict[int, Answer] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, number: int) -> None:
        self._tasks[number] = asyncio.create_task(self.ask(number))

    async def rest(self) -> None:
        await asyncio.gather(*self._tasks.values())

    async def ask(self, number: int, num_tokens: int = 0) -> None:
        answer = self.answers[number] = Answer()
        seed = number % len(self._prompts)
        body = {
            "prompt": self._prompts[seed],
            "max_tokens": num_tokens or self._num_tokens,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": seed,
            "stream": True,
        }
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as got:
                answer.status = got.status_code
                if got.status_code == 200:
                    # Unknown of one that heard a comment before its first token.
                    told = got.headers.get("x-outrider-engine")
                    answer.engine = None if told is None else int(told)
                    await _read(got, answer)
        except httpx.HTTPError:
            answer.is_whole = False
        answer.has_ended = True

    def verdict(self) -> dict[str, int]:
        """`wrong` are all that did not end in order with the text of the call."""
        num = len(self._expected)
        told = [(self._expected[number % num], one) for number, one in self.answers.items()]
        return {
            "wrong": sum(not one.is_whole or one.text != text for text, one in told),
            "broken": sum(not one.is_whole for _, one in told),
        }

    def has_begun(self, number: int) -> bool:
        """Whether the answer has a text; True for one that nobody requested."""
        answer = self.answers.get(number)
        return answer is None or bool(answer.text) or answer.has_ended

    @property
    def num_under_way(self) -> int:
        return sum(not one.has_ended for one in self.answers.values())

    @property
    def num_refused(self) -> int:
        return sum(one.status in (404, 503) for one in self.answers.values())

    async def is_used(self, engine: int | None) -> bool:
        """Whether it writes any of a request of each family."""
        self.answers.clear()
        await asyncio.gather(*(self.ask(number, 16) for number in range(NUM_FAMILIES)))
        return any(one.engine == engine for one in self.answers.values())


async def _read(got: httpx.Response, answer: Answer) -> None:
    async for line in got.aiter_lines():
        if line == "data: [DONE]":
            answer.is_whole = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return
            answer.text += "".join(choice["text"] for choice in event["choices"])
