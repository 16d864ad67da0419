"""Requests to GGUF files beside llama-server: `run.py gguf_requests --files FILE...`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Report, cells_before, note, study
from gguf_sides import OURS, PLAIN, Side, Turn, sides_of
from options import Options

from outrider import LLM
from outrider.core.errors import ConfigError, OutriderError
from outrider.plugins.measure.turns import Ratio, rotated
from outrider_lab.bench.peers.contestants import LLAMA, TRANSFORMERS
from outrider_lab.bench.peers.match import HOPELESS
from outrider_lab.bench.peers.process import Cpu
from outrider_lab.bench.workload import ECHO, builtin_texts
from outrider_lab.measure.frame import paired_ratio
from outrider_lab.measure.store import write_json

BEST = "best"
# Each with what its best speculation should have over llama.cpp's best.
WORKLOADS = {
    "chat": ("conversation", 1.5),
    "quoting": (ECHO, 2.0),
    "code": ("code", 2.0),
    "translation": ("translation", 2.0),
}
# Written as a message to the model, where it has a template for those.
AS_CHAT = ("chat", "translation")
OVER_SERVER = 1.15
# Speculation is measured by the most threads alone.
THREADS = (1, 2)
# Prompts that count for nothing but the choice of variants.
NUM_TRIALS, TRIAL_TOKENS = 2, 48
# Texts that end sooner tell nothing.
LEAST_TOKENS = 16


@study(files=[], peers="", tokenizer="", real="", num_prompts=6, max_tokens=64)
def gguf_requests(options: Options, report: Report) -> bool | None:
    """Is one request after the other served faster than by llama-server, plain and at its best?

    On each workload the best variant of both is chosen on prompts that are not counted; then both
    plain and both best write the same prompts in turns, texts until they end. Ours is `LLM` of this
    process; llama.cpp counts its own seconds. Ratios are of seconds a token, prompt by prompt, ours
    the faster where above 1. One thread writes plain chat alone. transformers takes part as well,
    plain and with prompt lookup, where --real, a folder that scripts/real_model writes, has the
    file's weights in bfloat16. Cells that --output has are not measured again.
    """
    if not options.files:
        raise ConfigError("no file is named.", hint="--files MODEL.gguf")
    report["cells"] = cells_before(options.output)
    for file in map(Path, options.files):
        for threads in THREADS:
            _measure(file, threads, options, report)
    report["bars"] = bars_of(report["cells"])
    return all(cell["same_as_plain"] for cell in report["cells"])


def _measure(file: Path, threads: int, options: Options, report: Report) -> None:
    done = {cell["cell"] for cell in report["cells"]}
    every = threads == max(THREADS)
    names = {f"{file.name} {threads} {name}": name for name in WORKLOADS if every or name == "chat"}
    if done.issuperset(names):
        return
    with sides_of(file, threads, options, every=every) as (llm, sides):
        for cell, workload in names.items():
            if cell not in done:
                prompts = [_encoded(llm, text, workload) for text in _texts(workload, options)]
                about = {"cell": cell, "file": file.name, "threads": threads, "workload": workload}
                note(report, **about, **cell_of(sides, prompts, options))
                if options.output:
                    write_json(options.output, report)


def _texts(workload: str, options: Options) -> list[str]:
    """Those on which variants are chosen, then those that count."""
    texts = builtin_texts(WORKLOADS[workload][0])
    number = 1 if options.quick else options.num_prompts
    return texts[-NUM_TRIALS:] + texts[:number]


def _encoded(llm: LLM, text: str, workload: str) -> list[int]:
    if workload in AS_CHAT:
        try:
            return llm.encode_chat(text)
        except OutriderError:
            # A model without a template continues the text.
            pass
    return llm.tokenizer.encode(text)


def cell_of(
    sides: Mapping[str, Side], prompts: Sequence[Sequence[int]], options: Options
) -> dict[str, Any]:
    max_tokens = LEAST_TOKENS if options.quick else options.max_tokens
    trials, work = prompts[:NUM_TRIALS], prompts[NUM_TRIALS:]
    cpu = Cpu()
    cpu.start()
    entered = (OURS, LLAMA, TRANSFORMERS)
    of_all = {who: [name for name in sides if name.split()[0] == who] for who in entered}
    of_all = {who: names for who, names in of_all.items() if names}
    tried = {who: _tried(sides, names, trials, max_tokens) for who, names in of_all.items()}
    racers: dict[str, str] = {}
    for who, names in of_all.items():
        plain = [name for name in names if name.split()[1] == PLAIN]
        took = _tried(sides, plain, trials, max_tokens) if plain[1:] else dict.fromkeys(plain, 0.0)
        for kind, found in ((PLAIN, took), (BEST, tried[who])):
            racers[f"{who} {kind}"] = min(found, key=lambda name, found=found: found[name])
    turns = {name: dict[int, Turn]() for name in dict.fromkeys(racers.values())}
    for number, ids in enumerate(work):
        for name in rotated(list(turns), number):
            turns[name][number] = sides[name](ids, max_tokens)
    spent = cpu.stop(0)
    raced = {racer: turns[name] for racer, name in racers.items()}
    return {
        "chosen": {who: racers[f"{who} {BEST}"] for who in of_all},
        "trials_seconds_per_token": {who: _rounded(took) for who, took in tried.items()},
        "num_prompts": len(work),
        "tokens_per_second": {racer: _rate(found) for racer, found in raced.items()},
        "ratios": {
            f"{one} over {other}": _over(raced[one], raced[other]) for one, other in _pairs(racers)
        },
        "later_tokens": _later_over(raced[f"{OURS} {PLAIN}"], raced[f"{LLAMA} {PLAIN}"]),
        "num_texts_equal": _num_equal(raced[f"{OURS} {PLAIN}"], raced[f"{LLAMA} {PLAIN}"]),
        "same_as_plain": all(
            turn.ids == raced[f"{OURS} {PLAIN}"][number].ids
            for number, turn in raced[f"{OURS} {BEST}"].items()
        ),
        "foreign_cpu_share": round(spent[2] / spent[3], 4) if spent and spent[3] else None,
    }


def _pairs(racers: Mapping[str, str]) -> list[tuple[str, str]]:
    owners = list(dict.fromkeys(racer.rsplit(" ", 1)[0] for racer in racers))
    found = [
        (f"{OURS} {kind}", f"{who} {kind}")
        for who in owners
        for kind in (PLAIN, BEST)
        if who != OURS
    ]
    return found + [(f"{who} {BEST}", f"{who} {PLAIN}") for who in owners]


def _tried(
    sides: Mapping[str, Side],
    names: Sequence[str],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> dict[str, float]:
    """Seconds a token of those that are near the best after every prompt."""
    took = dict.fromkeys(names, 0.0)
    for number, ids in enumerate(prompts):
        for name in rotated(list(took), number):
            took[name] += sides[name](ids, min(TRIAL_TOKENS, max_tokens)).per_token
        most = HOPELESS * min(took.values())
        took = {name: seconds for name, seconds in took.items() if seconds <= most}
    return {name: seconds / len(prompts) for name, seconds in took.items()}


def _rounded(took: Mapping[str, float]) -> dict[str, float]:
    return {name: round(seconds, 6) for name, seconds in took.items()}


def _long(turns: Mapping[int, Turn]) -> dict[int, Turn]:
    return {number: turn for number, turn in turns.items() if len(turn.ids) >= LEAST_TOKENS}


def _rate(turns: Mapping[int, Turn]) -> float | None:
    found = [turn.per_token for turn in _long(turns).values()]
    return round(1 / statistics.fmean(found), 2) if found else None


def _over(one: Mapping[int, Turn], other: Mapping[int, Turn]) -> dict[str, Any] | None:
    """The speed of `one` over that of `other`."""
    seconds = (
        {number: turn.per_token for number, turn in _long(turns).items()} for turns in (other, one)
    )
    return _told(paired_ratio(*seconds))


def _later_over(one: Mapping[int, Turn], other: Mapping[int, Turn]) -> dict[str, Any] | None:
    """The same of tokens after the first."""
    seconds = (
        {
            number: turn.per_later_token
            for number, turn in _long(turns).items()
            if turn.per_later_token is not None
        }
        for turns in (other, one)
    )
    return _told(paired_ratio(*seconds))


def _told(ratio: Ratio | None) -> dict[str, Any] | None:
    return None if ratio is None else asdict(ratio)


def _num_equal(one: Mapping[int, Turn], other: Mapping[int, Turn]) -> int:
    """Texts that are the same but for a last token that ends them."""
    pairs = ((turn.ids, other[number].ids) for number, turn in one.items())
    return sum(all(a == b for a, b in zip(*pair, strict=False)) for pair in pairs)


def bars_of(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was reached of what should be."""
    found: list[dict[str, Any]] = []
    for cell in cells:
        wanted = {f"{OURS} {PLAIN} over {LLAMA} {PLAIN}": OVER_SERVER}
        if cell["threads"] == max(THREADS):
            wanted[f"{OURS} {BEST} over {LLAMA} {BEST}"] = WORKLOADS[cell["workload"]][1]
        for name, bar in wanted.items():
            ratio: dict[str, Any] | None = cell["ratios"][name]
            value = None if ratio is None else ratio["value"]
            about = {"cell": cell["cell"], "ratio": name, "bar": bar, "value": value}
            found.append(about | {"met": value is not None and value >= bar})
    return found
