"""Two ratios that a change must not spoil, each with its band; CI runs this after the tests.

    python benchmarks/gate.py [--output FILE]

- The native forward against the reference forward: a pass of the embedded target over 1 row and
  over 9, at context 256. Without a compiler it is refused, and says so.
- Speculation against plain decoding: tokens a second of the embedded pair, greedy, K = 4. Their
  texts must be equal.

Both sides take turns on one thread each and the median of many turns counts, so a busy machine
slows both alike. The bands leave room for other machines, and have an upper edge too, since a side
that is too fast has left out work; `docs/gates.md` has what was measured. The last line is one JSON
object. Exit code 1: a ratio is outside its band.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.machine import Neighbours, provenance
from outrider.bench.store import write_json
from outrider.bench.workload import WORKLOADS, load_prompts
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import Decoder, Room
from outrider.models.loading import LoadOptions, load_model, resolve

FORWARD_BAND = (3.0, 60.0)
# More than K + 1 tokens a pass cannot be.
SPECULATION_BAND = (0.9, 5.0)
K = 4
ROWS = (1, 9)
CONTEXT = 256
NUM_PASSES = 4
NUM_TOKENS = 48
NUM_PROMPTS = 3
NUM_TURNS = {"forward": 15, "speculation": 9}

# Does the work of turn number n and says how much of it that was: tokens, or passes.
Side: TypeAlias = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Gate:
    """`low` <= rate of `ours` / rate of `other` <= `high`. `refusal` says why the ratio cannot be
    taken here; such a gate is shut for nobody."""

    name: str
    low: float
    high: float
    ours: Side
    other: Side
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """The median ratio of `num_turns` turns, None where the gate was refused."""

    gate: Gate
    ratio: float | None
    num_turns: int

    @property
    def holds(self) -> bool:
        return self.ratio is None or self.gate.low <= self.ratio <= self.gate.high

    def line(self) -> str:
        """For people."""
        gate = self.gate
        if self.ratio is None:
            return f"{gate.name}: refused, {gate.refusal}"
        mark = "ok" if self.holds else "OUTSIDE"
        return (
            f"{gate.name}: {self.ratio:.2f}, band {gate.low:g} to {gate.high:g}, "
            f"{self.num_turns} turns: {mark}"
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.gate.name,
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "low": self.gate.low,
            "high": self.gate.high,
            "num_turns": self.num_turns,
            "holds": self.holds,
            "refusal": self.gate.refusal,
        }


def judge(
    gate: Gate,
    *,
    num_turns: int,
    num_attempts: int = 3,
    clock: Callable[[], float] = perf_counter,
) -> Finding:
    """`num_turns` turns after one untimed, by `clock`, which gives seconds. If their median lies
    outside the band, as many are taken again, up to `num_attempts` times, and the median is that of
    all turns so far: a slow minute passes, a slow side stays."""
    if gate.refusal is not None:
        return Finding(gate, None, 0)
    _turn(gate, 0, clock)
    ratios: list[float] = []
    finding = Finding(gate, None, 0)
    for _ in range(num_attempts):
        ratios += [_turn(gate, len(ratios) + i, clock) for i in range(num_turns)]
        finding = Finding(gate, statistics.median(ratios), len(ratios))
        if finding.holds:
            break
    return finding


def _turn(gate: Gate, number: int, clock: Callable[[], float]) -> float:
    """One ratio of rates; who begins changes from turn to turn."""
    sides = (gate.ours, gate.other)
    rates = [0.0, 0.0]
    for place in (0, 1) if number % 2 == 0 else (1, 0):
        started = clock()
        amount = sides[place](number)
        rates[place] = amount / (clock() - started)
    return rates[0] / rates[1]


def main(words: Sequence[str] | None = None, *, clock: Callable[[], float] = perf_counter) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args(words)
    # A pool of two whose second core is busy makes the reference ten times slower.
    torch.set_num_threads(1)
    with Neighbours() as neighbours:
        findings = [
            judge(gate, num_turns=NUM_TURNS[kind], clock=clock)
            for kind, gate in (*forwards(), speculation())
        ]
    report: dict[str, Any] = {
        "benchmark": "gate",
        "provenance": provenance(),
        "foreign_cpu_share": neighbours.share,
        "gates": [finding.to_dict() for finding in findings],
        "holds": all(finding.holds for finding in findings),
    }
    for finding in findings:
        print(finding.line())
    if options.output:
        write_json(options.output, report)
    print(json.dumps(report))
    return 0 if report["holds"] else 1


def forwards() -> list[tuple[str, Gate]]:
    """A gate a number of rows."""
    native, reference = embedded(force_reference=False), embedded(force_reference=True)
    choice = native.kernels.choices[0]
    refusal = None if choice.name.startswith("native") else "; ".join(choice.refusals)
    return [
        (
            "forward",
            Gate(
                f"native / reference forward, {rows} row{'s' * (rows > 1)}",
                *FORWARD_BAND,
                passes(native, rows),
                passes(reference, rows),
                refusal,
            ),
        )
        for rows in ROWS
    ]


def embedded(*, force_reference: bool) -> Decoder:
    """The embedded target, with a sequence of CONTEXT tokens in memory."""
    room = Room(num_slots=CONTEXT + 256, max_logits=max(ROWS))
    options = LoadOptions(room=room, device="cpu", threads=1, force_reference=force_reference)
    model = load_model(resolve("outrider/embedded"), options)
    model.state.open(0, ())
    ids = [(7 * i) % model.spec.vocab_size for i in range(CONTEXT)]
    model.step([StepRow.chain(0, ids, logits_from=len(ids))], DraftNeeds())
    model.state.commit({0: range(len(ids))})
    return model


def passes(model: Decoder, rows: int) -> Side:
    """Passes over a chain of so many rows, all of whose logits are wanted; nothing is kept."""
    row = StepRow.chain(0, [(11 * i) % model.spec.vocab_size for i in range(rows)])

    def run(turn: int) -> int:
        del turn
        for _ in range(NUM_PASSES):
            model.step([row], DraftNeeds())
            model.state.commit({0: ()})
        return NUM_PASSES

    return run


def speculation() -> tuple[str, Gate]:
    """Greedy texts of the same prompts with a draft and without."""
    params = SamplingParams(max_tokens=NUM_TOKENS)
    prompts = [p for name in WORKLOADS for p in load_prompts(name)[:NUM_PROMPTS]]
    texts: dict[str, tuple[int, ...]] = {}

    def side(drafter: str, k: int) -> Side:
        llm = LLM(config=EngineConfig(drafter=drafter, k=k, device="cpu", threads=1))

        def run(turn: int) -> int:
            prompt = prompts[turn % len(prompts)]
            ids = llm.generate(prompt, params)[0].token_ids
            if texts.setdefault(prompt, ids) != ids:
                raise SystemExit(f"speculation changed a greedy text: {prompt[:60]!r}")
            return len(ids)

        return run

    name = f"speculation / plain decoding, K = {K}"
    return "speculation", Gate(name, *SPECULATION_BAND, side("model", K), side("none", 0))


if __name__ == "__main__":
    sys.exit(main())
