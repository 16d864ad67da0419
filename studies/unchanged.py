"""What must not change in a long run, memory and acceptance, and what quantised weights change.

Shapes:  N = tokens, V = vocabulary.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from common import TARGET, Report, first_prompts, note, study
from options import Options
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.request import RequestHandle
from outrider_lab.bench.quality import (
    QUANTISED,
    FormatRow,
    Judge,
    Window,
    compare_formats,
    load_judge,
)
from outrider_lab.measure.machine import resident_bytes

IN_FLIGHT, PARTS, CANCEL_EVERY = 8, 10, 20
TOLERANCE = 0.02
FORMATS = ("float32", "bfloat16", "int8", "int4")
MOST_TOKENS, NUM_NEW, K = 120, 64, 4


@study(requests=2000, max_tokens=32, schedules=["single", "pdv", "ssd"])
def soak(options: Options, report: Report) -> bool:
    """A long run of requests that come, end and are cancelled: what stays of it, and does it age?

    In each tenth of a run the same prompts are asked for, half of them greedily and half drawn with
    new seeds, and every twentieth request is cancelled on its way. Resident memory is read after
    each tenth. Exit status 1 if pages are missing at the end, if memory after the second tenth grew
    by more than 2 %, or if the acceptance of the last tenth is more than 2 % off that of the first.
    """
    if options.quick:
        options.requests, options.schedules = 40, ["single"]
    for schedule in options.schedules:
        note(report, **_soaked(schedule, options))
    # So few requests say nothing of how memory and acceptance age.
    cells = report["cells"]
    return not any(c["tokens_lost"] if options.quick else not c["holds"] for c in cells)


@dataclass(slots=True)
class Part:
    """A tenth of a run."""

    accepted: int = 0
    drafted: int = 0
    emitted: int = 0
    resident_bytes: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True)
class Soak:
    llm: LLM
    prompts: list[str]
    num_requests: int
    max_tokens: int
    parts: list[Part] = field(default_factory=lambda: [Part() for _ in range(PARTS)])
    running: dict[int, RequestHandle] = field(default_factory=dict[int, RequestHandle])

    def run(self) -> None:
        per_part = self.num_requests // PARTS
        for number, part in enumerate(self.parts):
            prompts = cycle(self.prompts)
            for index in range(per_part):
                self._submit(number * per_part + index, index, next(prompts))
                while len(self.running) >= IN_FLIGHT:
                    self._advance(part)
            while self.running:
                self._advance(part)
            gc.collect()
            part.resident_bytes = resident_bytes() or 0
            told = f"part {number + 1}/{PARTS}: acceptance {part.acceptance:.4f}"
            print(f"{told}, {part.resident_bytes >> 20} MiB", file=sys.stderr, flush=True)

    def _submit(self, seed: int, index: int, prompt: str) -> None:
        temperature = 0.0 if index % 2 else 0.8
        params = SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=seed)
        self.running[seed] = self.llm.submit(prompt, params)

    def _advance(self, part: Part) -> None:
        self.llm.advance()
        for number, ticket in list(self.running.items()):
            ids = sum(len(event.token_ids) for event in ticket.events())
            if number % CANCEL_EVERY == 0 and ids and not ticket.done:
                self.llm.cancel(ticket)
                del self.running[number]
            elif ticket.done:
                stats = ticket.result().stats
                part.accepted += stats.num_accepted
                part.drafted += stats.num_drafted
                part.emitted += stats.num_emitted
                del self.running[number]


def _soaked(schedule: str, options: Options) -> dict[str, Any]:
    llm = LLM(config=EngineConfig(schedule=schedule, batch_size=IN_FLIGHT))
    free = llm.free_tokens
    soak = Soak(llm, first_prompts(None), options.requests, options.max_tokens)
    soak.run()
    first, last = soak.parts[0], soak.parts[-1]
    growth = last.resident_bytes / soak.parts[1].resident_bytes - 1
    drift = last.acceptance / first.acceptance - 1
    lost = free - llm.free_tokens
    holds = lost == 0 and growth <= TOLERANCE and abs(drift) <= TOLERANCE
    llm.close()
    return {
        "schedule": schedule,
        "num_requests": options.requests,
        "num_cancelled": llm.counts.cancelled,
        "num_completed": llm.counts.completed,
        "num_tokens": sum(part.emitted for part in soak.parts),
        "tokens_lost": lost,
        "memory_growth": growth,
        "acceptance_drift": drift,
        "parts": [
            {
                "acceptance": part.acceptance,
                "drafted": part.drafted,
                "resident_bytes": part.resident_bytes,
            }
            for part in soak.parts
        ],
        "holds": holds,
    }


@study()
def quantise_error(options: Options, report: Report) -> None:
    """What quantised weights change in the embedded target: logits, perplexity, acceptance.

    Every format reads the same prompts (the beginnings of HumanEval and GSM8K). Against the
    checkpoint in float32 it is told how far logits are off, relative to their spread; the mean
    divergence of the distributions in nats; how often the first choice is the same. Perplexity is
    that of the prompts themselves, from their second token on. Acceptance is that of the embedded
    draft, greedy, K = 4: speculation is exact with respect to the quantised target, so all that its
    error can cost is this.
    """
    texts = first_prompts(2 if options.quick else 40)
    judges = {name: load_judge(TARGET, name, "cpu") for name in FORMATS}
    encode = judges[FORMATS[0]].tokenizer.encode
    windows = [tuple(encode(text)[:MOST_TOKENS]) for text in texts]
    report |= {"num_prompts": len(windows), "num_tokens": sum(map(len, windows)), "k": K}
    report["formats"] = {
        row.form: figures(row, relative_error(judges, row, windows), acceptance(row.form, texts))
        for row in compare_formats(judges.__getitem__, FORMATS, windows)
    }
    for name, found in report["formats"].items():
        print(f"{name:9}", "  ".join(f"{key} {value}" for key, value in found.items()))


def figures(row: FormatRow, error: float, kept: float) -> dict[str, Any]:
    """What the reference has none of is what it has against itself."""
    same = 1.0 if row.same_first_choice is None else row.same_first_choice
    return {
        "relative_error": round(error, 5),
        "mean_divergence_nats": round(row.divergence_nats or 0.0, 6),
        "same_first_choice": round(same, 4),
        "perplexity": None if row.perplexity is None else round(row.perplexity, 4),
        "acceptance": round(kept, 4),
    }


def relative_error(judges: Mapping[str, Judge], row: FormatRow, windows: Sequence[Window]) -> float:
    """How far logits of a format are from those of its reference, relative to their spread."""
    got_NV, wanted_NV = (logits_of(judges[name], windows) for name in (row.form, row.reference))
    return float((got_NV - wanted_NV).norm() / (wanted_NV - wanted_NV.mean(-1, True)).norm())


def logits_of(judge: Judge, windows: Sequence[Window]) -> Tensor:
    """Logits after every token of every window, in float64."""
    return torch.cat([judge.forward(ids, use_cache=False)[0][0].double() for ids in windows])


def acceptance(name: str, texts: Sequence[str]) -> float:
    """The share of drafted tokens that was kept; formats mean what they do in load_judge."""
    dtype, quantise = ("auto", name) if name in QUANTISED else (name, "none")
    config = EngineConfig(k=K, profile=True, device="cpu", dtype=dtype, quantise=quantise)
    results = LLM(config=config).generate(texts, SamplingParams(max_tokens=NUM_NEW))
    rounds = [one for result in results for one in result.rounds]
    return sum(r.num_accepted for r in rounds) / sum(r.num_drafted for r in rounds)
