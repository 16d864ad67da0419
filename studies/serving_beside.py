"""Serving many requests at once beside llama-server: `run.py serving_beside --files FILE...`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from common import Report, note, study
from http_load import Load, chats
from options import Options

from outrider.core.errors import ConfigError
from outrider.plugins.measure.turns import rotated
from outrider_lab.bench.peers.contestants import LLAMA
from outrider_lab.bench.peers.servers import LlamaSide
from outrider_lab.bench.peers.sides import Setup
from outrider_lab.bench.workload import builtin_texts
from outrider_lab.measure.frame import paired_ratio
from outrider_lab.measure.store import write_json

OURS, PLAIN, BEST = "ours", "none", "best"
IN_FLIGHT = (1, 4, 8, 16)
CONTEXT = 1024
DOMAINS = ("conversation", "code", "maths")
# By name what a request of ours says of speculation; one server does them all.
OUR_VARIANTS: Mapping[str, Any] = {
    PLAIN: False,
    "as served": True,
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix"},
}
# Drafter, K and options of a server of llama.cpp.
THEIR_VARIANTS: Sequence[tuple[str, int, Mapping[str, Any]]] = (
    (PLAIN, 0, {}),
    ("ngram", 0, {"kind": "ngram-simple"}),
    ("ngram", 8, {"kind": "ngram-simple"}),
    ("ngram", 16, {"kind": "ngram-mod", "size": 6}),
)


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address, and what its requests say besides."""

    url: str
    more: Mapping[str, Any]

    def load(self, prompts: Sequence[str], in_flight: int, max_tokens: int) -> Load:
        """Chats of up to so many tokens at temperature 0."""
        body = {"max_tokens": max_tokens, "temperature": 0, **self.more}
        return chats(self.url, prompts, in_flight, body)


@study(files=[], peers="", tokenizer="", threads=2, turns=4, max_tokens=64)
def serving_beside(options: Options, report: Report) -> bool:
    """Are 1 to 16 requests at once served faster than by llama-server, plain and at its best?

    Both serve the same file with the same threads; GuideLLM asks both over HTTP, chats of three
    kinds at temperature 0, each beginning with other words so that no prompt is remembered. On
    prompts that are not counted the best speculation of both is chosen for each number in flight;
    then both plain and both best answer the same prompts in turns. Ratios are of seconds a token of
    all requests together, and of the median time to a first token, turn by turn, ours the faster
    where above 1.
    """
    if not options.files:
        raise ConfigError("no file is named.", hint="--files MODEL.gguf")
    for file in map(Path, options.files):
        with _servers(file, options) as servers:
            for in_flight in IN_FLIGHT[:2] if options.quick else IN_FLIGHT:
                cell = _cell(servers, in_flight, options)
                note(report, file=file.name, threads=options.threads, in_flight=in_flight, **cell)
                if options.output:
                    write_json(options.output, report)
    return True


def _cell(servers: Mapping[str, Server], in_flight: int, options: Options) -> dict[str, Any]:
    number = in_flight if options.quick else max(6, 2 * in_flight)
    texts = _mixed()
    trial, work = texts[-number:], texts[:number]
    of_all = {who: [name for name in servers if name.startswith(who)] for who in (OURS, LLAMA)}
    tried = {
        name: servers[name].load(_fresh(trial, f"{in_flight}"), in_flight, options.max_tokens)
        for names in of_all.values()
        for name in names
    }
    racers = {f"{who} {PLAIN}": f"{who} {PLAIN}" for who in of_all}
    for who, names in of_all.items():
        racers[f"{who} {BEST}"] = min(names, key=lambda name: tried[name].per_token)
    turns = {name: dict[int, Load]() for name in dict.fromkeys(racers.values())}
    for turn in range(1 if options.quick else options.turns):
        for name in rotated(list(turns), turn):
            prompts = _fresh(work, f"{in_flight} {turn}")
            turns[name][turn] = servers[name].load(prompts, in_flight, options.max_tokens)
    raced = {racer: turns[name] for racer, name in racers.items()}
    return {
        "num_prompts": number,
        "chosen": {who: racers[f"{who} {BEST}"] for who in of_all},
        "trials_tokens_per_second": {
            name: round(1 / found.per_token, 1) for name, found in tried.items()
        },
        "tokens_per_second": {
            racer: round(1 / statistics.median(load.per_token for load in found.values()), 1)
            for racer, found in raced.items()
        },
        "first_token_ms": {
            racer: round(1e3 * statistics.median(load.first_seconds for load in found.values()), 1)
            for racer, found in raced.items()
        },
        "ratios": {
            f"{kind}, {what}": _ratio(raced, kind, what)
            for kind in (PLAIN, BEST)
            for what in ("per_token", "first_seconds")
        },
    }


def _mixed() -> list[str]:
    """Texts of every domain in turns."""
    return [text for group in zip(*map(builtin_texts, DOMAINS), strict=False) for text in group]


def _fresh(texts: Sequence[str], words: str) -> list[str]:
    return [f"Request {words} {number}. {text}" for number, text in enumerate(texts)]


def _ratio(raced: Mapping[str, Mapping[int, Load]], kind: str, what: str) -> dict[str, Any] | None:
    sides = (
        {turn: getattr(load, what) for turn, load in raced[f"{who} {kind}"].items()}
        for who in (LLAMA, OURS)
    )
    found = paired_ratio(*sides)
    return None if found is None else asdict(found)


@contextmanager
def _servers(file: Path, options: Options) -> Generator[dict[str, Server]]:
    most = max(IN_FLIGHT)
    with ExitStack() as stack:
        url = stack.enter_context(_ours(file, most, options))
        servers = {
            f"{OURS} {name}": Server(url, {} if given is True else {"speculative": given})
            for name, given in OUR_VARIANTS.items()
        }
        llama = stack.enter_context(
            closing(LlamaSide(Path(options.peers) / "llama.cpp" / "build" / "bin"))
        )
        number = 2 if options.quick else None
        for drafter, k, more in islice(THEIR_VARIANTS, number):
            name = " ".join([LLAMA, drafter, *([f"k={k}"] if k else []), *map(str, more.values())])
            kept = {"context": CONTEXT, "parallel": most, **more}
            llama.load(Setup(name, str(file), "", "gguf", drafter, k, options.threads, kept))
            servers[name] = Server(llama.url(name), {"cache_prompt": False})
        yield servers


@contextmanager
def _ours(file: Path, in_flight: int, options: Options) -> Generator[str]:
    command = [sys.executable, "-m", "outrider", "serve", str(file), "--port", "0", "--json"]
    command += ["--threads", str(options.threads), "--batch-size", str(in_flight)]
    command += ["--context", str(CONTEXT)]
    command += ["--tokenizer", options.tokenizer] if options.tokenizer else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline() if process.stdout else "")["url"]
        finally:
            process.terminate()
            process.wait(60)
