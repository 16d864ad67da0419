"""Outrider beside other engines: the same weights, the same prompts as token ids, in turns.

    scripts/peers                                   # builds llama.cpp and OpenVINO GenAI, once
    python benchmarks/vs_peers.py --quick           # does it all work? some minutes
    python benchmarks/vs_peers.py --tier b --formats bf16 --minutes 12 --output FILE

Each engine runs in a process of its own, with all cores and its own fast path, and waits while
another is timed. Draft lengths are chosen for each by the same small sweep on prompts that are not
counted. Then all contestants take turns on every prompt, greedily and at temperature 0.8, until the
minutes are over. An engine that is missing is named, with the command that builds it.
docs/peers.md has the rules. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from peers.cells import BUILD, DRAFTERS, FORMS, PEERS, Weights, command_of, variants
from peers.files import weights_of
from peers.match import Match, Setting
from peers.process import Peer, PeerError
from peers.score import summary

from outrider.api.tokenizer import Tokenizer
from outrider.bench.provenance import provenance, write_json
from outrider.bench.workloads import WORKLOADS, load_prompts
from outrider.core.env import cache_folder

NUM_TRIALS = 2
TRIAL_TOKENS = 48


def main() -> None:
    options = _options()
    folder = options.peers_folder.expanduser().resolve()
    started = time.monotonic()
    weights = weights_of(options.tier, options.formats, folder / "weights", tell)
    peers, missing = start(("outrider", *options.peers), folder)
    try:
        report = compare(options, peers, weights, started + 60 * options.minutes)
    finally:
        for peer in peers.values():
            peer.close()
    report["missing"] = missing
    for name, command in missing.items():
        tell(f"{name} is missing; build it with: {command}")
    report["minutes"] = round((time.monotonic() - started) / 60, 2)
    show(report)
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=("a", "b"), default="a")
    parser.add_argument("--formats", type=_list_of(tuple(FORMS)), default=("bf16", "int8", "int4"))
    parser.add_argument("--peers", type=_list_of(PEERS), default=PEERS)
    parser.add_argument("--drafters", type=_list_of(DRAFTERS), default=DRAFTERS)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--prompts", type=int, default=100, help="of each workload, at most")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=6.0, help="for everything")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--seldom",
        type=_seldom,
        default={},
        metavar="PEER=N",
        help="this peer takes part in every Nth prompt only, as in transformers=4",
    )
    parser.add_argument(
        "--trials",
        type=Path,
        default=None,
        metavar="FILE",
        help="take the best variants from this earlier result",
    )
    parser.add_argument("--quick", action="store_true", help="two prompts of 32 tokens")
    parser.add_argument("--peers-folder", type=Path, default=_cache(), help="of scripts/peers")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.max_tokens = 1, 32
    return options


def _list_of(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(",")) if text else ()
        if strange := sorted(set(found) - set(known)):
            raise argparse.ArgumentTypeError(f"{strange[0]!r} is not one of: {', '.join(known)}")
        return found

    return parse


def _seldom(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    if any(
        name not in PEERS or not number.isdecimal() or not int(number) for name, _, number in pairs
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not PEER=N, as in transformers=4")
    return {name: int(number) for name, _, number in pairs}


def _cache() -> Path:
    return (cache_folder() or Path()) / "peers"


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def start(names: tuple[str, ...], folder: Path) -> tuple[dict[str, Peer], dict[str, str]]:
    """The engines that are there, and how to build the others."""
    peers: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in names:
        command = command_of(name, folder)
        if command is None:
            missing[name] = f"{BUILD} {folder}"
        else:
            peers[name] = Peer(name, command, folder / "logs" / f"{name}.log")
    return peers, missing


def compare(
    options: argparse.Namespace, peers: dict[str, Peer], weights: Weights, deadline: float
) -> dict[str, Any]:
    versions: dict[str, Any] = {}
    for name, peer in list(peers.items()):
        try:
            versions[name] = peer.ask("about")["versions"]
        except PeerError as error:
            versions[name] = f"does not start: {error}"
            del peers[name]
    temperatures = [float(text) for text in options.temperatures.split(",")]
    contestants = [
        contestant
        for form in options.formats
        for name in peers
        for contestant in variants(name, form, options.drafters)
    ]
    trials, work = prompts(weights, options.prompts)
    setting = Setting(peers, weights, options.threads, options.max_tokens, tell, options.seldom)
    match = Match(setting)
    if options.trials:
        earlier = json.loads(options.trials.read_text("utf-8"))
        match.found.trials |= earlier["trials_seconds_per_token"]
    entries = match.choose(contestants, trials, temperatures, min(TRIAL_TOKENS, options.max_tokens))
    match.race(entries, work, deadline)
    return {
        "benchmark": "vs_peers",
        "provenance": provenance(),
        "quick": options.quick,
        "tier": options.tier,
        "threads": options.threads,
        "max_tokens": options.max_tokens,
        "order": "one prompt, all contestants and temperatures, in an order that rotates",
        "versions": versions,
        **summary(match.found),
    }


def prompts(weights: Weights, limit: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of those for the sweep (the last of each workload) and those that count, in turns."""
    tokenizer = Tokenizer.load(weights.draft)
    texts = [load_prompts(name) for name in WORKLOADS]
    trials = [found[-1] for found in texts][:NUM_TRIALS]
    turns = [found[:-1][:limit] for found in texts]
    longest = max(map(len, turns))
    work = [found[i] for i in range(longest) for found in turns if i < len(found)]
    return tokenizer.encode_batch(trials), tokenizer.encode_batch(work)


def show(report: dict[str, Any]) -> None:
    for score in report["scores"]:
        same = score["same_text"]
        told = f", {same['equal']}/{same['of']} texts as ours" if same else ""
        print(
            f"{score['contestant']:52} T={score['temperature']:<4} "
            f"{score['tokens_per_second']:9.2f} tok/s{told}"
        )
    for ratio in report["ratios"]:
        low, high = ratio["low"], ratio["high"]
        interval = f" ({low}-{high})" if low else ""
        print(
            f"{ratio['format']:5} T={ratio['temperature']:<4} {ratio['what']:24} "
            f"{ratio['faster']:7.3f}x{interval}  {ratio['ours']}  against  {ratio['theirs']}"
        )
    for name, reason in report["refused"].items():
        print(f"refused: {name}: {reason[:160]}")


if __name__ == "__main__":
    main()
