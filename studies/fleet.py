"""Two real replicas beside two simulated ones: `run.py fleet [--target FOLDER] [--output FILE]`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import httpx
from common import TARGET, Report, first_prompts, note, study
from options import Options

from outrider.core.config import EngineConfig
from outrider.metrics import percentile
from outrider_lab.planner.calibration import Calibration
from outrider_lab.simulator.events import Chance, JobCosts, Simulated
from outrider_lab.simulator.load import Fleet, Lengths, SimulatedLoad, poisson, requests_of
from outrider_lab.simulator.simulate import simulate

SEED, SHARED, FAMILIES = 5, 64, 4
NEAR = 0.15
# Of what two replicas are foretold to write; so queues form and empty.
_SHARES = {"half": 0.5, "most": 0.85}
_TOLD = ("tokens_per_second", "first_p50", "first_p99", "latency_p50", "latency_p99")
# The first token and its time; then the last one's.
_Times = tuple[float, float]


@study(target=TARGET, requests=32, prompt=96, tokens=48, batch=4, seconds=20.0, turns=3)
def fleet(options: Options, report: Report) -> bool:
    """Does the simulator foretell what two replicas of one thread each do, within 15 %?

    Costs are measured by two plans at once, so that each knows what it is to have the other beside
    it. The same requests, of prompts in families, then come to `serve --replicas 2` and to the
    simulator: in a closed loop, and by the clock at a half and at 85 % of what the closed loop was
    foretold to write. Decoding is plain. Costs and runs take turns; a figure is the median.
    """
    lengths = Lengths(options.prompt, options.tokens, 0.3, FAMILIES, SHARED)
    requests = requests_of(lengths, 8 if options.quick else options.requests, seed=SEED)
    users = SimulatedLoad(requests, in_flight=2 * options.batch)
    costs: list[Calibration] = []
    loads: dict[str, SimulatedLoad] = {"closed": users}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("closed", *_SHARES)}
    with _served(options) as url:
        for _ in range(1 if options.quick else options.turns):
            costs.append(_costs(options))
            if len(costs) == 1:
                most = _figures(_foretold(costs[0], users, options.batch))["tokens_per_second"]
                for name, share in _SHARES.items():
                    loads[name] = poisson(requests, share * most / options.tokens, seed=SEED)
            for name, load in loads.items():
                runs[name].append(asyncio.run(_measured(url, load)))
    known = sorted(costs, key=lambda one: one.target.seconds(4, 400, 400))[len(costs) // 2]
    furthest = 0.0
    for name, load in loads.items():
        told = _figures(_foretold(known, load, options.batch))
        real = {key: percentile([run[key] for run in runs[name]], 50) for key in _TOLD}
        off = {key: round(told[key] / real[key] - 1, 3) for key in _TOLD}
        furthest = max(furthest, abs(off["tokens_per_second"]), abs(off["latency_p50"]))
        note(report, load=name, off=off, foretold=told, measured=real, runs=runs[name])
    return options.quick or furthest <= NEAR


def _costs(options: Options) -> Calibration:
    """By two plans at once, of which the first is read."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / f"{number}.json" for number in range(2)]
        words = ("plan", options.target, "--threads", "1", "--drafters", "ngram", "--fresh")
        words = (*words, "--seconds", str(4 if options.quick else options.seconds))
        both = [
            subprocess.Popen(
                [sys.executable, "-m", "outrider", *words, "--save", str(file)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for file in files
        ]
        for one in both:
            one.wait()
        record = json.loads(files[0].read_text("utf-8"))
        return Calibration.of_json(json.dumps(record["calibration"]))


def _foretold(known: Calibration, load: SimulatedLoad, batch: int) -> Simulated:
    config = EngineConfig(schedule="single", k=0, batch_size=batch)
    return simulate(config, load, JobCosts(known, None), Chance((0.0,)), fleet=Fleet(2))


def _figures(run: Simulated) -> dict[str, float]:
    times = [(one.arrivals[0], one.arrivals[-1]) for one in run.served]
    num_tokens = sum(len(one.arrivals) for one in run.served)
    return _told(times, num_tokens, run.seconds)


def _told(times: list[_Times], num_tokens: int, seconds: float) -> dict[str, float]:
    first, latency = zip(*times, strict=True)
    return {
        "tokens_per_second": num_tokens / seconds,
        "first_p50": percentile(first, 50),
        "first_p99": percentile(first, 99),
        "latency_p50": percentile(latency, 50),
        "latency_p99": percentile(latency, 99),
    }


@contextmanager
def _served(options: Options) -> Generator[str]:
    words = ("serve", options.target, "--port", "0", "--json", "--replicas", "2", "--threads", "1")
    words = (
        *words,
        "--drafter",
        "none",
        "--schedule",
        "single",
        "--batch-size",
        str(options.batch),
    )
    with subprocess.Popen(
        [sys.executable, "-m", "outrider", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


async def _measured(url: str, load: SimulatedLoad) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        prompts = await _prompts(client, load)
        at_once = asyncio.Semaphore(load.in_flight or len(load.requests))
        # What the runs before have left in the caches is of other prompts.
        begun = perf_counter()

        async def one(number: int) -> _Times:
            request = load.requests[number]
            if load.in_flight is None:
                await asyncio.sleep(max(0.0, begun + request.arrives - perf_counter()))
            async with at_once:
                return await _asked(client, prompts[number], request.num_output)

        times = await asyncio.gather(*map(one, range(len(prompts))))
        return _told(list(times), load.num_tokens, perf_counter() - begun)


async def _prompts(client: httpx.AsyncClient, load: SimulatedLoad) -> list[list[int]]:
    """Ids of text, by families; each call gives others, by the moment."""
    text = f"{perf_counter()} " + "\n".join(first_prompts(8))
    ids = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
    room = len(ids) - max(one.num_prompt for one in load.requests)
    moment = int(1e3 * perf_counter())
    return [
        _cut(ids, moment + 7919 * (one.family + 1), one.num_shared, room)
        + _cut(ids, moment + 104_729 * (number + 9), one.num_prompt - one.num_shared, room)
        for number, one in enumerate(load.requests)
    ]


def _cut(ids: list[int], key: int, count: int, room: int) -> list[int]:
    return ids[key % room :][:count]


async def _asked(client: httpx.AsyncClient, ids: list[int], num_tokens: int) -> _Times:
    body = {"prompt": ids, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    begun = perf_counter()
    first = 0.0
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as got:
        async for line in got.aiter_lines():
            if line.startswith("data: ") and not first:
                first = perf_counter() - begun
    return first, perf_counter() - begun
