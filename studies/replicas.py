"""Engines beside each other: `run.py replicas`; one of them killed: `run.py replica_killed`."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import timeit
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from common import TARGET, Report, note, real_folder, study, tier_folders
from killed_engine import Findings, Fleet, asks, examine, gap_for
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.plugins.measure.turns import rotated
from outrider.plugins.replicas import ReplicasPort
from outrider.sched.admission import KnownBlocks, best_known, blocks_of
from outrider.server.port import EngineRequest, Engines, Load
from outrider.server.process_port import ProcessPort
from outrider_lab.bench.workload import builtin_texts
from outrider_lab.measure.frame import paired_ratio

# By arm: how many engines, and threads of each.
ARMS: Mapping[str, tuple[int, int]] = {"1x1": (1, 1), "1x2": (1, 2), "2x1": (2, 1)}
RATIOS = (("2x1", "1x1"), ("2x1", "1x2"))
MODES: Mapping[str, bool | None] = {"plain": False, "speculative": None}
IN_FLIGHT = (2, 8, 16)
CONTEXT = 1024
DOMAINS = ("conversation", "code", "maths")
_HEADER = "x-outrider-engine"


@study(tiers=True, tier=["a", "r"], real="", turns=5, max_tokens=64, router_asks=100)
def replicas(options: Options, report: Report) -> bool:
    """Are two engines of one thread faster than one of one thread, and than one of two?

    All engines are loaded at once and answer the same prompts in turns, greedily, so many in
    flight, without speculation and with it; their texts must be the same. Ratios are of seconds a
    token, turn by turn, of the other over two engines of one thread: above 1 these are faster. Then
    a server of two engines and one of one are asked over HTTP in turns, one request at a time: what
    the router adds to the time to the first token.
    """
    with tier_folders(options) as folders:
        named = {name: str(folder) for name, folder in folders.items()}
        named["r"] = str(real_folder(options.real))
        for tier in options.tier:
            model = TARGET if tier == "a" else named[tier]
            asyncio.run(_throughput(report, options, tier, model))
    _router(report, options)
    return True


@dataclass(frozen=True, slots=True)
class _Load:
    seconds_per_token: float
    texts: tuple[str, ...]


async def _throughput(report: Report, options: Options, tier: str, model: str) -> None:
    ports = {name: _port(model, *arm) for name, arm in ARMS.items()}
    try:
        for port in ports.values():
            await port.start()
        for in_flight in IN_FLIGHT[:1] if options.quick else IN_FLIGHT:
            for mode, speculative in MODES.items():
                params = SamplingParams(
                    max_tokens=16 if options.quick else options.max_tokens,
                    ignore_eos=True,
                    temperature=0.0,
                    speculative=speculative,
                )
                cell = await _cell(ports, params, in_flight, 1 if options.quick else options.turns)
                note(report, part="throughput", tier=tier, mode=mode, in_flight=in_flight, **cell)
    finally:
        for port in ports.values():
            await port.aclose()


def _port(model: str, number: int, threads: int) -> ReplicasPort:
    config = EngineConfig(threads=threads, batch_size=max(IN_FLIGHT), context=CONTEXT, device="cpu")
    places = Engines.of(number, [], config).placements
    return ReplicasPort([ProcessPort(Load(model, None, config, 1000, one)) for one in places])


async def _cell(
    ports: Mapping[str, ReplicasPort], params: SamplingParams, in_flight: int, turns: int
) -> dict[str, Any]:
    # A first turn, which is not counted, warms all.
    found: dict[str, dict[int, float]] = {name: {} for name in ports}
    for turn in range(-1, turns):
        prompts = _prompts(2 * in_flight, f"{in_flight} {turn}")
        of_turn = set[tuple[str, ...]]()
        for name in rotated(list(ports), turn + 1):
            load = await _load(ports[name], prompts, params, in_flight)
            of_turn.add(load.texts)
            if turn >= 0:
                found[name][turn] = load.seconds_per_token
        if len(of_turn) > 1:
            raise RuntimeError("the arms wrote different texts")
    ratios = {
        f"{one} over {other}": paired_ratio(found[other], found[one]) for one, other in RATIOS
    }
    return {
        "tokens_per_second": {
            name: round(1 / statistics.median(them.values()), 1) for name, them in found.items()
        },
        "ratios": {name: ratio and asdict(ratio) for name, ratio in ratios.items()},
    }


def _prompts(number: int, words: str) -> list[str]:
    """None of which begins as another, so that no memory of prompts helps."""
    mixed = [text for group in zip(*map(builtin_texts, DOMAINS), strict=False) for text in group]
    return [f"Request {i} of {words}. {mixed[i % len(mixed)]}" for i in range(number)]


async def _load(
    port: ReplicasPort, prompts: Sequence[str], params: SamplingParams, in_flight: int
) -> _Load:
    places, texts, num_tokens = asyncio.Semaphore(in_flight), [""] * len(prompts), 0
    ids = [await port.encode(prompt) for prompt in prompts]

    async def ask(number: int) -> None:
        nonlocal num_tokens
        async with places:
            request = EngineRequest(prompt_ids=ids[number], params=params, structure={})
            stream = port.stream(request)
            async for event in stream:
                texts[number] += event.text
            num_tokens += stream.result.num_tokens

    started = perf_counter()
    await asyncio.gather(*map(ask, range(len(prompts))))
    return _Load((perf_counter() - started) / num_tokens, tuple(texts))


def _router(report: Report, options: Options) -> None:
    number = 4 if options.quick else options.router_asks
    seconds: dict[str, dict[int, float]] = {"direct": {}, "routed": {}}
    with ExitStack() as stack:
        servers = {
            "direct": stack.enter_context(_served()),
            "routed": stack.enter_context(_served("--replicas", "2")),
        }
        for turn in range(-2, number):
            for name in rotated(list(servers), turn + 2):
                first = _first_token(servers[name].url, f"# Request {turn} {name}.\ndef add(")
                if turn >= 0:
                    seconds[name][turn] = first
    ratio = paired_ratio(seconds["routed"], seconds["direct"])
    differences = [seconds["routed"][turn] - seconds["direct"][turn] for turn in seconds["routed"]]
    note(
        report,
        part="router",
        choosing_us=round(1e6 * _choosing_seconds(), 1),
        requests=number,
        direct_ms=round(1e3 * statistics.median(seconds["direct"].values()), 3),
        routed_ms=round(1e3 * statistics.median(seconds["routed"].values()), 3),
        added_ms=round(1e3 * statistics.median(differences), 3),
        ratio=ratio and asdict(ratio),
    )


def _choosing_seconds() -> float:
    """To choose an engine for a prompt of 1,000 tokens that both have read."""
    ids = range(1_000)
    engines = [_Known(KnownBlocks(), 0) for _ in range(2)]
    for engine in engines:
        engine.known.note(list(blocks_of(ids)))
    return min(timeit.repeat(lambda: best_known(engines, list(blocks_of(ids))), number=100)) / 100


@dataclass(frozen=True, slots=True)
class _Known:
    known: KnownBlocks
    num_in_flight: int


def _first_token(url: str, prompt: str) -> float:
    parts = urlsplit(url)
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    with closing(connection):
        started = perf_counter()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        got = connection.getresponse()
        for line in got:
            if line.startswith(b"data: {"):
                first = perf_counter() - started
                got.read()
                return first
    raise RuntimeError("no token came")


@dataclass(frozen=True, slots=True)
class _Server:
    """A server in a process, and its engines as they were started."""

    process: subprocess.Popen[str]
    url: str
    engines: tuple[int, ...]

    def num_ready(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        ready = [line for line in lines if line.startswith("outrider_engine_state{")]
        return sum(line.endswith(" 1.0") for line in ready if 'state="ready"' in line)

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@contextmanager
def _served(*flags: str) -> Generator[_Server]:
    command = [sys.executable, "-m", "outrider", "serve", TARGET, "--port", "0", "--json"]
    command += ["--threads", "1", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = json.loads(process.stdout.readline() if process.stdout else "")["url"]
            yield _Server(process, url, _children(process.pid))
        finally:
            process.terminate()
            process.wait(60)


def _children(parent: int) -> tuple[int, ...]:
    found: list[int] = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(file.parent.name))
    return tuple(sorted(found))


@study(runs=10, families=8, members=4, max_tokens=128)
def replica_killed(options: Options, report: Report) -> bool:
    """Do clients of a server of two engines see that one of them is killed?

    32 seeded requests of 8 families of prompts come at even distances: once with all well, once
    with an engine killed by SIGKILL in the middle; when it is back, some more; at last the server
    is told to end while requests run. All texts must be those of a single process, the killed
    engine's among them; within 60 seconds it must be back; nine of ten requests of a family must
    have gone to one engine while all was well; and nothing may be cut off at the end.
    """
    asked = asks(options.families, options.members, 32 if options.quick else options.max_tokens)
    bodies = [dict(ask.body) for ask in asked]
    with closing(LLM(TARGET, config=EngineConfig(threads=1))) as llm:
        expected = [
            llm.generate(body.pop("prompt"), SamplingParams(**body, sampler="coupled"))[0].text
            for body in bodies
        ]
    runs: list[Findings] = []
    for _ in range(1 if options.quick else options.runs):
        with _served("--replicas", "2") as server:
            fleet = Fleet(
                server.url,
                _HEADER,
                lambda name, engines=server.engines: os.kill(engines[int(name)], signal.SIGKILL),
                server.num_ready,
                server.end,
            )
            runs.append(examine(fleet, asked, expected, gap_for(fleet, asked[0])))
            print(runs[-1], flush=True)
    bars = {
        "holds": all(run.holds for run in runs),
        "recovers": max(run.recovery_seconds for run in runs) <= 60,
        "keeps_families": min(run.affinity for run in runs) >= 0.9,
    }
    note(report, requests=len(asked), runs=[asdict(run) for run in runs], **bars)
    return all(bars.values())
