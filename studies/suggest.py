"""Rankings of `outrider draft suggest` against measured speed: `run.py suggest [--output FILE]`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from common import TARGET, Report, cells_before, real_folder, study, tier_folders
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import OutriderError
from outrider.plugins.measure.turns import Neighbours, Ratio, rotated
from outrider_lab.bench.workload import builtin_texts
from outrider_lab.measure.frame import medians, paired_ratio
from outrider_lab.measure.store import write_json

# Prompts of a domain by which the command counts acceptance; speed is measured on later ones.
RANKED_ON = 8
FIRST_TWO = 2
PLAIN = "off"
# Of the fastest drafter's speed on the first texts, what a drafter must have to go on.
NEAR = 0.75
# Texts that end sooner tell nothing.
LEAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """A target, a kind of prompts and a temperature. `num_prompts` texts of `num_tokens`, as many
    as the command counts on where passes are quick, are written by every drafter, and `repeats`
    times by those that are near the fastest."""

    tier: str
    domain: str
    temperature: float = 0.0
    num_prompts: int = 6
    num_tokens: int = 96
    repeats: int = 2

    @property
    def name(self) -> str:
        return f"{self.tier} {self.domain} t={self.temperature:g}"


# The tiers in turns: whoever stops early has some of each. Many replies of R end at once.
CELLS = (
    Cell("a", "code", repeats=3),
    Cell("r", "conversation", num_prompts=14),
    Cell("b", "code", num_prompts=5, num_tokens=64, repeats=1),
    Cell("a", "maths", repeats=3),
    Cell("r", "code"),
    Cell("b", "maths", num_prompts=5, num_tokens=64, repeats=1),
    Cell("a", "echo", repeats=3),
    Cell("r", "echo"),
    Cell("a", "conversation", 1.0, repeats=3),
    Cell("r", "conversation", 1.0, num_prompts=14),
    Cell("b", "code", 1.0, num_prompts=5, num_tokens=64, repeats=1),
)


@study(tiers=True, seconds=30.0, real="")
def suggest(options: Options, report: Report) -> None:
    """Is the fastest drafter among the first two that `outrider draft suggest` names?

    Each cell runs the command as a user does, in a process of its own, and then every drafter that
    it ranked, at the K that it advises, in turns with plain decoding, on prompts that the command
    did not see. A cell is a hit if the fastest drafter is one of the two, and no miss if one of
    them cannot be told from the fastest: if the 95 % interval of their ratio of seconds a token,
    prompt by prompt, has 1 in it. Tier R is a real model, the folder that scripts/real_model writes
    (--real). Cells that --output has already are not measured again.
    """
    report["cells"] = cells_before(options.output)
    done = {cell["cell"] for cell in report["cells"]}
    folders = {"r": real_folder(options.real)}
    with tier_folders(options) as made:
        folders |= made
        for cell in _cells(options.quick):
            if cell.name in done or not folders[cell.tier].is_dir():
                continue
            target = TARGET if cell.tier == "a" else str(folders[cell.tier])
            found = _measured(cell, target, 0.0 if options.quick else options.seconds)
            report["cells"].append(found)
            report |= _summary(report["cells"])
            if options.output:
                write_json(options.output, report)
            print(_line(found), flush=True)
    report |= _summary(report["cells"])


def _cells(quick: bool) -> Sequence[Cell]:
    return (Cell("a", "code", num_prompts=1, num_tokens=8),) if quick else CELLS


def _measured(cell: Cell, target: str, seconds: float) -> dict[str, Any]:
    with Neighbours() as neighbours:
        ranking, took = _ranked(cell, target, seconds)
        sides = _written(cell, target, ranking["suggestions"])
    off = sides.pop(PLAIN)
    names = [_name(one) for one in ranking["suggestions"] if _name(one) in sides]
    best = max(names, key=lambda name: sides[name].rate)
    ratios = {name: sides[best].over(sides[name]) for name in names[:FIRST_TWO]}
    chosen = max(sides[name].rate for name in names[:FIRST_TWO])
    hit = best in names[:FIRST_TWO]
    return {
        "cell": cell.name,
        **asdict(cell),
        "ranking": names,
        "expected": {_name(one): one["expected"] for one in ranking["suggestions"]},
        "figures": {_name(one): one["figures"] for one in ranking["suggestions"]},
        "measured": {name: round(side.rate / off.rate, 4) for name, side in sides.items()},
        "tokens_a_round": {name: round(side.tokens_a_round, 3) for name, side in sides.items()},
        "num_texts": {name: side.num_texts for name, side in sides.items()},
        "best": best,
        "hit": hit,
        "of_the_best": round(chosen / sides[best].rate, 4),
        "over_the_best": {name: asdict(ratio) for name, ratio in ratios.items() if ratio},
        "told_apart": not hit and not any(_is_like(ratio) for ratio in ratios.values()),
        "seconds": round(took, 2),
        "memory_limit_bytes": ranking["memory_limit_bytes"],
        "told_seconds": ranking["seconds"],
        "told_peak_bytes": ranking["peak_memory_bytes"],
        "notes": ranking["notes"],
        "foreign_cpu_share": neighbours.share,
    }


def _is_like(ratio: Ratio | None) -> bool:
    """Whether the interval has 1 in it, of as many prompts as an interval takes."""
    return ratio is not None and ratio.verdict == "no measurable difference"


def _ranked(cell: Cell, target: str, seconds: float) -> tuple[dict[str, Any], float]:
    """What the command says, and its seconds from start to end."""
    words = [sys.executable, "-m", "outrider", "draft", "suggest", target, "--json", "--fresh"]
    words += ["--seconds", f"{seconds:g}", "--domains", cell.domain]
    words += ["--temperature", f"{cell.temperature:g}"]
    started = perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    took = perf_counter() - started
    return json.loads(done.stdout), took


def _written(cell: Cell, target: str, suggestions: Sequence[Mapping[str, Any]]) -> dict[str, _Side]:
    """Plain decoding and every drafter that can be loaded, after they wrote their texts."""
    params = SamplingParams(max_tokens=cell.num_tokens, temperature=cell.temperature, seed=1)
    prompts = builtin_texts(cell.domain)[RANKED_ON : RANKED_ON + cell.num_prompts]
    config = EngineConfig(drafter="none", context=1024, batch_size=1)
    off = LLM(target, config=config)
    sides = {PLAIN: _Side(off, params)}
    for one in suggestions:
        if not one["ready"] or one["expected"] is None:
            continue
        own = EngineConfig(drafter=one["drafter"], k=one["expected"]["k"], context=1024)
        try:
            llm = LLM(target, draft=one["draft"], config=own, weights_of=off)
        except OutriderError as error:
            print(f"{_name(one)} cannot run: {error}", file=sys.stderr)
        else:
            sides[_name(one)] = _Side(llm, params)
    near = dict(sides)
    for repeat in range(cell.repeats):
        for number, prompt in enumerate(prompts):
            for name in rotated(list(near), repeat + number):
                near[name].write(prompt)
        fastest = max(side.rate for side in near.values())
        # Plain decoding goes on: all are measured by it.
        near = {
            name: side
            for name, side in near.items()
            if name == PLAIN or side.rate >= NEAR * fastest
        }
    for side in sides.values():
        side.llm.close()
    return sides


@dataclass(slots=True)
class _Side:
    """One drafter, and by prompt the seconds a token, after the first of each text."""

    llm: LLM
    params: SamplingParams
    seconds: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    num_tokens: int = 0
    num_rounds: int = 0

    def write(self, prompt: str) -> None:
        self.llm.forget()
        (result,) = self.llm.generate([prompt], self.params)
        seconds = result.token_seconds[-1] - result.token_seconds[0]
        self.num_tokens += result.stats.num_emitted
        self.num_rounds += result.stats.num_rounds
        if result.num_tokens >= LEAST_TOKENS:
            self.seconds.append((prompt, seconds / (result.num_tokens - 1)))

    @property
    def tokens_a_round(self) -> float:
        return self.num_tokens / max(self.num_rounds, 1)

    @property
    def num_texts(self) -> int:
        return len(self.seconds)

    @property
    def rate(self) -> float:
        """Tokens a second on the mean of all prompts, each by the median of its repeats."""
        return 1 / max(statistics.fmean(medians(self.seconds).values()), 1e-9)

    def over(self, other: _Side) -> Ratio | None:
        """Its seconds a token over those of `other`; below 1 it is the faster one."""
        return paired_ratio(medians(self.seconds), medians(other.seconds))


def _name(one: Mapping[str, Any]) -> str:
    """Without the folder that a draft lies in, which says nothing on another machine."""
    if not one["draft"]:
        return str(one["drafter"])
    draft = Path(one["draft"])
    return f"{one['drafter']}={draft.name if draft.is_absolute() else one['draft']}"


def _summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "num_cells": len(cells),
        "num_hits": sum(cell["hit"] for cell in cells),
        "num_not_told_apart": sum(not cell["hit"] and not cell["told_apart"] for cell in cells),
        "most_seconds": max((cell["seconds"] for cell in cells), default=None),
        "all_in_memory": all(
            cell["told_peak_bytes"] <= (cell["memory_limit_bytes"] or cell["told_peak_bytes"])
            for cell in cells
        ),
    }


def _line(found: Mapping[str, Any]) -> str:
    first = ", ".join(found["ranking"][:FIRST_TWO])
    word = "MISS" if found["told_apart"] else "cannot be told apart"
    verdict = "hit" if found["hit"] else f"{word} ({found['of_the_best']:.2f} of the best)"
    return (
        f"{found['cell']}: {verdict}; named {first}; fastest {found['best']}, "
        f"{found['measured'][found['best']]:.2f}; {found['seconds']:.1f} s, "
        f"{found['told_peak_bytes'] / 1e9:.2f} GB"
    )
