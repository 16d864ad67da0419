"""A long run of requests that come, end and are cancelled: what stays of it, and whether it ages.

    python benchmarks/soak.py --output benchmarks/results/soak.json   # minutes
    python benchmarks/soak.py --requests 200 --schedules single       # a taste

In each tenth of a run the same prompts are asked for, half of them greedily and half drawn with
new seeds, and every twentieth request is cancelled on its way. Resident memory is read after each
tenth. Exit code 1 if pages are missing at the end, if memory after the second tenth grew by more
than 2 %, or if the acceptance of the last tenth is more than 2 % off that of the first.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.request import RequestHandle
from outrider.bench.machine import provenance, resident_bytes
from outrider.bench.store import write_json
from outrider.bench.workload import WORKLOADS, load_prompts

IN_FLIGHT = 8
PARTS = 10
CANCEL_EVERY = 20
TOLERANCE = 0.02


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--schedules", nargs="+", default=["single", "pdv", "ssd"])
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    prompts = [p for name in WORKLOADS for p in load_prompts(name)]
    cells = [soaked(schedule, prompts, options) for schedule in options.schedules]
    report = {"benchmark": "soak", "provenance": provenance(), "cells": cells}
    if options.output:
        write_json(options.output, report)
    sys.exit(not all(cell["holds"] for cell in cells))


def soaked(schedule: str, prompts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(config=EngineConfig(schedule=schedule, batch_size=IN_FLIGHT))
    free = llm.free_tokens
    soak = Soak(llm, prompts, options.requests, options.max_tokens)
    soak.run()
    first, last = soak.parts[0], soak.parts[-1]
    growth = last.resident_bytes / soak.parts[1].resident_bytes - 1
    drift = last.acceptance / first.acceptance - 1
    lost = free - llm.free_tokens
    holds = lost == 0 and growth <= TOLERANCE and abs(drift) <= TOLERANCE
    llm.close()
    print(
        f"{schedule}: {options.requests} requests, tokens lost {lost}, memory {growth:+.2%}, "
        f"acceptance {first.acceptance:.4f} to {last.acceptance:.4f} ({drift:+.2%})"
    )
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


if __name__ == "__main__":
    main()
